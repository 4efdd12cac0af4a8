"""Performer: random features whose products are exp(q·k) on average.

    φ(x)ᵣ = exp(wᵣ·x - |x|²/2) / √M,    wᵣ ~ N(0, I)
    E[φ(q)·φ(k)] = exp(q·k)

since E[exp(w·(q + k))] = exp(|q + k|²/2). All features are positive. The weights are
therefore a probability distribution, as those of softmax are, and small weights have a
small relative error. Orthogonal rows w, each with the length of a Gaussian vector, keep
the expectation and lower the variance (FAVOR+).

    projection = random_features.gaussian(rng, M, H)
    linear.attention(q, k, v, feature_map=random_features.positive(projection))

approximates `dot_product_attention(q, k, v)` in linear time. |x|² may be in the
hundreds; `linear_sums.LogSums` keeps the exponentials from overflowing without looking
at future keys.

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
    """Draws the rows w of a random projection; each row is distributed as N(0, I).

    Args:
      rng: a random key.
      num_features: M, the number of rows.
      width: H, the width of queries and keys.
      orthogonal: True makes the rows within each block of H rows orthogonal to one
        another; the blocks and the lengths of the rows stay independent. False draws
        all entries independently.
      dtype: dtype of the result.

    Returns:
      The projection [M H].

    Raises:
      ValueError: if a size is below 1.

    Reference: Choromanski et al., 2021, arXiv:2009.14794, section 2.4.
    """
    if num_features < 1 or width < 1:
        raise ValueError(f"sizes must be at least 1, got M={num_features}, H={width}")
    rows_rng, directions_rng = jax.random.split(rng)
    # Matrices are orthogonalized in float32 or float64.
    wide = numerics.accumulation_dtype(jnp.dtype(dtype))
    rows = jax.random.normal(rows_rng, (num_features, width), wide)
    if orthogonal:
        blocks = -(-num_features // width)
        directions = jax.random.orthogonal(directions_rng, width, (blocks,), dtype=wide)
        directions = directions.reshape(blocks * width, width)[:num_features]
        rows = directions * jnp.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(dtype)


def positive(
    projection: Float[Array, "M H"], *, scale: float | None = None
) -> linear.Exponential:
    """The positive feature map φ of softmax: E[φ(q)·φ(k)] = exp(scale · q·k).

        log φ(x)ᵣ = wᵣ·y - |y|²/2 - log(M)/2,    y = √scale · x

    Args:
      projection: the rows w, as `gaussian` draws them.
      scale: multiplies q·k; None: 1/√H, the default of `dot_product_attention`.

    Returns:
      φ: [... H] to [... M], for the argument `feature_map` of `linear.attention`.

    Raises:
      ValueError: if the projection is not a matrix, or the scale is not positive.

    Reference: Choromanski et al., 2021, arXiv:2009.14794, lemma 1.
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
