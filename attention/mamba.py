"""Mamba's selective scan: a state space model whose parameters depend on the data.

    hₜ = exp(Δₜ A) hₜ₋₁ + Δₜ xₜ Bₜ                          h [M E]; A < 0, diagonal
    yₜ = Cₜ hₜ + D xₜ

A large step size Δₜ forgets the past and stores the present token; a step size of 0
ignores the token. Bₜ and Cₜ, shared by all channels, project the token into the state
and the state to the output. Gu and Dao, 2023, arXiv:2312.00752, algorithm 2; B is
discretised by the Euler rule Δ B of the authors' implementation.

The quadratic form writes the same map as attention: Ali et al., 2024, arXiv:2403.01590.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attention import checks, numerics, recurrence

# Steps between two states that are stored for the backward pass.
CHUNK = 128

Tokens = tuple[Array, Array, Array, Array]
Form = Callable[[Array, Array, Array, Array, Array, Array], tuple[Array, Array]]


def step(
    state: Float[Array, "M E"],
    x: Float[Array, "E"],
    step_size: Float[Array, "E"],
    B: Float[Array, "M"],
    C: Float[Array, "M"],
    A: Float[Array, "M E"],
) -> tuple[Float[Array, "M E"], Float[Array, "E"]]:
    """One token of one sequence: h ← exp(Δ A) h + Δ x B, then C h (without D x).

    Args:
      state: h before the token.
      x: channels of the token.
      step_size: Δ ≥ 0 of every channel.
      B: input projection, from the token to the state.
      C: output projection, from the state to the output.
      A: diagonal of the state matrix, negative.

    Returns:
      h after the token, and C h.

    Reference: Gu and Dao, 2023, arXiv:2312.00752, equation 2.
    """
    # Channels come last, since M numbers are too few for a CPU's vector instructions.
    decay = jnp.exp(step_size[None, :] * A)
    state = decay * state + B[:, None] * (step_size * x)[None, :]
    return state, C @ state


def _recurrent(
    x: Float[Array, "T E"],
    step_size: Float[Array, "T E"],
    B: Float[Array, "T M"],
    C: Float[Array, "T M"],
    A: Float[Array, "M E"],
    state: Float[Array, "M E"],
) -> tuple[Float[Array, "M E"], Float[Array, "T E"]]:
    def one(state: Array, token: Tokens) -> tuple[Array, Array]:
        x, step_size, B, C = token
        return step(state, x, step_size, B, C, A)

    return lax.scan(one, state, (x, step_size, B, C))


def _chunked(
    x: Float[Array, "T E"],
    step_size: Float[Array, "T E"],
    B: Float[Array, "T M"],
    C: Float[Array, "T M"],
    A: Float[Array, "M E"],
    state: Float[Array, "M E"],
) -> tuple[Float[Array, "M E"], Float[Array, "T E"]]:
    def one(state: Array, tokens: Tokens) -> tuple[Array, Array]:
        x, step_size, B, C = tokens
        return _recurrent(x, step_size, B, C, A, state)

    # A step size of 0 leaves the state unchanged.
    return recurrence.in_chunks(one, state, (x, step_size, B, C), size=CHUNK)


def _associative(
    x: Float[Array, "T E"],
    step_size: Float[Array, "T E"],
    B: Float[Array, "T M"],
    C: Float[Array, "T M"],
    A: Float[Array, "M E"],
    state: Float[Array, "M E"],
) -> tuple[Float[Array, "M E"], Float[Array, "T E"]]:
    decay = jnp.exp(step_size[:, None] * A[None])
    inputs = B[:, :, None] * (step_size * x)[:, None]
    states = recurrence.FORMS["associative"](decay, inputs, state)
    return states[-1], jnp.einsum("tm,tme->te", C, states)


def _quadratic(
    x: Float[Array, "T E"],
    step_size: Float[Array, "T E"],
    B: Float[Array, "T M"],
    C: Float[Array, "T M"],
    A: Float[Array, "M E"],
    state: Float[Array, "M E"],
) -> tuple[Float[Array, "M E"], Float[Array, "T E"]]:
    log_decay = step_size[:, None] * A[None]
    inputs = step_size * x
    left = jnp.exp(recurrence.segment_sums(log_decay))
    reach = jnp.exp(jnp.cumsum(log_decay, axis=0))
    weights = jnp.einsum("tm,tsme,sm->tse", C, left, B)
    y = jnp.einsum("tse,se->te", weights, inputs)
    y += jnp.einsum("tm,tme,me->te", C, reach, state)
    added = jnp.einsum("sm,sme,se->me", B, left[-1], inputs)
    return reach[-1] * state + added, y


_row_by_row = functools.partial(recurrence.row_by_row, shared=4)
_all_rows = functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None, 0))

FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "recurrent": _row_by_row(_recurrent),
        "chunked": _row_by_row(_chunked),
        "associative": _all_rows(_associative),
        "quadratic": _all_rows(_quadratic),
    }
)


@jax.named_scope("selective_scan")
def selective_scan(
    x: Float[ArrayLike, "B T E"],
    step_size: Float[ArrayLike, "B T E"],
    A: Float[ArrayLike, "E M"],
    B: Float[ArrayLike, "B T M"],
    C: Float[ArrayLike, "B T M"],
    D: Float[ArrayLike, "E"],
    *,
    token_mask: Bool[ArrayLike, "B T"] | None = None,
    state: Float[ArrayLike, "B M E"] | None = None,
    form: str = "chunked",
) -> tuple[Float[Array, "B M E"], Float[Array, "B T E"]]:
    """Computes hₜ = exp(Δₜ A) hₜ₋₁ + Δₜ xₜ Bₜ, yₜ = Cₜ hₜ + D xₜ in every channel.

    Args:
      x: inputs.
      step_size: Δ ≥ 0 of every token and channel.
      A: diagonals of the channels' state matrices, negative.
      B: input projection of every token.
      C: output projection of every token.
      D: weight of the skip connection of every channel.
      token_mask: True = real token, False = padding, which has step size 0 and thereby
        leaves the state unchanged.
      state: h after the previous tokens; None: 0.
      form: 'chunked' runs step by step, stores few states for the backward pass and is
        the fastest on a CPU; 'recurrent' stores all states; 'associative' is a tree of
        log T levels; 'quadratic' forms all decays [T T M E].

    Returns:
      h after the last token, in float32 (float64 for float64 x); and y in the dtype of
      x, 0 at padding.

    Raises:
      TypeError: if the mask is not boolean.
      ValueError: if shapes do not fit, there is no token, or the form is unknown.

    Reference: Gu and Dao, 2023, arXiv:2312.00752, algorithm 2.
    """
    x, A = jnp.asarray(x), jnp.asarray(A)
    if x.ndim != 3 or not x.shape[1]:
        raise ValueError(f"x must be [B T E], T > 0, got {list(x.shape)}")
    batch, length, channels = x.shape
    size = A.shape[-1]
    dtype = numerics.accumulation_dtype(x.dtype)
    wide, step_size, A, B, C, D = (
        jnp.asarray(array, dtype) for array in (x, step_size, A, B, C, D)
    )
    checks.shape("step_size", step_size, x.shape)
    checks.shape("A", A, (channels, size))
    checks.shape("B", B, (batch, length, size))
    checks.shape("C", C, (batch, length, size))
    checks.shape("D", D, (channels,))
    state = recurrence.state_or_zeros(state, (batch, size, channels), dtype)
    run = recurrence.chosen(FORMS, form)
    wide, step_size, B, C = (
        checks.only_real(array, token_mask, 0) for array in (wide, step_size, B, C)
    )
    state, y = run(wide, step_size, B, C, A.T, state)
    return state, (y + D[None, None] * wide).astype(x.dtype)
