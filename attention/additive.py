"""Additive attention: a small network says how well a key fits a query.

    eᵢⱼ = v · tanh(qᵢ + kⱼ)                qᵢ = W sᵢ,  kⱼ = U hⱼ
    wᵢⱼ = mᵢⱼ exp(eᵢⱼ) / Σⱼ mᵢⱼ exp(eᵢⱼ)
    oᵢ  = Σⱼ wᵢⱼ vⱼ

with s the states of a decoder, h the annotations of an encoder, and mᵢⱼ ∈ {0, 1} the
mask (True = may attend). The first attention of all: Bahdanau et al., 2015,
arXiv:1409.0473, equations 5 and 6 and appendix A.1.2. |eᵢⱼ| ≤ Σₕ |vₕ|, so the scores
need no scale; but each costs H values of tanh, T·S·H in all, which no matrix product
can form. They are formed for one query at a time, and anew for the derivative, so that
memory stays O(T + S).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from attention import checks, heads, masks, numerics, softmax


@jax.named_scope("additive_attention")
def attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K D"],
    score_vector: Float[Array, "N H"],
    mask: masks.Mask | Bool[Array, "..."] | None = None,
    *,
    token_mask: Bool[Array, "*B S"] | None = None,
) -> Float[Array, "*B T N D"]:
    """Attends: each query's mean of the values, weighted by v · tanh(q + k).

    Scores, softmax and sums are in float32 for narrower inputs, in float64 for
    float64. Weights [T S] are never formed whole.

    Args:
      query: projected queries, W s.
      key: projected keys, U h; K divides N, query head n reads key head n // (N / K).
      value: values, of any width D; in the paper h itself.
      score_vector: v, one for each query head.
      mask: a `masks.Mask`, whose arrays index the flattened batch, or a boolean array
        that broadcasts from the right against the flattened batch's [B N T S]. True =
        may attend.
      token_mask: False marks padding: keys and values that reach nothing, NaN and
        infinities included. So do those past the lengths of a `masks.lengths`.

    Returns:
      [*B T N D] in the value's dtype; 0 for a query that sees no key.

    Raises:
      TypeError: if an array is of the wrong kind, such as a mask that is not boolean.
      ValueError: if shapes, or the dtypes of query, key and value, do not fit.
    """
    output = _lift(
        jnp.matmul, 1, query, key, value, score_vector, mask, token_mask=token_mask
    )
    return output.astype(value.dtype)


@jax.named_scope("additive_weights")
def weights(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    score_vector: Float[Array, "N H"],
    mask: masks.Mask | Bool[Array, "..."] | None = None,
    *,
    token_mask: Bool[Array, "*B S"] | None = None,
) -> Float[Array, "*B N T S"]:
    """The weights with which `attention` averages the values.

    Args:
      query: projected queries, W s.
      key: projected keys, U h; K divides N, query head n reads key head n // (N / K).
      score_vector: v, one for each query head.
      mask: a `masks.Mask`, whose arrays index the flattened batch, or a boolean array
        that broadcasts from the right against the flattened batch's [B N T S]. True =
        may attend.
      token_mask: False marks padding: keys that have no weight.

    Returns:
      Weights in float32 (float64 for float64): rows sum to 1; 0 where masked and in
      the rows of queries that see no key.

    Raises:
      TypeError: if an array is of the wrong kind, such as a mask that is not boolean.
      ValueError: if shapes, or the dtypes of query and key, do not fit.
    """

    def read_weights(weights: Array, value: Array) -> Array:
        del value
        return weights

    return _lift(
        read_weights, 0, query, key, key, score_vector, mask, token_mask=token_mask
    )


def scores(
    query: Float[Array, "H"], key: Float[Array, "S H"], score_vector: Float[Array, "H"]
) -> Float[Array, "S"]:
    """Scores of one query: v · tanh(q + kⱼ)."""
    return jnp.tanh(query[None] + key) @ score_vector


def _lift(
    read: Callable[[Array, Array], Array],
    out_axis: int,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K D"],
    score_vector: Float[Array, "N H"],
    mask: masks.Mask | Array | None,
    *,
    token_mask: Bool[Array, "*B S"] | None,
) -> Array:
    """Computes `read(weights [S], value [S D])` for every query, head and row."""
    rows = checks.rows(query, key, value)
    (B, T, N, H), S = rows.query.shape, rows.key.shape[1]
    if score_vector.shape != (N, H):
        raise ValueError(
            f"score_vector must be one vector per query head, {[N, H]}, "
            f"got {list(score_vector.shape)}"
        )
    checks.token_mask(token_mask, (*rows.batch, S))
    dtype = numerics.accumulation_dtype(rows.query.dtype)
    visible = _visible(mask, token_mask, (B, N, T, S))
    *arrays, _ = rows.without_padding(visible)

    def one_head(
        query: Float[Array, "T H"],
        key: Float[Array, "S H"],
        value: Float[Array, "S D"],
        score_vector: Float[Array, "H"],
        row: Int[Array, ""],
        head: Int[Array, ""],
    ) -> Array:
        def shown_at(position: Int[Array, ""]) -> Bool[Array, "S"] | None:
            if visible is None:
                return None
            keys = jnp.arange(S, dtype=jnp.int32)
            index = {"batch": row[None], "head": head[None]}
            return visible.at(position[None], keys, **index, length=S)[0, 0, 0]

        def one_query(
            query_at: tuple[Float[Array, "H"], Int[Array, ""]],
        ) -> Array:
            query, position = query_at
            fits = scores(query, key, score_vector)
            return read(softmax.masked_softmax(fits, shown_at(position)), value)

        # Some queries at a time are no faster on a CPU. The derivative computes tanh
        # anew; inside the loop nothing could be merged with that.
        one_query = jax.checkpoint(one_query, prevent_cse=False)
        positions = jnp.arange(T, dtype=jnp.int32)
        return lax.map(one_query, (query, positions))

    output = heads.over_heads(one_head, out_axis=out_axis)(
        *(x.astype(dtype) for x in arrays),
        score_vector.astype(dtype)[None],
        jnp.arange(B, dtype=jnp.int32)[:, None],
        jnp.arange(N, dtype=jnp.int32)[None],
    )
    return rows.restore(output)


def _visible(
    mask: masks.Mask | Array | None,
    token_mask: Bool[Array, "*B S"] | None,
    shape: tuple[int, int, int, int],
) -> masks.Mask | None:
    """Combines both masks; None if every query sees every key."""
    B, N, T, S = shape
    if mask is not None and not isinstance(mask, masks.Mask):
        mask = masks.dense(mask)
    if token_mask is not None:
        real = masks.dense(token_mask.reshape(B, 1, 1, S))
        mask = real if mask is None else mask & real
    if mask is not None:
        # Raises if the mask does not fit; computes no T x S.
        jax.eval_shape(lambda: mask.materialize(T, S, batch_size=B, num_heads=N))
    return mask
