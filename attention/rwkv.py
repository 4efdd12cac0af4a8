"""RWKV-4's WKV recurrence: an exponentially decaying mean, separate in each channel.

           Σ_{s<t} exp(kₛ + (t-1-s) w) vₛ + exp(u + kₜ) vₜ
    wkvₜ = ───────────────────────────────────────────────
           Σ_{s<t} exp(kₛ + (t-1-s) w)    + exp(u + kₜ)

where w ≤ 0 is the logarithm of the decay per step and u the bonus of the present token.
Peng et al., 2023, arXiv:2305.13048, equation 16; the paper writes the decay as exp(-w).

Both sums are stored relative to their largest term, so that keys of any size neither
overflow nor vanish (appendix D). `rwkv6` is the successor, whose states are matrices.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float

from attention import checks, numerics, recurrence


class State(NamedTuple):
    """Numerator and denominator of the mean over the tokens so far, rescaled.

    Attributes:
      numerator: Σ_{s≤t} exp(kₛ + (t-s) w) vₛ / exp(peak).
      denominator: the same sum without vₛ.
      peak: the largest exponent kₛ + (t-s) w; -inf before the first token.
    """

    numerator: Float[Array, "*B E"]
    denominator: Float[Array, "*B E"]
    peak: Float[Array, "*B E"]


# Keys, values, and a mask that is True at real tokens.
Tokens = tuple[Array, Array, Array]
# (key, value, mask, log decay, bonus, state) -> (state, outputs).
Form = Callable[[Array, Array, Array, Array, Array, State], tuple[State, Array]]

CHUNK = 64  # Tokens between two states that are stored for the backward pass.


def empty(*shape: int, dtype: DTypeLike) -> State:
    """The state before the first token, for arrays of shape [*B E]."""
    zeros = jnp.zeros(shape, dtype)
    return State(zeros, zeros, jnp.full(shape, -jnp.inf, dtype))


def step(
    state: State,
    key: Float[Array, "*B E"],
    value: Float[Array, "*B E"],
    log_decay: Float[Array, "*B E"],
    bonus: Float[Array, "*#B E"],
) -> tuple[State, Float[Array, "*B E"]]:
    """One token: reads wkvₜ, then lets the past decay and adds the token.

    Args:
      state: sums over the previous tokens.
      key: kₜ; -inf gives the token no weight.
      value: vₜ.
      log_decay: w ≤ 0, applied to the previous tokens after wkvₜ has been read.
      bonus: u.

    Returns:
      The state after the token, and wkvₜ, which is 0 if no token has weight.

    Reference: Peng et al., 2023, arXiv:2305.13048, equation 16 and appendix D.
    """
    output = _mean(_then(state, 0, _token(key + bonus, value)))
    return _then(state, log_decay, _token(key, value)), output


def _token(key: Float[Array, "*B E"], value: Float[Array, "*B E"]) -> State:
    return State(value, jnp.ones_like(value), key)


def _then(past: State, log_decay: Float[Array, "*B E"] | int, present: State) -> State:
    """Adds the sums of later tokens to the decayed sums of the past."""
    # The result does not depend on the peak, so the peak needs no gradient.
    peak = lax.stop_gradient(jnp.maximum(past.peak + log_decay, present.peak))
    # The peak of two empty states is -inf, and -inf - -inf would be NaN.
    finite = jnp.where(peak == -jnp.inf, 0, peak)
    # In this order the factor corrects the rounding of past.peak + log_decay, which
    # would otherwise accumulate over the steps.
    kept = jnp.exp((past.peak - finite) + log_decay)
    new = jnp.exp(present.peak - finite)
    return State(
        kept * past.numerator + new * present.numerator,
        kept * past.denominator + new * present.denominator,
        peak,
    )


def _mean(state: State) -> Float[Array, "*B E"]:
    seen = state.denominator > 0
    return jnp.where(seen, state.numerator, 0) / jnp.where(seen, state.denominator, 1)


def _recurrent(
    key: Float[Array, "T B E"],
    value: Float[Array, "T B E"],
    real: Bool[Array, "T B"],
    log_decay: Float[Array, "E"],
    bonus: Float[Array, "E"],
    state: State,
) -> tuple[State, Float[Array, "T B E"]]:
    def one(state: State, token: Tokens) -> tuple[State, Array]:
        key, value, real = token
        # `in_chunks` fills the last chunk with zeros, where the key must be -inf too.
        key = jnp.where(real[:, None], key, -jnp.inf)
        decay = jnp.where(real[:, None], log_decay[None], 0)
        return step(state, key, value, decay, bonus[None])

    def several(state: State, tokens: Tokens) -> tuple[State, Array]:
        return lax.scan(one, state, tokens)

    tokens = key, value, real
    if len(key) <= CHUNK:
        return several(state, tokens)
    return recurrence.in_chunks(several, state, tokens, size=CHUNK)


def _associative(
    key: Float[Array, "T B E"],
    value: Float[Array, "T B E"],
    real: Bool[Array, "T B"],
    log_decay: Float[Array, "E"],
    bonus: Float[Array, "E"],
    state: State,
) -> tuple[State, Float[Array, "T B E"]]:
    def compose(first: tuple[Array, State], second: tuple[Array, State]) -> tuple:
        (decay, sums), (later_decay, later_sums) = first, second
        return decay + later_decay, _then(sums, later_decay, later_sums)

    steps = _with_state(key, value, real, log_decay, state)
    return _read(lax.associative_scan(compose, steps)[1], key, value, bonus)


def _quadratic(
    key: Float[Array, "T B E"],
    value: Float[Array, "T B E"],
    real: Bool[Array, "T B"],
    log_decay: Float[Array, "E"],
    bonus: Float[Array, "E"],
    state: State,
) -> tuple[State, Float[Array, "T B E"]]:
    log_decays, sums = _with_state(key, value, real, log_decay, state)
    scores = recurrence.segment_sums(log_decays) + sums.peak[None]
    peak = lax.stop_gradient(jnp.max(scores, axis=1))
    finite = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(scores - finite[:, None])
    numerator = jnp.einsum("tsbe,sbe->tbe", weights, sums.numerator)
    denominator = jnp.einsum("tsbe,sbe->tbe", weights, sums.denominator)
    return _read(State(numerator, denominator, peak), key, value, bonus)


def _with_state(
    key: Float[Array, "T B E"],
    value: Float[Array, "T B E"],
    real: Bool[Array, "T B"],
    log_decay: Float[Array, "E"],
    state: State,
) -> tuple[Float[Array, "1+T B E"], State]:
    """Decays and sums of every single token, with those of the state before them."""

    def after(first: Array, rest: Array) -> Array:
        return jnp.concatenate([first[None], rest])

    log_decays = jnp.where(real[..., None], log_decay[None, None], 0)
    return after(jnp.zeros_like(state.peak), log_decays), jax.tree.map(
        after, state, _token(key, value)
    )


def _read(
    states: State,
    key: Float[Array, "T B E"],
    value: Float[Array, "T B E"],
    bonus: Float[Array, "E"],
) -> tuple[State, Float[Array, "T B E"]]:
    """The last state, and what each token reads from the state before it."""
    before = jax.tree.map(lambda x: x[:-1], states)
    outputs = _mean(_then(before, 0, _token(key + bonus[None, None], value)))
    return jax.tree.map(lambda x: x[-1], states), outputs


FORMS: Mapping[str, Form] = MappingProxyType(
    {"recurrent": _recurrent, "associative": _associative, "quadratic": _quadratic}
)


@jax.named_scope("rwkv_wkv")
def wkv(
    key: Float[ArrayLike, "B T E"],
    value: Float[ArrayLike, "B T E"],
    log_decay: Float[ArrayLike, "E"],
    bonus: Float[ArrayLike, "E"],
    *,
    token_mask: Bool[ArrayLike, "B T"] | None = None,
    state: State | None = None,
    form: str = "recurrent",
) -> tuple[State, Float[Array, "B T E"]]:
    """The decaying mean wkvₜ of the values, in every channel.

    Args:
      key: k.
      value: v.
      log_decay: w ≤ 0, the logarithm of the decay per step.
      bonus: u, added to the key of the present token.
      token_mask: True = real token, False = padding, which has no weight and lets
        nothing decay.
      state: sums over the previous tokens, arrays [B E]; None: there are none.
      form: 'recurrent' runs step by step, stores few states for the backward pass and
        is the fastest on a CPU; 'associative' is a tree of log T levels; 'quadratic'
        forms all weights [T T E].

    Returns:
      The state after the last token, in float32 (float64 for float64 values); and wkv
      in the dtype of the values, 0 at padding.

    Raises:
      TypeError: if the mask is not boolean.
      ValueError: if shapes do not fit, or the form is unknown.

    Reference: Peng et al., 2023, arXiv:2305.13048, equation 16.
    """
    key, value = jnp.asarray(key), jnp.asarray(value)
    if value.ndim != 3:
        raise ValueError(f"value must be [B T E], got {list(value.shape)}")
    checks.shape("key", key, value.shape)
    batch, length, channels = value.shape
    dtype = numerics.accumulation_dtype(value.dtype)
    log_decay, bonus = jnp.asarray(log_decay, dtype), jnp.asarray(bonus, dtype)
    checks.shape("log_decay", log_decay, (channels,))
    checks.shape("bonus", bonus, (channels,))
    if state is None:
        state = empty(batch, channels, dtype=dtype)
    state = State(*(jnp.asarray(x, dtype) for x in state))
    for name, x in state._asdict().items():
        checks.shape(f"state.{name}", x, (batch, channels))
    run = recurrence.chosen(FORMS, form)
    real = jnp.ones((batch, length), bool)
    tokens = (
        checks.only_real(key.astype(dtype), token_mask, -jnp.inf),
        checks.only_real(value.astype(dtype), token_mask, 0),
        checks.only_real(real, token_mask, False),
    )

    # Channels and rows are independent, so with time first no vmap is needed.
    key, wide_value, real = (jnp.swapaxes(x, 0, 1) for x in tokens)
    state, outputs = run(key, wide_value, real, log_decay, bonus, state)
    outputs = checks.only_real(jnp.swapaxes(outputs, 0, 1), token_mask, 0)
    return state, outputs.astype(value.dtype)
