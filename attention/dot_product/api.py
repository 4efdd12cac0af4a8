"""The public entry: dot-product attention on [B T N H], any implementation.

    o = softmax(mod(cap(scale · q kᵀ)) + bias, over the keys that the mask shows) v

`dot_product_attention` has the signature and the meaning of
`jax.nn.dot_product_attention` and goes beyond it: lazy masks, score modifiers, soft
caps, sinks, dropout, values of another width, any leading batch dimensions, float64
computed in float64. One deviation, in every implementation: a query that sees no key
gives 0, not the mean of the values.

| implementation | what it is                                                        |
|----------------|-------------------------------------------------------------------|
| 'reference'    | the dense form of `attention.softmax`: every feature, any backend |
| 'flash'        | every feature in blocks (`dot_product.flash`): memory O(T + S)    |
| 'xla'          | `jax.nn.dot_product_attention`'s dense form, with its limits      |
| 'cudnn'        | its fused kernel on CUDA, with narrower limits                    |

An implementation that cannot honour an argument raises; nothing is silently ignored.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from attention import masks, softmax
from attention.dot_product import arguments, choice, flash, jax_nn, reference

Outputs = tuple[Float[Array, "B T N D"], Float[Array, "B T N"] | None]
Implementation = Callable[[Array, Array, Array, arguments.Options], Outputs]


@jax.named_scope("dot_product_attention")
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K D"],
    bias: Float[Array, "..."] | None = None,
    mask: masks.Mask | Bool[Array, "..."] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "*B"] | None = None,
    key_value_seq_lengths: Int[Array, "*B"] | None = None,
    local_window_size: arguments.WindowSize | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    score_mod: softmax.ScoreMod | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = False,
    precision: lax.PrecisionLike = None,
) -> Any:
    """Attends: each query's mean of the values, weighted by how well the keys fit.

    Scores, softmax and sums are in float32 for narrower inputs, in float64 for
    float64. Without leading dimensions the batch is one row. All masks are combined
    with and.

    Args:
      query: queries.
      key: keys; K divides N, query head n reads key head n // (N / K).
      value: values, of any width D.
      bias: added to the scores; broadcast from the right against [*B N T S].
      mask: a `masks.Mask`, whose arrays index the flattened batch, or a boolean array
        that broadcasts from the right against [*B N T S]. True = may attend.
      scale: multiplies q·k; None: 1/√H.
      is_causal: query i sees keys j ≤ i, aligned top-left also when T ≠ S; other
        alignments are `mask=masks.causal(offset=...)`.
      query_seq_lengths: the output of a query at or past its row's length is 0.
      key_value_seq_lengths: keys and values at or past their row's length reach
        nothing, NaN and infinities included.
      local_window_size: (left, right) distances, both inclusive; one number for both.
      implementation: a name of `IMPLEMENTATIONS`; None: the fastest one for platform,
        sizes and arguments, as `explain` says.
      return_residual: also return the log-sum-exp of every row.
      score_mod: `score_mod(score, q_index, kv_index, *, batch, head) -> score`.
      softcap: c in c · tanh(score / c), before `score_mod`.
      sinks: per query head a score that takes weight and has no value.
      dropout_rate: the probability of dropping a weight; needs `dropout_rng`.
      dropout_rng: a key; what is dropped depends on it, on the indices of batch,
        head, query and key, and on nothing else.
      broadcast_dropout: drop the same weights in every row and head.
      precision: of the matrix products, as for `jax.numpy.matmul`.

    Returns:
      [*B T N D] in the value's dtype; with `return_residual` a pair of it and the
      log-sum-exp [*B T N], sinks included: -inf where there is neither a key to see
      nor a sink. That of 'xla' and 'cudnn' has no gradient.

    Raises:
      TypeError: if an array is of the wrong kind, such as a mask that is not boolean.
      ValueError: if shapes, or the dtypes of query, key and value, do not fit, or the
        implementation cannot honour an argument.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, "
            f"got {implementation!r}"
        )
    rows, options = arguments.bind(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        score_mod=score_mod,
        softcap=softcap,
        sinks=sinks,
        precision=precision,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        return_residual=return_residual,
    )
    q, k, v, _ = rows
    name = implementation or choice.choose(q, k, v, options)
    with jax.named_scope(name):
        output, residual = IMPLEMENTATIONS[name](q, k, v, options)
    output = rows.restore(output).astype(v.dtype)
    if residual is None:
        return output
    return output, rows.restore(residual).astype(k.dtype)


@jax.named_scope("attention_weights")
def attention_weights(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    bias: Float[Array, "..."] | None = None,
    mask: masks.Mask | Bool[Array, "..."] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "*B"] | None = None,
    key_value_seq_lengths: Int[Array, "*B"] | None = None,
    local_window_size: arguments.WindowSize | None = None,
    score_mod: softmax.ScoreMod | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*B N T S"]:
    """The weights with which `dot_product_attention` averages the values.

    Args:
      query: queries.
      key: keys; K divides N, query head n reads key head n // (N / K).
      bias: added to the scores; broadcast from the right against [*B N T S].
      mask: a `masks.Mask`, whose arrays index the flattened batch, or a boolean array
        that broadcasts from the right against [*B N T S]. True = may attend.
      scale: multiplies q·k; None: 1/√H.
      is_causal: query i sees keys j ≤ i.
      query_seq_lengths: a query at or past its row's length has no weights.
      key_value_seq_lengths: a key at or past its row's length has no weight.
      local_window_size: (left, right) distances, both inclusive; one number for both.
      score_mod: `score_mod(score, q_index, kv_index, *, batch, head) -> score`.
      softcap: c in c · tanh(score / c), before `score_mod`.
      sinks: per query head a score that takes weight and has no value.
      precision: of the matrix products, as for `jax.numpy.matmul`.

    Returns:
      Weights in float32 (float64 for float64), before dropout: rows sum to 1, less the
      weight of a sink; 0 where masked and in the rows of queries that see no key.

    Raises:
      TypeError: if an array is of the wrong kind, such as a mask that is not boolean.
      ValueError: if shapes, or the dtypes of query and key, do not fit.
    """
    rows, options = arguments.bind(
        query,
        key,
        key,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        score_mod=score_mod,
        softcap=softcap,
        sinks=sinks,
        precision=precision,
    )
    return rows.restore(reference.weights(rows.query, rows.key, options))


def explain(*args: Any, **kwargs: Any) -> str:
    """Says which implementation a call would use, and why it would use no other.

    Args:
      *args: positional arguments of a call of `dot_product_attention`.
      **kwargs: keyword arguments of that call; `implementation` is ignored.

    Returns:
      One line for each implementation, the chosen one first.

    Raises:
      TypeError: if an array is of the wrong kind, such as a mask that is not boolean.
      ValueError: if shapes, or the dtypes of query, key and value, do not fit.
    """
    call = inspect.signature(dot_product_attention).bind(*args, **kwargs)
    call.apply_defaults()
    del call.arguments["implementation"]
    rows, options = arguments.bind(*call.args, **call.kwargs)
    return choice.explain(rows.query, rows.key, rows.value, options)


IMPLEMENTATIONS: Mapping[str, Implementation] = types.MappingProxyType(
    {
        "reference": reference.attention,
        "flash": flash.attention,
        "xla": functools.partial(jax_nn.attention, "xla"),
        "cudnn": functools.partial(jax_nn.attention, "cudnn"),
    }
)
