"""Retention: attention without a softmax, with a constant decay γ in each head.

    oₜ = Σ_{s≤t} γ^(t-s) (scale qₜ·kₛ) vₛ                        quadratic
    Sₜ = γ Sₜ₋₁ + kₜᵀ vₜ,    oₜ = scale qₜ Sₜ                    recurrent, S [H D]

Sun et al., 2023, arXiv:2307.08621, equations 5 to 7, without the rotation of queries
and keys. `models.retention` adds the norm and the gate.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attention import checks, numerics, recurrence

CHUNK = 128  # Number of tokens in a chunk.

Tokens = tuple[Array, Array, Array, Array]
Form = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array]]


def log_decays(num_heads: int) -> Float[np.ndarray, "N"]:
    """The paper's decays, log γₙ = log(1 - 2^(-5-n)) for head n = 0 … N - 1.

    Head 0 forgets 1/32 of its state per step, and every further head half as much.

    Reference: Sun et al., 2023, arXiv:2307.08621, equation 8.
    """
    return np.log1p(-(2.0 ** (-5.0 - np.arange(num_heads)))).astype(np.float32)


def step(
    state: Float[Array, "H D"],
    query: Float[Array, "H"],
    key: Float[Array, "H"],
    value: Float[Array, "D"],
    log_decay: Float[Array, ""],
) -> tuple[Float[Array, "H D"], Float[Array, "D"]]:
    """One token of one head: S ← γ S + kᵀ v, then o = q S.

    Args:
      state: S before the token.
      query: q, already scaled.
      key: k.
      value: v.
      log_decay: log γ ≤ 0.

    Returns:
      S after the token, and o.

    Reference: Sun et al., 2023, arXiv:2307.08621, equation 6.
    """
    state = jnp.exp(log_decay) * state + key[:, None] * value[None, :]
    return state, query @ state


def _recurrent(
    query: Float[Array, "T H"],
    key: Float[Array, "T H"],
    value: Float[Array, "T D"],
    log_decay: Float[Array, "T"],
    state: Float[Array, "H D"],
) -> tuple[Float[Array, "H D"], Float[Array, "T D"]]:
    def one(state: Array, token: Tokens) -> tuple[Array, Array]:
        return step(state, *token)

    return lax.scan(one, state, (query, key, value, log_decay))


def _quadratic(
    query: Float[Array, "T H"],
    key: Float[Array, "T H"],
    value: Float[Array, "T D"],
    log_decay: Float[Array, "T"],
    state: Float[Array, "H D"],
) -> tuple[Float[Array, "H D"], Float[Array, "T D"]]:
    left = jnp.exp(recurrence.segment_sums(log_decay))
    since = jnp.exp(jnp.cumsum(log_decay))
    output = (query @ key.T * left) @ value + since[:, None] * (query @ state)
    return since[-1] * state + (key * left[-1][:, None]).T @ value, output


def _chunked(
    query: Float[Array, "T H"],
    key: Float[Array, "T H"],
    value: Float[Array, "T D"],
    log_decay: Float[Array, "T"],
    state: Float[Array, "H D"],
) -> tuple[Float[Array, "H D"], Float[Array, "T D"]]:
    def one(state: Array, tokens: Tokens) -> tuple[Array, Array]:
        return _quadratic(*tokens, state)

    # A key of 0 and a log decay of 0 leave the state unchanged.
    tokens = query, key, value, log_decay
    return recurrence.in_chunks(one, state, tokens, size=CHUNK)


FORMS: Mapping[str, Form] = MappingProxyType(
    {"recurrent": _recurrent, "chunked": _chunked, "quadratic": _quadratic}
)


@jax.named_scope("retention")
def attention(
    query: Float[ArrayLike, "B T N H"],
    key: Float[ArrayLike, "B T N H"],
    value: Float[ArrayLike, "B T N D"],
    log_decay: Float[ArrayLike, "N"],
    *,
    scale: float | None = None,
    token_mask: Bool[ArrayLike, "B T"] | None = None,
    state: Float[ArrayLike, "B N H D"] | None = None,
    form: str = "chunked",
) -> tuple[Float[Array, "B N H D"], Float[Array, "B T N D"]]:
    """Computes oₜ = Σ_{s≤t} γ^(t-s) (scale qₜ·kₛ) vₛ for every token and head.

    Args:
      query: queries.
      key: keys.
      value: values, of any width D.
      log_decay: log γ ≤ 0 of each head; `log_decays` has the paper's.
      scale: multiplies q·k; None: 1/√H.
      token_mask: True = real token, False = padding, which adds nothing to the state
        and lets nothing decay.
      state: S after the previous tokens; None: 0.
      form: 'chunked' is the fastest; 'recurrent' runs step by step; 'quadratic' forms
        all weights [T T].

    Returns:
      S after the last token, in float32 (float64 for float64 values); and o in the
      dtype of the values, 0 at padding.

    Raises:
      TypeError: if the mask is not boolean.
      ValueError: if shapes do not fit, there is no token, or the form is unknown.

    Reference: Sun et al., 2023, arXiv:2307.08621, equations 5 to 7.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    if value.ndim != 4 or not value.shape[1]:
        raise ValueError(f"value must be [B T N D], T > 0, got {list(value.shape)}")
    batch, length, num_heads, value_width = value.shape
    shape = batch, length, num_heads, key.shape[-1]
    for name, x in {"query": query, "key": key}.items():
        checks.shape(name, x, shape)
    dtype = numerics.accumulation_dtype(value.dtype)
    log_decay = jnp.asarray(log_decay, dtype)
    checks.shape("log_decay", log_decay, (num_heads,))
    state = recurrence.state_or_zeros(
        state, (batch, num_heads, shape[-1], value_width), dtype
    )
    scale = shape[-1] ** -0.5 if scale is None else scale
    wide = (query.astype(dtype) * scale, key.astype(dtype), value.astype(dtype))
    each_step = jnp.broadcast_to(log_decay[None, None], (batch, length, num_heads))
    query, key, wide_value, each_step = (
        checks.only_real(x, token_mask, 0) for x in (*wide, each_step)
    )
    run = recurrence.chosen(FORMS, form)
    one_row = jax.vmap(run, in_axes=(1, 1, 1, 1, 0), out_axes=(0, 1))
    state, output = jax.vmap(one_row)(query, key, wide_value, each_step, state)
    return state, output.astype(value.dtype)
