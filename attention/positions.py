"""Positions of tokens: encodings of embeddings, and rotations of queries and keys.

    sinusoidal   PE[p, 2i] = sin(p / base^(2i/E)),  PE[p, 2i+1] = cos(p / base^(2i/E))
    rotary       (a, b) ↦ (a cos θ - b sin θ,  b cos θ + a sin θ),  θ = p / base^(2i/H)

Rotating queries and keys by their positions makes q·k depend on their distance only.
Angles are computed in float32 from int32 positions, whatever the dtype of the model:
bfloat16 cannot tell position 257 from 256.

Vaswani et al. 2017, arXiv:1706.03762 (sinusoidal); Su et al. 2021, arXiv:2104.09864
(rotary); Chen et al. 2023, arXiv:2306.15595 (its scaling). Positions that act on the
scores are in `attention.score_mods`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from attention import numerics


@jax.named_scope("sinusoidal_positions")
def sinusoidal(
    positions: Int[ArrayLike, "..."], width: int, *, base: float = 10000.0
) -> Float[Array, "... E"]:
    """Sines and cosines of geometrically falling frequency, to add to embeddings.

    Args:
      positions: absolute positions.
      width: E, even; sine at even and cosine at odd indices.
      base: ratio of the longest to the shortest wavelength.

    Returns:
      float32.

    Raises:
      ValueError: if the width is odd or not positive.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    angles = _angles(positions, width, base, dtype=jnp.float32)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:-1], width)


@jax.named_scope("rotary_positions")
def rotary(
    x: Float[ArrayLike, "*B T N H"],
    positions: Int[ArrayLike, "*#B T"],
    *,
    base: float = 10000.0,
    layout: str = "half",
    scaling: float = 1.0,
) -> Float[Array, "*B T N H"]:
    """Rotates pairs of a query's or key's entries by angles that grow with position.

    The sign is the paper's: counterclockwise for positive positions, so that [1, 0]
    at position p becomes [cos p, sin p]. The pair i turns by p / base^(2i/H).

    Args:
      x: queries or keys; H even.
      positions: absolute positions, [T] for all rows or with the batch dimensions
        of `x` (each equal or 1).
      base: wavelengths run from 2π to 2π · base.
      layout: which entries form pair i. 'half': i and i + H/2 (GPT-NeoX, Llama in
        most libraries); 'interleaved': 2i and 2i + 1 (the paper, GPT-J). Weights
        trained with one are wrong with the other.
      scaling: positions are divided by it (linear interpolation, to stretch a
        trained context).

    Returns:
      The rotated array, in the dtype of `x`; computed in float64 for float64 and in
      float32 otherwise.

    Raises:
      TypeError: if `x` is not floating or positions are not integers.
      ValueError: if H is odd, shapes do not fit, or an option is unusable.

    Reference: Su et al. 2021, arXiv:2104.09864; scaling: Chen et al. 2023,
    arXiv:2306.15595.
    """
    x, positions = jnp.asarray(x), jnp.asarray(positions)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating, got {x.dtype}")
    if x.ndim < 3:
        raise ValueError(f"x must be [*B T N H], got {list(x.shape)}")
    if positions.ndim == 1:
        positions = positions.reshape((1,) * (x.ndim - 3) + positions.shape)
    batch = x.shape[:-2]
    if positions.ndim != len(batch) or any(
        p not in (1, b) for p, b in zip(positions.shape, batch, strict=True)
    ):
        raise ValueError(
            f"positions must be [{batch[-1]}] or {list(batch)} to fit x "
            f"{list(x.shape)}, got {list(positions.shape)}"
        )
    if scaling <= 0:
        raise ValueError(f"scaling must be positive, got {scaling}")
    dtype = numerics.accumulation_dtype(x.dtype)
    angles = _angles(positions, x.shape[-1], base, dtype=dtype, scaling=scaling)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    wide = x.astype(dtype)
    if layout == "half":
        a, b = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    elif layout == "interleaved":
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        raise ValueError(f"layout must be 'half' or 'interleaved', got {layout!r}")
    return rotated.reshape(x.shape).astype(x.dtype)


def _angles(
    positions: Int[ArrayLike, "..."],
    width: int,
    base: float,
    *,
    dtype: DTypeLike,
    scaling: float = 1.0,
) -> Float[Array, "... M"]:
    if width < 2 or width % 2:
        raise ValueError(f"the width must be even and at least 2, got {width}")
    positions = _int32(positions, name="positions")
    frequencies = base ** -(np.arange(0, width, 2) / width) / scaling
    frequencies = frequencies.reshape((1,) * positions.ndim + (width // 2,))
    return positions.astype(dtype)[..., None] * jnp.asarray(frequencies, dtype)


def _int32(x: ArrayLike, *, name: str) -> Int[Array, "..."]:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    return x.astype(jnp.int32)
