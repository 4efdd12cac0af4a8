"""Where a token stands: encodings to add, rotations, biases of the scores.

    sinusoidal   PE[p, 2i] = sin(p / base^(2i/E)),  PE[p, 2i+1] = cos(p / base^(2i/E))
    rotary       (a, b) ↦ (a cos θ - b sin θ,  b cos θ + a sin θ),  θ = p / base^(2i/H)
    ALiBi        score[i, j] - slope · |i - j|
    T5 buckets   one learned bias per bucket of j - i, exact near and logarithmic far

Rotating queries and keys by their positions makes q·k depend on their distance only.
Angles are computed in float32 from int32 positions, whatever the dtype of the model:
bfloat16 cannot tell position 257 from 256.

Vaswani et al. 2017, arXiv:1706.03762 (sinusoidal); Su et al. 2021, arXiv:2104.09864
(rotary); Chen et al. 2023, arXiv:2306.15595 (its scaling); Press et al. 2021,
arXiv:2108.12409 (ALiBi); Raffel et al. 2019, arXiv:1910.10683 (T5).
"""

import math

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
    positions: Int[ArrayLike, "T"] | Int[ArrayLike, "*B T"],
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


def alibi_slopes(num_heads: int) -> Float[np.ndarray, "N"]:
    """The slope of each head: 2^(-8/n), 2^(-16/n), ... for a power of two n.

    For other numbers those of the next lower power n, then every other one of 2n's,
    as in the authors' code.

    Args:
      num_heads: N.

    Returns:
      float32, positive.

    Raises:
      ValueError: if `num_heads` is less than 1.

    Reference: Press et al. 2021, arXiv:2108.12409.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    n = 1 << (num_heads.bit_length() - 1)
    lower = 2.0 ** (-8.0 / n * np.arange(1, n + 1))
    between = 2.0 ** (-4.0 / n * np.arange(1, 2 * n, 2))
    return np.concatenate([lower, between])[:num_heads].astype(np.float32)


def alibi(
    slopes: Float[ArrayLike, "N"],
    query_positions: Int[ArrayLike, "T"] | Int[ArrayLike, "B T"] | None = None,
    key_positions: Int[ArrayLike, "S"] | Int[ArrayLike, "B S"] | None = None,
) -> jax.tree_util.Partial:
    """A score modifier: score - slope · |position of query - position of key|.

    Of the distance the absolute value is taken, so the bias is never positive and
    the same to both sides; a causal mask shows only one of them.

    Args:
      slopes: one per query head, see `alibi_slopes`.
      query_positions: absolute position of query i; None: i itself. A decoding step
        has one query and must say where it stands.
      key_positions: the same for keys.

    Returns:
      `score_mod(score, q_index, kv_index, *, batch, head) -> score`, a pytree of the
      given arrays: it passes through jit as an argument, and gradients reach slopes.

    Reference: Press et al. 2021, arXiv:2108.12409.
    """
    return jax.tree_util.Partial(
        _alibi, jnp.asarray(slopes), query_positions, key_positions
    )


@jax.named_scope("relative_buckets")
def relative_buckets(
    relative_position: Int[ArrayLike, "..."],
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool,
) -> Int[Array, "..."]:
    """Numbers the buckets of T5's relative attention bias.

    With n buckets for distances d: d < n/2 has its own; beyond it
    n/2 + ⌊n/2 · log(d / (n/2)) / log(max_distance / (n/2))⌋, at most n - 1.

    Args:
      relative_position: position of the key minus position of the query.
      num_buckets: in all.
      max_distance: distances from here on share the last bucket.
      bidirectional: True: n = num_buckets / 2, and keys after the query use the
        upper half. False: n = num_buckets, and keys after the query count as
        distance 0.

    Returns:
      int32 in [0, num_buckets).

    Raises:
      TypeError: if positions are not integers.
      ValueError: if there are too few buckets, an odd number of them for two
        directions, or no distances beyond the exact ones.

    Reference: Raffel et al. 2019, arXiv:1910.10683, section 2.1.
    """
    relative_position = _int32(relative_position, name="relative_position")
    if bidirectional and num_buckets % 2:
        raise ValueError(f"num_buckets must be even, got {num_buckets}")
    n = num_buckets // 2 if bidirectional else num_buckets
    exact = n // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            "num_buckets must leave an exact bucket, and max_distance go beyond them; "
            f"got num_buckets={num_buckets}, max_distance={max_distance}"
        )
    # A table, since float32 logarithms differ between backends just at the borders.
    far = np.log(np.arange(exact, max_distance + 1) / exact)
    steps = np.floor(far / math.log(max_distance / exact) * (n - exact) + 1e-9)
    of_distance = np.concatenate([np.arange(exact), exact + steps])
    table = np.minimum(of_distance, n - 1).astype(np.int32)
    if not bidirectional:
        distance = jnp.maximum(-relative_position, 0)
        return jnp.take(jnp.asarray(table), distance, mode="clip")
    bucket = jnp.take(jnp.asarray(table), jnp.abs(relative_position), mode="clip")
    return jnp.where(relative_position > 0, bucket + n, bucket)


def _alibi(
    slopes: Float[Array, "N"],
    query_positions: Array | None,
    key_positions: Array | None,
    score: Float[Array, "..."],
    q_index: Int[Array, "..."],
    kv_index: Int[Array, "..."],
    *,
    batch: Int[Array, "..."],
    head: Int[Array, "..."],
) -> Float[Array, "..."]:
    query = _position(query_positions, q_index, batch)
    key = _position(key_positions, kv_index, batch)
    distance = jnp.abs(query - key).astype(score.dtype)
    return score - slopes[head].astype(score.dtype) * distance


def _position(
    positions: ArrayLike | None, index: Array, batch: Array
) -> Int[Array, "..."]:
    if positions is None:
        return index
    positions = _int32(positions, name="positions")
    return positions[index] if positions.ndim == 1 else positions[batch, index]


def _angles(
    positions: Int[ArrayLike, "..."],
    width: int,
    base: float,
    *,
    dtype: DTypeLike,
    scaling: float = 1.0,
) -> Float[Array, "... E/2"]:
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
