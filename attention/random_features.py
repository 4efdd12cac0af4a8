"""Performer: random features whose products are exp(q·k) on average.

    φ(x)ᵣ = exp(wᵣ·x - |x|²/2) / √M,    wᵣ ~ N(0, I)
    E[φ(q)·φ(k)] = exp(q·k)

since E[exp(w·(q + k))] = exp(|q + k|²/2). All features are positive, so that the
weights are a distribution as those of softmax, and their relative error is small where
they are small. Rows w that are orthogonal, each with the length of a Gaussian vector,
leave the mean as it is and lower the variance (FAVOR+).

    projection = random_features.gaussian(rng, M, H)
    linear.attention(q, k, v, feature_map=random_features.positive(projection))

approximates `dot_product_attention(q, k, v)` in linear time. |x|² may be in the
hundreds: `linear_sums.LogSums` say how no exponential overflows, nor leaks.

Choromanski et al., 2021, arXiv:2009.14794, lemma 1 and section 2.4.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from attention import linear, numerics


@jax.named_scope("random_projection")
def gaussian(
    rng: PRNGKeyArray,
    num_features: int,
    width: int,
    *,
    orthogonal: bool = True,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "M H"]:
    """Draws the rows w of a projection, each of them N(0, I).

    Args:
      rng: a key; another one redraws.
      num_features: M.
      width: H.
      orthogonal: rows of the same block of H rows are orthogonal; blocks, and lengths,
        are independent. False: all entries are.
      dtype: of the result.

    Returns:
      The projection.

    Raises:
      ValueError: if a size is below 1.
    """
    if num_features < 1 or width < 1:
        raise ValueError(f"sizes must be at least 1, got M={num_features}, H={width}")
    of_rows, of_directions = jax.random.split(rng)
    # Matrices are orthogonalized in float32 at least.
    wide = numerics.accumulation_dtype(jnp.dtype(dtype))
    rows = jax.random.normal(of_rows, (num_features, width), wide)
    if orthogonal:
        blocks = -(-num_features // width)
        directions = jax.random.orthogonal(of_directions, width, (blocks,), dtype=wide)
        directions = directions.reshape(blocks * width, width)[:num_features]
        rows = directions * jnp.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(dtype)


def positive(
    projection: Float[Array, "M H"], *, scale: float | None = None
) -> linear.Exponential:
    """The feature map φ of softmax: φ(q)·φ(k) is exp(scale · q·k) on average.

    Args:
      projection: rows w, drawn by `gaussian`.
      scale: multiplies q·k; None: 1/√H, as in `dot_product_attention`.

    Returns:
      φ, to be a `feature_map`: [... H] to [... M].

    Raises:
      ValueError: if the projection is no matrix, or the scale not positive.
    """
    if projection.ndim != 2:
        raise ValueError(f"projection must be [M H], got shape {projection.shape}")
    num_features, width = projection.shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    root = math.sqrt(scale)

    def log(x: Float[Array, "... H"]) -> Float[Array, "... M"]:
        x = jnp.asarray(x) * root
        half_square = jnp.sum(x * x, axis=-1, keepdims=True) / 2
        products = x @ projection.T.astype(x.dtype)
        return products - half_square - math.log(num_features) / 2

    return linear.Exponential(log)
