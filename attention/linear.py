"""Linear attention: weights that factor, so that only sums over the keys are kept.

    oᵢ = φ(qᵢ)ᵀ S / φ(qᵢ)ᵀ z,    S = Σⱼ φ(kⱼ) vⱼᵀ,    z = Σⱼ φ(kⱼ)

over all keys, or over j ≤ i where it is causal. φ(q)·φ(k) stands where softmax has
exp(q·k), and the state (S, z) is all that has to be known of the past.

| form        | of a causal call                                             | time   |
|-------------|--------------------------------------------------------------|--------|
| 'quadratic' | the weight of every query and key, and their mean            | T²     |
| 'recurrent' | S ← S + φ(k) vᵀ, z ← z + φ(k), one token after another       | T      |
| 'chunked'   | quadratic in each chunk of C tokens, the state between chunks | T · C |

A call that is not causal adds up all keys and reads the sums, but for the quadratic
form. Katharopoulos et al., 2020, arXiv:2006.16236.
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
    """φ(x) = elu(x) + 1: x + 1 above zero, exp(x) below. Positive, with M = H."""
    # Not elu(x) + 1, which is (exp(x) - 1) + 1 below zero: 0 from -17 on.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


@jax.named_scope("linear_attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    feature_map: FeatureMap = elu_plus_one,
    is_causal: bool = False,
    key_mask: Bool[Array, "B S"] | None = None,
    form: str = "chunked",
    chunk: int | None = None,
) -> Float[Array, "B T N D"]:
    """Attends with weights φ(q)·φ(k), in time and memory O(T + S).

    Features and sums are in float32 for narrower inputs, in float64 for float64.

    Args:
      query: queries.
      key: keys; K divides N, query head n reads key head n // (N / K).
      value: values, of any width D.
      feature_map: φ, of the last axis. Features of either sign are allowed, but the
        weights of a query must not cancel. That of an `Exponential` cannot overflow.
      is_causal: query i sees keys j ≤ i; S must be T.
      key_mask: True = real; others reach nothing, NaN and infinities included.
      form: a name of `FORMS`.
      chunk: tokens of a chunk of a causal call of the form 'chunked'; None: as many
        as are fast.

    Returns:
      [B T N D] in the value's dtype; 0 for a query that sees nothing.

    Raises:
      TypeError: if an array is of the wrong kind.
      ValueError: if shapes do not fit, on an unknown form, or a chunk without chunks.

    Reference: Katharopoulos et al. 2020, arXiv:2006.16236.
    """
    _check(query, key, value, key_mask, is_causal)
    one_head = _one_head(form, chunk, is_causal)
    state = empty(key, value, feature_map=feature_map)
    return _lift(one_head, state, query, key, value, feature_map, key_mask)[1]


@jax.named_scope("linear_attention")
def extend(
    state: State | LogState,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K D"],
    *,
    feature_map: FeatureMap = elu_plus_one,
    key_mask: Bool[Array, "B T"] | None = None,
    form: str = "chunked",
    chunk: int | None = None,
) -> tuple[Any, Float[Array, "B T N D"]]:
    """Causal attention of the next tokens of sequences, given the state of their past.

    Args:
      state: from `empty`, or of the tokens before from `extend`; of this feature map.
      query: queries of any number of tokens.
      key: their keys.
      value: their values.
      feature_map: as in `attention`.
      key_mask: as in `attention`; what is not real leaves the state as it is.
      form: as in `attention`.
      chunk: as in `attention`.

    Returns:
      The state after these tokens, and their output: that of `attention` on the whole
      sequence, wherever it is cut.

    Raises:
      TypeError: as `attention`.
      ValueError: as `attention`, or if the state does not fit.
    """
    _check(query, key, value, key_mask, is_causal=True)
    one_head = _one_head(form, chunk, is_causal=True)
    fresh = empty(key, value, feature_map=feature_map)
    found, wanted = (jax.tree.map(jnp.shape, x) for x in (state, fresh))
    if found != wanted:
        raise ValueError(f"state must fit features and heads, {wanted}, got {found}")
    return _lift(one_head, state, query, key, value, feature_map, key_mask)


def empty(
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    feature_map: FeatureMap = elu_plus_one,
) -> State | LogState:
    """The state before the first token of sequences with such keys and values.

    Args:
      key: only its shape and dtype count.
      value: the like.
      feature_map: as in `attention`.

    Returns:
      A state of each row and key/value head: arrays [B K ...], float32 at least.

    Raises:
      TypeError: as `attention`.
      ValueError: as `attention`.
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
    """One token of one head: its key and value are kept, then its query reads.

    Args:
      state: of the tokens before; a `State`, or a `LogState`.
      query: φ(q), or log φ(q) for a `LogState`.
      key: φ(k), or log φ(k) for a `LogState`.
      value: v.

    Returns:
      The state after this token, and its output.
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
    """The weight of every query and key; of a `LogState`, feature by feature."""
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
    """One token after another."""
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
    """One chunk after another; without causality, all keys at once."""
    if not is_causal:
        state = state.add(key, value)
        return state, state.read(query)
    length = query.shape[0]
    size = min(chunk or _CHUNKS[type(state)], max(length, 1))
    whole = length - length % size

    # For the derivative weights are computed again: to keep them takes most memory.
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
# Of one head: (state, φ(q), φ(k), v, is_causal) -> (state after all keys, output).
FORMS: Mapping[str, Form] = types.MappingProxyType(
    {"quadratic": _quadratic, "recurrent": _recurrent, "chunked": _chunked}
)
# Tokens of a chunk: for logarithms few, since a weight takes M exponentials there.
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
    key_mask: Bool[Array, "B S"] | None,
) -> tuple[Any, Float[Array, "B T N D"]]:
    """Maps to features; lifts one head over heads and rows."""
    (B, T, N, _), (*_, K, D) = query.shape, value.shape
    dtype = numerics.accumulation_dtype(value.dtype)
    wide = [jnp.asarray(x, dtype) for x in (query, key, value)]
    # Before the features as well as after: 0 · NaN is NaN.
    wide[1:] = [checks.only_real(x, key_mask, 0) for x in wide[1:]]
    queries = linear_sums.features(feature_map, wide[0])
    keys = linear_sums.features(feature_map, wide[1], key_mask)
    queries = queries.reshape(B, T, K, N // K, queries.shape[-1])
    # All query heads of a group share one state: None, and no axis of its own.
    group = jax.vmap(one_head, (None, 1, None, None), (None, 1))
    one_row = jax.vmap(group, (0, 1, 1, 1), (0, 1))
    state, output = jax.vmap(one_row)(state, queries, keys, wide[2])
    return state, output.reshape(B, T, N, D).astype(value.dtype)


def _check(
    query: Array, key: Array, value: Array, key_mask: Array | None, is_causal: bool
) -> None:
    checks.one_batch_axis(query, key, value)
    if is_causal and query.shape[1] != key.shape[1]:
        raise ValueError(f"causal needs T = S, got {query.shape} and {key.shape}")
    checks.token_mask("key_mask", key_mask, key.shape[:2])
