"""Implementation 'reference': the dense form of every feature, on any backend.

The one-head functions of `attention.softmax`, lifted over heads and batch. Memory is
O(T·S); everything is computed in float32 at least.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import dropout, heads, numerics, softmax
from attention.dot_product import arguments


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    options: arguments.Options,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"] | None]:
    """Attends, with weights [T S] in memory.

    Args:
      query: queries.
      key: keys.
      value: values.
      options: masks, bias and all that changes scores or weights.

    Returns:
      The output and, with `options.return_residual`, the log-sum-exp of every row, both
      in float32 (float64 for float64).
    """

    def one_head(
        query: Float[Array, "T H"],
        key: Float[Array, "S H"],
        value: Float[Array, "S D"],
        *rest: Any,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T"]]:
        weights, residual = _one_head_weights(options, query, key, *rest)
        if options.dropout_rng is not None:
            *_, batch, head = rest
            if options.broadcast_dropout:
                batch = head = jnp.int32(0)
            rng = dropout.of_head(options.dropout_rng, batch, head)
            weights = dropout.apply(weights, rng, rate=options.dropout_rate)
        return jnp.matmul(weights, value, precision=options.precision), residual

    output, residual = heads.over_heads(one_head, out_axis=1)(
        *_wide(query, key, value), *_per_head(query, key, options)
    )
    return output, residual if options.return_residual else None


def weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    options: arguments.Options,
) -> Float[Array, "B N T S"]:
    """Computes the weights, before dropout."""

    def one_head(query: Array, key: Array, _: Array, *rest: Any) -> Array:
        return _one_head_weights(options, query, key, *rest)[0]

    return heads.over_heads(one_head, out_axis=0)(
        *_wide(query, key, key), *_per_head(query, key, options)
    )


def _one_head_weights(
    options: arguments.Options,
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    mask: Bool[Array, "#T #S"] | None,
    bias: Float[Array, "#T #S"] | None,
    sink: Float[Array, ""] | None,
    batch: Int[Array, ""],
    head: Int[Array, ""],
) -> tuple[Float[Array, "T S"], Float[Array, "T"]]:
    scores = softmax.scores(
        query,
        key,
        bias,
        scale=jnp.asarray(options.scale, query.dtype),
        softcap=options.softcap,
        score_mod=options.score_mod,
        batch=batch,
        head=head,
        precision=options.precision,
    )
    return softmax.masked_softmax_and_log_normalizer(scores, mask, sink=sink)


def _wide(*arrays: Array) -> list[Array]:
    """Casts to the dtype in which scores, softmax and sums are computed."""
    return [x.astype(numerics.accumulation_dtype(x.dtype)) for x in arrays]


def _per_head(query: Array, key: Array, options: arguments.Options) -> tuple[Any, ...]:
    """Lists the arrays that differ between heads or rows: they start with [#B #N]."""
    batch_size, _, num_heads, _ = query.shape
    dtype = numerics.accumulation_dtype(query.dtype)
    bias, sinks = options.bias, options.sinks
    return (
        arguments.materialize(options.visible, query, key),
        None if bias is None else bias.astype(dtype),
        None if sinks is None else jnp.asarray(sinks, dtype)[None],
        jnp.arange(batch_size, dtype=jnp.int32)[:, None],
        jnp.arange(num_heads, dtype=jnp.int32)[None],
    )
