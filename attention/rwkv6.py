"""RWKV-6's WKV recurrence: one matrix per head, with a decay that depends on the data.

    yₜ = rₜ (Sₜ₋₁ + diag(u) kₜᵀ vₜ)                  output, with the bonus u
    Sₜ = diag(exp wₜ) Sₜ₋₁ + kₜᵀ vₜ                  state S [H D], log decay wₜ ≤ 0

and therefore yₜ = Σ_{s<t} rₜ diag(exp Σ_{s<i<t} wᵢ) kₛᵀ vₛ + rₜ diag(u) kₜᵀ vₜ, that
is, attention without a softmax. Peng et al., 2024, arXiv:2404.05892, section 4.2.

The chunked form uses matrix products inside each chunk and one step of the state
between chunks. Every decay is the exponential of a sum ≤ 0, never a quotient of two
exponentials, which could overflow.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attention import checks, numerics, recurrence

# Tokens in a chunk. A chunk of c tokens costs c H exponentials per token inside it,
# and H D / c operations per token for the state.
CHUNK = 8

Tokens = tuple[Array, Array, Array, Array]
Form = Callable[[Array, Array, Array, Array, Array, Array], tuple[Array, Array]]


def step(
    state: Float[Array, "H D"],
    receptance: Float[Array, "H"],
    key: Float[Array, "H"],
    value: Float[Array, "D"],
    log_decay: Float[Array, "H"],
    bonus: Float[Array, "H"],
) -> tuple[Float[Array, "H D"], Float[Array, "D"]]:
    """One token of one head: y = r (S + diag(u) kᵀ v), S ← diag(exp w) S + kᵀ v.

    Args:
      state: S before the token.
      receptance: r, the counterpart of a query.
      key: k.
      value: v.
      log_decay: w ≤ 0, applied to S after y has been read.
      bonus: u.

    Returns:
      S after the token, and y.

    Reference: Peng et al., 2024, arXiv:2404.05892, section 4.2.
    """
    present = key[:, None] * value[None, :]
    output = receptance @ (state + bonus[:, None] * present)
    return jnp.exp(log_decay)[:, None] * state + present, output


def _recurrent(
    receptance: Float[Array, "T H"],
    key: Float[Array, "T H"],
    value: Float[Array, "T D"],
    log_decay: Float[Array, "T H"],
    bonus: Float[Array, "H"],
    state: Float[Array, "H D"],
) -> tuple[Float[Array, "H D"], Float[Array, "T D"]]:
    def one(state: Array, token: Tokens) -> tuple[Array, Array]:
        receptance, key, value, log_decay = token
        return step(state, receptance, key, value, log_decay, bonus)

    return lax.scan(one, state, (receptance, key, value, log_decay))


def _quadratic(
    receptance: Float[Array, "T H"],
    key: Float[Array, "T H"],
    value: Float[Array, "T D"],
    log_decay: Float[Array, "T H"],
    bonus: Float[Array, "H"],
    state: Float[Array, "H D"],
) -> tuple[Float[Array, "H D"], Float[Array, "T D"]]:
    left = recurrence.segment_sums(log_decay)
    # Token t reads the state before the decay of step t: row t - 1 of the decays, and
    # an empty row for t = 0.
    before = jnp.concatenate([jnp.full_like(left[:1], -jnp.inf), left[:-1]])
    decayed = key[None] * jnp.exp(before)
    weights = jnp.einsum("th,tsh->ts", receptance, decayed)
    weights += jnp.diag(jnp.einsum("th,h,th->t", receptance, bonus, key))
    since = jnp.cumsum(log_decay, axis=0)
    reach = jnp.exp(jnp.concatenate([jnp.zeros_like(since[:1]), since[:-1]]))
    outputs = weights @ value + (receptance * reach) @ state
    added = (key * jnp.exp(left[-1])).T @ value
    return jnp.exp(since[-1])[:, None] * state + added, outputs


def _chunked(
    receptance: Float[Array, "T H"],
    key: Float[Array, "T H"],
    value: Float[Array, "T D"],
    log_decay: Float[Array, "T H"],
    bonus: Float[Array, "H"],
    state: Float[Array, "H D"],
) -> tuple[Float[Array, "H D"], Float[Array, "T D"]]:
    def one(state: Array, tokens: Tokens) -> tuple[Array, Array]:
        receptance, key, value, log_decay = tokens
        return _quadratic(receptance, key, value, log_decay, bonus, state)

    # A key of 0 and a log decay of 0 leave the state unchanged.
    tokens = receptance, key, value, log_decay
    return recurrence.in_chunks(one, state, tokens, size=CHUNK)


FORMS: Mapping[str, Form] = MappingProxyType(
    {"recurrent": _recurrent, "chunked": _chunked, "quadratic": _quadratic}
)


@jax.named_scope("rwkv6_wkv")
def wkv(
    receptance: Float[ArrayLike, "B T N H"],
    key: Float[ArrayLike, "B T N H"],
    value: Float[ArrayLike, "B T N D"],
    log_decay: Float[ArrayLike, "B T N H"],
    bonus: Float[ArrayLike, "N H"],
    *,
    token_mask: Bool[ArrayLike, "B T"] | None = None,
    state: Float[ArrayLike, "B N H D"] | None = None,
    form: str = "chunked",
) -> tuple[Float[Array, "B N H D"], Float[Array, "B T N D"]]:
    """Computes yₜ = rₜ (Sₜ₋₁ + diag(u) kₜᵀ vₜ) for every token and head.

    Args:
      receptance: r, the counterpart of queries.
      key: k.
      value: v.
      log_decay: w ≤ 0 of every step and key channel; may be -inf.
      bonus: u, the extra weight of the present token.
      token_mask: True = real token, False = padding, which adds nothing to the state
        and lets nothing decay.
      state: S after the previous tokens; None: 0.
      form: 'chunked' is the fastest; 'recurrent' runs step by step; 'quadratic' forms
        all decays [T T H].

    Returns:
      S after the last token, in float32 (float64 for float64 values); and y in the
      dtype of the values, 0 at padding.

    Raises:
      TypeError: if the mask is not boolean.
      ValueError: if shapes do not fit, there is no token, or the form is unknown.

    Reference: Peng et al., 2024, arXiv:2404.05892, section 4.2.
    """
    value = jnp.asarray(value)
    if value.ndim != 4 or not value.shape[1]:
        raise ValueError(f"value must be [B T N D], T > 0, got {list(value.shape)}")
    batch, _, num_heads, value_width = value.shape
    dtype = numerics.accumulation_dtype(value.dtype)
    receptance, key, wide_value, log_decay, bonus = (
        jnp.asarray(x, dtype) for x in (receptance, key, value, log_decay, bonus)
    )
    width = key.shape[-1]
    tokens = *value.shape[:3], width
    checks.shape("receptance", receptance, tokens)
    checks.shape("key", key, tokens)
    checks.shape("log_decay", log_decay, tokens)
    checks.shape("bonus", bonus, (num_heads, width))
    state = recurrence.state_or_zeros(
        state, (batch, num_heads, width, value_width), dtype
    )
    run = recurrence.chosen(FORMS, form)
    receptance, key, wide_value, log_decay = (
        checks.only_real(x, token_mask, 0)
        for x in (receptance, key, wide_value, log_decay)
    )
    heads = jax.vmap(run, in_axes=(1, 1, 1, 1, 0, 0), out_axes=(0, 1))
    rows = recurrence.row_by_row(heads, shared=4)
    state, outputs = rows(receptance, key, wide_value, log_decay, bonus, state)
    return state, outputs.astype(value.dtype)
