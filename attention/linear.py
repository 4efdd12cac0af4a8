"""Linear attention: weights that factor, so that only sums over the keys are kept.

    oᵢ = φ(qᵢ)ᵀ S / φ(qᵢ)ᵀ z,    S = Σⱼ φ(kⱼ) vⱼᵀ,    z = Σⱼ φ(kⱼ)

over all keys, or over j ≤ i in causal attention. The kernel φ(q)·φ(k) replaces the
exp(q·k) of softmax, and the state (S, z) summarises the whole past.

| form        | how a causal call is computed                                 | time  |
|-------------|---------------------------------------------------------------|-------|
| 'quadratic' | the weights of all pairs of query and key, then their mean    | T²    |
| 'recurrent' | S ← S + φ(k) vᵀ, z ← z + φ(k), one token after another        | T     |
| 'chunked'   | quadratic in each chunk of C tokens, recurrent between chunks | T · C |

Without causality the forms 'recurrent' and 'chunked' sum over all keys first, and every
query reads the same sums. Katharopoulos et al., 2020, arXiv:2006.16236.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from attention import checks, linear_sums, numerics

Exponential = linear_sums.Exponential
FeatureMap = linear_sums.FeatureMap
State = linear_sums.Sums
LogState = linear_sums.LogSums


def elu_plus_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """φ(x) = elu(x) + 1, elementwise: x + 1 for x > 0, else exp(x). Positive; M = H.

    Reference: Katharopoulos et al., 2020, arXiv:2006.16236, equation 7.
    """
    # The sum elu(x) + 1 = (exp(x) - 1) + 1 would round to 0 below x = -17 in float32.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


@jax.named_scope("linear_attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    feature_map: FeatureMap = elu_plus_one,
    is_causal: bool = False,
    token_mask: Bool[Array, "B S"] | None = None,
    form: str = "chunked",
    chunk: int | None = None,
) -> Float[Array, "B T N D"]:
    """Attends with weights φ(q)·φ(k), in time and memory O(T + S).

    Features and sums are in float32 for narrower inputs, in float64 for float64.

    Args:
      query: queries.
      key: keys; K divides N, query head n reads key head n // (N / K).
      value: values, of any width D.
      feature_map: φ, which maps the last axis. Features may be negative, but the
        weights of a query must not sum to 0. An `Exponential` cannot overflow.
      is_causal: query i sees keys j ≤ i; S must equal T.
      token_mask: True = real key, False = padding. Padding has no effect, even if it
        holds NaN or infinities.
      form: 'quadratic', 'recurrent' or 'chunked'; all give the same result.
      chunk: number of tokens in a chunk, for a causal call with form 'chunked'; None
        chooses a fast one.

    Returns:
      [B T N D] in the value's dtype; 0 for a query that sees no key.

    Raises:
      TypeError: if query, key or value is not floating, or the mask not boolean.
      ValueError: if shapes do not fit, the form is unknown, or a chunk size is passed
        to a call that does not use chunks.

    Reference: Katharopoulos et al., 2020, arXiv:2006.16236, equations 5 and 12.
    """
    _check(query, key, value, token_mask, is_causal)
    one_head = _one_head(form, chunk, is_causal)
    state = empty(key, value, feature_map=feature_map)
    return _lift(one_head, state, query, key, value, feature_map, token_mask)[1]


@jax.named_scope("linear_attention")
def extend(
    state: State | LogState,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K D"],
    *,
    feature_map: FeatureMap = elu_plus_one,
    token_mask: Bool[Array, "B T"] | None = None,
    form: str = "chunked",
    chunk: int | None = None,
) -> tuple[Any, Float[Array, "B T N D"]]:
    """Causal attention of the next tokens, continuing from the state of the past.

    Args:
      state: (S, z) of the tokens so far, computed with the same feature map: the
        result of `empty` before the first token, of the previous `extend` afterwards.
      query: queries of the next tokens, of any number T.
      key: keys of the same tokens.
      value: values of the same tokens.
      feature_map: φ, which maps the last axis.
      token_mask: True = real token, False = padding, which leaves the state unchanged.
      form: 'quadratic', 'recurrent' or 'chunked'; all give the same result.
      chunk: number of tokens in a chunk, for form 'chunked'; None chooses a fast one.

    Returns:
      The state after these tokens, and their output [B T N D]. The outputs of
      consecutive calls, concatenated, equal one causal call of `attention` on the
      whole sequence.

    Raises:
      TypeError: if query, key or value is not floating, or the mask not boolean.
      ValueError: if shapes do not fit, the form is unknown, a chunk size is passed to
        another form than 'chunked', or the state does not fit features and heads.

    Reference: Katharopoulos et al., 2020, arXiv:2006.16236, equations 16 to 20.
    """
    _check(query, key, value, token_mask, is_causal=True)
    one_head = _one_head(form, chunk, is_causal=True)
    fresh = empty(key, value, feature_map=feature_map)
    shapes, expected = (jax.tree.map(jnp.shape, x) for x in (state, fresh))
    if shapes != expected:
        raise ValueError(f"state must fit features and heads, {expected}, got {shapes}")
    return _lift(one_head, state, query, key, value, feature_map, token_mask)


def empty(
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    feature_map: FeatureMap = elu_plus_one,
) -> State | LogState:
    """The state before the first token: S = 0 and z = 0.

    Args:
      key: an array with the shape and dtype of the keys; its numbers are not used.
      value: an array with the shape and dtype of the values.
      feature_map: φ, which maps the last axis.

    Returns:
      The state of every row and key/value head: arrays [B K ...], in float32, or in
      float64 for float64 keys.

    Raises:
      TypeError: if key or value is not floating.
      ValueError: if shapes do not fit.
    """
    _check(key, key, value, None, is_causal=False)
    dtype = numerics.accumulation_dtype(key.dtype)
    key, value = (jnp.asarray(x[:, :0], dtype) for x in (key, value))
    one_row = jax.vmap(linear_sums.kind(feature_map).empty, in_axes=1)
    return jax.vmap(one_row)(linear_sums.features(feature_map, key), value)


def step(
    state: Any,
    query: Float[Array, "M"],
    key: Float[Array, "M"],
    value: Float[Array, "D"],
) -> tuple[Any, Float[Array, "D"]]:
    """One token of one head: S ← S + φ(k) vᵀ, z ← z + φ(k), o = φ(q)ᵀ S / φ(q)ᵀ z.

    Args:
      state: the sums over the previous tokens, a `State` or a `LogState`.
      query: φ(q), or log φ(q) for a `LogState`.
      key: φ(k), or log φ(k) for a `LogState`.
      value: v.

    Returns:
      The state after this token, and the token's output o.

    Reference: Katharopoulos et al., 2020, arXiv:2006.16236, equations 18 to 20.
    """
    state = state.add(key[None], value[None])
    return state, state.read(query[None])[0]


def _quadratic(
    state: Any,
    query: Float[Array, "T M"],
    key: Float[Array, "S M"],
    value: Float[Array, "S D"],
    is_causal: bool,
) -> tuple[Any, Float[Array, "T D"]]:
    """Computes the weight of every pair; with a `LogState`, feature by feature."""
    visible = jnp.ones((query.shape[0], key.shape[0]), bool)
    if is_causal:
        visible = jnp.tril(visible)
    return state.add(key, value), state.attend(query, key, value, visible)


def _recurrent(
    state: Any,
    query: Float[Array, "T M"],
    key: Float[Array, "S M"],
    value: Float[Array, "S D"],
    is_causal: bool,
) -> tuple[Any, Float[Array, "T D"]]:
    """Processes one token after another."""
    if is_causal:
        return lax.scan(lambda state, x: step(state, *x), state, (query, key, value))
    state, _ = lax.scan(
        lambda state, x: (state.add(x[0][None], x[1][None]), None), state, (key, value)
    )
    return state, state.read(query)


def _chunked(
    state: Any,
    query: Float[Array, "T M"],
    key: Float[Array, "S M"],
    value: Float[Array, "S D"],
    is_causal: bool,
    *,
    chunk: int | None = None,
) -> tuple[Any, Float[Array, "T D"]]:
    """Processes one chunk after another; without causality, all keys at once."""
    if not is_causal:
        state = state.add(key, value)
        return state, state.read(query)
    length = query.shape[0]
    size = min(chunk or _CHUNKS[type(state)], max(length, 1))
    whole = length - length % size

    # The backward pass recomputes the weights: storing them takes the most memory.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(state: Any, x: tuple[Array, ...]) -> tuple[Any, Array]:
        query, key, value = x
        return _quadratic(state, query, key, value, is_causal=True)

    arrays = query, key, value
    chunks = tuple(x[:whole].reshape(-1, size, x.shape[1]) for x in arrays)
    state, outputs = lax.scan(one_chunk, state, chunks)
    output = outputs.reshape(whole, value.shape[1])
    if whole < length:
        state, rest = one_chunk(state, tuple(x[whole:] for x in arrays))
        output = jnp.concatenate([output, rest])
    return state, output


Form = Callable[..., tuple[Any, Float[Array, "T D"]]]
# For one head: (state, φ(q), φ(k), v, is_causal) -> (state after all keys, output).
FORMS: Mapping[str, Form] = types.MappingProxyType(
    {"quadratic": _quadratic, "recurrent": _recurrent, "chunked": _chunked}
)
# Tokens in a chunk: few for log features, where each weight costs M exponentials.
_CHUNKS: Mapping[type, int] = types.MappingProxyType({State: 128, LogState: 16})


def _one_head(name: str, chunk: int | None, is_causal: bool) -> Form:
    if name not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {name!r}")
    form = functools.partial(FORMS[name], is_causal=is_causal)
    if chunk is None:
        return form
    if name != "chunked" or not is_causal or chunk < 1:
        raise ValueError(
            f"chunk={chunk} must be at least 1, with is_causal and form='chunked', "
            f"got is_causal={is_causal} and form={name!r}"
        )
    return functools.partial(form, chunk=chunk)


def _lift(
    one_head: Form,
    state: State | LogState,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    feature_map: FeatureMap,
    token_mask: Bool[Array, "B S"] | None,
) -> tuple[Any, Float[Array, "B T N D"]]:
    """Computes the features and maps the function of one head over heads and rows."""
    (B, T, N, _), (*_, K, D) = query.shape, value.shape
    dtype = numerics.accumulation_dtype(value.dtype)
    wide = [jnp.asarray(x, dtype) for x in (query, key, value)]
    # Padding is cleared before the feature map and after it: 0 · NaN is NaN.
    wide[1:] = [checks.only_real(x, token_mask, 0) for x in wide[1:]]
    queries = linear_sums.features(feature_map, wide[0])
    keys = linear_sums.features(feature_map, wide[1], token_mask)
    queries = queries.reshape(B, T, K, N // K, queries.shape[-1])
    # All query heads of a group share one state, hence in_axes=None for it.
    group = jax.vmap(one_head, (None, 1, None, None), (None, 1))
    one_row = jax.vmap(group, (0, 1, 1, 1), (0, 1))
    state, output = jax.vmap(one_row)(state, queries, keys, wide[2])
    return state, output.reshape(B, T, N, D).astype(value.dtype)


def _check(
    query: Array, key: Array, value: Array, token_mask: Array | None, is_causal: bool
) -> None:
    checks.one_batch_axis(query, key, value)
    if is_causal and query.shape[1] != key.shape[1]:
        raise ValueError(f"causal needs T = S, got {query.shape} and {key.shape}")
    checks.token_mask(token_mask, key.shape[:2])
