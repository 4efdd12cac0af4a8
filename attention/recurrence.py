"""The linear recurrence behind every mechanism whose state has a fixed size.

    hₜ = aₜ hₜ₋₁ + bₜ                                      elementwise

Steps compose: (a, b) followed by (a', b') equals the one step (a' a, a' b + b'). This
composition is associative, so that all hₜ can also be computed by a tree of log T
levels; it is not commutative. Blelloch, 1990, "Prefix sums and their applications";
Martin and Cundy, 2018, arXiv:1709.04057.

`rwkv`, `rwkv6`, `retention` and `mamba` are such recurrences, and differ in how they
read an output from h.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Shaped

from attention import checks, numerics

F = TypeVar("F")
Form = Callable[[Array, Array, Array], Array]


def step(
    state: Float[Array, "*E"], decay: Float[Array, "*E"], inputs: Float[Array, "*E"]
) -> Float[Array, "*E"]:
    """One step, h ← a h + b.

    Args:
      state: h before the step.
      decay: a.
      inputs: b.

    Returns:
      h after the step.
    """
    return decay * state + inputs


def compose(
    first: tuple[Array, Array], second: tuple[Array, Array]
) -> tuple[Array, Array]:
    """The single step (a' a, a' b + b') equal to `first` followed by `second`.

    Args:
      first: (a, b).
      second: (a', b').

    Returns:
      The composed step.
    """
    (a, b), (later_a, later_b) = first, second
    return later_a * a, later_a * b + later_b


def _recurrent(
    decay: Float[Array, "T *E"], inputs: Float[Array, "T *E"], state: Float[Array, "*E"]
) -> Float[Array, "T *E"]:
    def one(state: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        state = step(state, *at)
        return state, state

    return lax.scan(one, state, (decay, inputs))[1]


def _associative(
    decay: Float[Array, "T *E"], inputs: Float[Array, "T *E"], state: Float[Array, "*E"]
) -> Float[Array, "T *E"]:
    inputs = inputs.at[0].add(decay[0] * state)
    return lax.associative_scan(compose, (decay, inputs))[1]


FORMS: Mapping[str, Form] = MappingProxyType(
    {"recurrent": _recurrent, "associative": _associative}
)


@jax.named_scope("recurrence")
def states(
    decay: Float[ArrayLike, "B T *E"],
    inputs: Float[ArrayLike, "B T *E"],
    *,
    token_mask: Bool[ArrayLike, "B T"] | None = None,
    state: Float[ArrayLike, "B *E"] | None = None,
    form: str = "recurrent",
) -> Float[Array, "B T *E"]:
    """All states of hₜ = aₜ hₜ₋₁ + bₜ.

    Args:
      decay: a, of any sign and size.
      inputs: b.
      token_mask: True = real token, False = padding, which leaves the state unchanged.
      state: h before the first step, such as the last state of an earlier call; None:
        0.
      form: 'recurrent' runs step by step and is the fastest on a CPU; 'associative' is
        a tree of log T levels. Both take memory O(T).

    Returns:
      h after every step, in the dtype of `inputs`; computed in float32, or in float64
      for float64.

    Raises:
      TypeError: if the mask is not boolean.
      ValueError: if shapes do not fit, there is no step, or the form is unknown.

    Reference: Blelloch, 1990; Martin and Cundy, 2018, arXiv:1709.04057.
    """
    decay, inputs = jnp.asarray(decay), jnp.asarray(inputs)
    if inputs.ndim < 2 or not inputs.shape[1]:
        raise ValueError(f"inputs must be [B T *E], T > 0, got {list(inputs.shape)}")
    batch, length, *channels = inputs.shape
    checks.shape("decay", decay, inputs.shape)
    run = chosen(FORMS, form)
    dtype = numerics.accumulation_dtype(inputs.dtype)
    state = state_or_zeros(state, (batch, *channels), dtype)
    decay = checks.only_real(decay.astype(dtype), token_mask, 1)
    wide = checks.only_real(inputs.astype(dtype), token_mask, 0)
    return jax.vmap(run)(decay, wide, state).astype(inputs.dtype)


def segment_sums(log_decay: Float[Array, "T *E"]) -> Float[Array, "T T *E"]:
    """The log of the decay between any two steps s ≤ t: Σ_{s<r≤t} log aᵣ.

    Its exponential is the factor by which the input of step s has decayed at step t.
    Every sum is accumulated separately: the difference of two cumulative sums would
    lose small terms beside a large one, and be NaN where a decay is 0.

    Args:
      log_decay: log aₜ; may be -inf.

    Returns:
      An array indexed [t s *E]; 0 at t = s, and -inf where s > t.
    """
    length = len(log_decay)

    def where(at: Array, x: Array, otherwise: float) -> Array:
        at = at.reshape(length, length, *(1 for _ in log_decay.shape[1:]))
        return jnp.where(at, x, otherwise)

    t, s = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    sums = jnp.cumsum(where(t > s, log_decay[:, None], 0), axis=0)
    return where(t >= s, sums, -jnp.inf)


def in_chunks(
    f: Callable[[Any, Any], tuple[Any, Array]],
    state: Any,
    tokens: tuple[Shaped[Array, "T ..."], ...],
    *,
    size: int,
) -> tuple[Any, Shaped[Array, "T ..."]]:
    """Runs `f(state, tokens) -> (state, outputs)` over chunks of tokens.

    The backward pass stores the states between chunks and recomputes each chunk.

    Args:
      f: processes one chunk.
      state: the state before the first token.
      tokens: arrays over T tokens. The last chunk is filled up with zeros, so a token
        of zeros must leave the state unchanged.
      size: number of tokens in a chunk.

    Returns:
      The state after the last token, and the outputs of all tokens.
    """
    length = len(tokens[0])
    size = min(size, length)

    def chunks(x: Shaped[Array, "T *E"]) -> Shaped[Array, "I size *E"]:
        x = jnp.pad(x, [(0, -length % size), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(-1, size, *x.shape[1:])

    one = jax.checkpoint(f, prevent_cse=False)
    state, outputs = lax.scan(one, state, tuple(map(chunks, tokens)))
    return state, outputs.reshape(-1, *outputs.shape[2:])[:length]


def row_by_row(f: Callable[..., F], *, shared: int) -> Callable[..., F]:
    """Maps a function of one sequence over a batch, one row after another.

    On a CPU this is 2 to 4 times as fast as `jax.vmap` where f sums within a loop: with
    an additional batch axis XLA does not vectorise such sums and their derivatives.

    Args:
      f: a function of arrays that belong to one sequence.
      shared: index of the argument that all sequences share; it gets no batch axis.

    Returns:
      A function of the same arguments, all but the shared one with a leading batch
      axis.
    """

    def rows(*arrays: Array) -> F:
        def row(sequence: tuple[Array, ...]) -> F:
            return f(*sequence[:shared], arrays[shared], *sequence[shared:])

        return lax.map(row, (*arrays[:shared], *arrays[shared + 1 :]))

    return rows


def chosen(forms: Mapping[str, F], form: str) -> F:
    """The function that implements a form, looked up by its name.

    Raises:
      ValueError: if no form has this name.
    """
    if form not in forms:
        raise ValueError(f"form must be one of {', '.join(forms)}, got {form!r}")
    return forms[form]


def state_or_zeros(
    state: Float[ArrayLike, "*E"] | None, shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "*E"]:
    """The state to continue from, or zeros for None.

    Raises:
      ValueError: if the state does not have this shape.
    """
    if state is None:
        return jnp.zeros(shape, dtype)
    state = jnp.asarray(state, dtype)
    checks.shape("state", state, shape)
    return state
