"""Linformer: attention over keys and values whose length is projected from S to M.

    oᵢ = softmax(scale · qᵢ (E K)ᵀ) F V,    E, F [M S]

The matrix of softmax weights is nearly of low rank: M learned mixtures of all keys
replace the S keys, and time and memory are O(T M + S M). Wang et al.,
2020, arXiv:2006.04768.

It cannot be causal: each row of E K is made of keys of every position.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks, dot_product, numerics


@jax.named_scope("lowrank_attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    key_projection: Float[Array, "M S"] | Float[Array, "K M S"],
    value_projection: Float[Array, "M S"] | Float[Array, "K M S"],
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    token_mask: Bool[Array, "B S"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N D"]:
    """Attends to M mixtures of the keys and values.

    Args:
      query: queries.
      key: keys; K divides N, query head n reads key head n // (N / K).
      value: values, of any width D.
      key_projection: E, shared by all heads or one for each key/value head.
      value_projection: F, of as many rows, shared or one for each key/value head.
      scale: multiplies q·k; None: 1/√H.
      is_causal: must be False.
      token_mask: True = real. Padding adds nothing to any mixture, NaN and infinities
        included, as though E and F were cut to the columns of the real keys.
      implementation: the one that attends to the mixtures, a name of
        `attention.IMPLEMENTATIONS`; None: chosen by platform and size.

    Returns:
      [B T N D] in the value's dtype.

    Raises:
      TypeError: if an array is of the wrong kind.
      ValueError: if shapes do not fit, or on `is_causal=True`.

    Reference: Wang et al. 2020, arXiv:2006.04768, equation 7.
    """
    if is_causal:
        raise ValueError(
            "Linformer cannot be causal: each projected key and value mixes all "
            "positions, later ones included"
        )
    rows = checks.one_batch_axis(query, key, value)
    projections = {"key": key_projection, "value": value_projection}
    _check(rows.key, projections)
    checks.token_mask(token_mask, key.shape[:2])
    dtype = numerics.accumulation_dtype(value.dtype)
    # Not 0 in E and F: 0 · NaN is NaN.
    keys, values = (
        checks.only_real(x.astype(dtype), token_mask, 0) for x in (rows.key, rows.value)
    )
    output = dot_product.dot_product_attention(
        query.astype(dtype),
        _project(key_projection, keys),
        _project(value_projection, values),
        scale=scale,
        implementation=implementation,
    )
    return output.astype(value.dtype)


def _project(
    projection: Float[Array, "M S"] | Float[Array, "K M S"],
    x: Float[Array, "B S K D"],
) -> Float[Array, "B M K D"]:
    """Mixes the positions, for each head of each row."""
    per_head = jax.vmap(
        jnp.matmul, (None if projection.ndim == 2 else 0, 1), out_axes=1
    )
    return jax.vmap(per_head, (None, 0))(projection.astype(x.dtype), x)


def _check(key: Array, projections: dict[str, Array]) -> None:
    _, S, K, _ = key.shape
    rows = projections["key"].shape[-2:-1]
    for name, x in projections.items():
        if not rows or x.shape not in ((*rows, S), (K, *rows, S)):
            raise ValueError(
                f"{name}_projection must be [M S] or [K M S], with S={S}, K={K} and "
                f"the M of the other, got shape {x.shape}"
            )
