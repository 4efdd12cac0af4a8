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
| 'xla'          | `jax.nn.dot_product_attention`'s dense form, with its limits      |
| 'cudnn'        | its fused kernel on CUDA, with narrower limits                    |

An implementation that cannot honour an argument raises; nothing is silently ignored.
jax.nn masks with a finite number, so under 'xla' a weight is exactly 0 only while the
visible scores of its row stay above about -2e38; and its log-sum-exp has no gradient.
"""

import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, masks, reference, softmax

Outputs = tuple[Float[Array, "B T N D"], Float[Array, "B T N"] | None]
# Bound here, so that ours may stand in jax.nn's place; overloaded by return_residual.
_JAX_NN: Any = jax.nn.dot_product_attention
Implementation = Callable[[Array, Array, Array, arguments.Options], Outputs]


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
    local_window_size: int | tuple[int, int] | None = None,
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
      implementation: a name of `IMPLEMENTATIONS`; None: what `choose` says.
      return_residual: also return the log-sum-exp of every row.
      score_mod: `score_mod(score, q_index, kv_index, *, batch, head) -> score`.
      softcap: c in c · tanh(score / c), before `score_mod`.
      sinks: per query head a score that takes weight and has no value.
      dropout_rate: the probability of dropping a weight; needs `dropout_rng`.
      dropout_rng: a key; what is dropped depends on it, on the indices of batch,
        head, query and key, and on nothing else.
      broadcast_dropout: drop the same weights in every row and head.
      precision: of the matrix products, as in `jax.numpy.matmul`.

    Returns:
      [*B T N D] in the value's dtype; with `return_residual` a pair of it and the
      log-sum-exp [*B T N], sinks included: -inf where there is neither a key to see
      nor a sink. That of 'xla' and 'cudnn' has no gradient.

    Raises:
      TypeError: if an array is of the wrong kind, such as a mask that is not boolean.
      ValueError: if shapes, or the dtypes of query, key and value, do not fit, or the
        implementation cannot honour an argument.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    batch = arguments.check_inputs(query, key, value)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, "
            f"got {implementation!r}"
        )
    options = arguments.options(
        query,
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
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        return_residual=return_residual,
    )
    rows = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)]
    q, k, v = _without_padding(options.visible, *rows)
    name = implementation or choose(q, k, v, options)
    output, residual = IMPLEMENTATIONS[name](q, k, v, options)
    output = output.reshape(*query.shape[:-1], value.shape[-1]).astype(value.dtype)
    if residual is None:
        return output
    return output, residual.reshape(query.shape[:-1]).astype(key.dtype)


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
    local_window_size: int | tuple[int, int] | None = None,
    score_mod: softmax.ScoreMod | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*B N T S"]:
    """The weights with which `dot_product_attention` averages the values.

    Args are those of `dot_product_attention`; dropout is not applied.

    Returns:
      Weights in float32 (float64 for float64): rows sum to 1, less what a sink takes;
      0 where masked and in the rows of queries that see nothing.
    """
    query, key = jnp.asarray(query), jnp.asarray(key)
    batch = arguments.check_inputs(query, key, key)
    options = arguments.options(
        query,
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
        dropout_rate=0.0,
        dropout_rng=None,
        broadcast_dropout=False,
        precision=precision,
        return_residual=False,
    )
    rows = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key)]
    q, k = _without_padding(options.visible, *rows)
    weights = reference.weights(q, k, options)
    return weights.reshape(*batch, *weights.shape[1:])


def _without_padding(
    visible: masks.Mask | None, query: Array, *keys_and_values: Array
) -> list[Array]:
    """Zeros in place of rows that nothing may see, since 0 · NaN is NaN."""
    if visible is None:
        return [query, *keys_and_values]

    def clear(x: Array, valid: Bool[Array, "B|1 L"] | None) -> Array:
        return x if valid is None else jnp.where(valid[:, :, None, None], x, 0)

    valid_keys = visible.valid_keys(keys_and_values[0].shape[1])
    return [
        clear(query, visible.valid_queries(query.shape[1])),
        *(clear(x, valid_keys) for x in keys_and_values),
    ]


def choose(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    options: arguments.Options,
) -> str:
    """The name that stands for `implementation=None`, by platform and arguments.

    On CUDA cuDNN's kernel where it honours every argument, gradients included;
    otherwise, and on every other platform, the reference.
    """
    _, length, _, width = query.shape
    window = options.local_window_size
    suits_cudnn = (
        _on_cuda()
        and not _jax_nn_limits(query, key, value, options)
        and query.dtype in (jnp.float16, jnp.bfloat16)
        and width <= 128
        and width % 8 == 0
        and isinstance(options.scale, (int, float))
        # The kernel differentiates a bias, as which it takes a mask, in some shapes
        # only, and the log-sum-exp not at all.
        and options.bias is None
        and (options.mask is None or length % 2 == key.shape[1] % 2 == 0)
        and not options.return_residual
        and (window is None or window[1] == 0 or options.is_causal)
    )
    return "cudnn" if suits_cudnn else "reference"


def _on_cuda() -> bool:
    return "cuda" in jax.devices()[0].client.platform_version


def _jax_nn(
    name: Literal["xla", "cudnn"],
    query: Array,
    key: Array,
    value: Array,
    options: arguments.Options,
) -> Outputs:
    """`jax.nn.dot_product_attention`, save that a query that sees nothing gives 0."""
    if reasons := _jax_nn_limits(query, key, value, options):
        raise ValueError(
            f"implementation={name!r} does not honour {', '.join(reasons)}; "
            f"use implementation='reference' or None"
        )
    if name == "cudnn" and not _on_cuda():
        raise ValueError(
            f"implementation='cudnn' needs a CUDA device, got {jax.default_backend()}"
        )
    if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
        # jax.nn asks for a product of float16 that CPUs do not have.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    window, is_causal = options.local_window_size, options.is_causal
    if window is not None and (is_causal or window[1] == 0):
        # The same keys in the only words for a window that cuDNN's kernel knows.
        window, is_causal = (window[0], 0), True
    outputs = _JAX_NN(
        query,
        key,
        value,
        options.bias,
        arguments.materialize(options.mask, query, key),
        scale=options.scale,
        is_causal=is_causal,
        query_seq_lengths=options.query_seq_lengths,
        key_value_seq_lengths=options.key_value_seq_lengths,
        local_window_size=window,
        implementation=name,
        return_residual=options.return_residual,
    )
    output, residual = outputs if options.return_residual else (outputs, None)
    visible = arguments.materialize(options.visible, query, key)
    if visible is not None:
        sees = jnp.any(visible, axis=-1)  # [B|1 N|1 T|1]
        sees = jnp.swapaxes(sees, 1, 2)
        output = jnp.where(sees[..., None], output, 0)
        if residual is not None:
            residual = jnp.where(sees, residual, -jnp.inf)
    return output, residual


def _jax_nn_limits(
    query: Array, key: Array, value: Array, options: arguments.Options
) -> list[str]:
    """What is asked for and jax.nn does not have, in words; it checks the rest."""
    asked = {
        "float64": query.dtype == jnp.float64,
        "values of another width than the keys": value.shape[-1] != key.shape[-1],
        "no keys": key.shape[1] == 0,
        "score_mod": options.score_mod is not None,
        "softcap": options.softcap is not None,
        "sinks": options.sinks is not None,
        "dropout": options.dropout_rng is not None,
        "precision": options.precision is not None,
    }
    return [words for words, is_asked in asked.items() if is_asked]


IMPLEMENTATIONS: Mapping[str, Implementation] = types.MappingProxyType(
    {
        "reference": reference.attention,
        "xla": functools.partial(_jax_nn, "xla"),
        "cudnn": functools.partial(_jax_nn, "cudnn"),
    }
)
