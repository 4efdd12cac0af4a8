"""The linear recurrence, which every fixed-size state is an instance of.

    hₜ = aₜ hₜ₋₁ + bₜ                                      elementwise

Steps compose: (a, b) then (a', b') is (a' a, a' b + b'), which is associative and not
commutative, so that all hₜ can also be found by a tree of log T levels. Blelloch, 1990,
"Prefix sums and their applications"; Martin and Cundy, 2018, arXiv:1709.04057.

`rwkv`, `rwkv6` and `mamba` are such recurrences with their own reading of h.
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
    """One step: a h + b.

    Args:
      state: h, before.
      decay: a.
      inputs: b.

    Returns:
      h, after.
    """
    return decay * state + inputs


def compose(
    first: tuple[Array, Array], second: tuple[Array, Array]
) -> tuple[Array, Array]:
    """The one step (a, b) that stands for two steps, `first` before `second`."""
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
    """Every state of hₜ = aₜ hₜ₋₁ + bₜ; continuing from the last one gives the rest.

    Args:
      decay: a, of any sign and size.
      inputs: b.
      token_mask: True = real. Padding leaves the state as it is.
      state: h before the first step; None: 0.
      form: a key of FORMS: 'recurrent', step by step, the fastest on a CPU, or
        'associative', a tree of log T levels. Both take memory O(T).

    Returns:
      h after every step, in the dtype of `inputs`; computed in float32 at least.

    Raises:
      ValueError: if shapes do not fit, there is no step, or the form is unknown.
    """
    decay, inputs = jnp.asarray(decay), jnp.asarray(inputs)
    if inputs.ndim < 2 or not inputs.shape[1]:
        raise ValueError(f"inputs must be [B T *E], T > 0, got {list(inputs.shape)}")
    batch, length, *channels = inputs.shape
    checks.shape("decay", decay, inputs.shape)
    run = chosen(FORMS, form)
    dtype = numerics.accumulation_dtype(inputs.dtype)
    state = given_or_zeros(state, (batch, *channels), dtype)
    decay = checks.only_real(decay.astype(dtype), token_mask, 1)
    wide = checks.only_real(inputs.astype(dtype), token_mask, 0)
    return jax.vmap(run)(decay, wide, state).astype(inputs.dtype)


def segment_sums(log_decay: Float[Array, "T *E"]) -> Float[Array, "T T *E"]:
    """Log of what is left at step t of what came in at step s: Σ_{s<r≤t} log aᵣ.

    Each sum is formed by itself. A difference of two sums from the start would lose
    the small terms beside a large one, and be NaN where a decay is 0.

    Args:
      log_decay: log aₜ, -inf included.

    Returns:
      [t s *E]; 0 at t = s, and -inf where s is after t.
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

    For derivatives the states between chunks are kept, not what is inside them.

    Args:
      f: what one chunk does.
      state: before the first token.
      tokens: arrays, whose ragged end is filled with zeros: they must leave a state as
        it is.
      size: tokens of a chunk.

    Returns:
      The last state, and the outputs of all tokens.
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
    """Lifts a function of one sequence to a batch, one row after another.

    On a CPU that is 2 to 4 times as fast as `jax.vmap` where f sums within a loop: XLA
    does not vectorise such sums, and their derivatives, beside an axis of rows.

    Args:
      f: a function of arrays.
      shared: the number of the argument that has no axis of rows.

    Returns:
      A function of the same arguments with an axis of rows before the others.
    """

    def rows(*arrays: Array) -> F:
        def row(own: tuple[Array, ...]) -> F:
            return f(*own[:shared], arrays[shared], *own[shared:])

        return lax.map(row, (*arrays[:shared], *arrays[shared + 1 :]))

    return rows


def chosen(forms: Mapping[str, F], form: str) -> F:
    """The form of that name.

    Raises:
      ValueError: if there is none.
    """
    if form not in forms:
        raise ValueError(f"form must be one of {', '.join(forms)}, got {form!r}")
    return forms[form]


def given_or_zeros(
    state: Float[ArrayLike, "*E"] | None, shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "*E"]:
    """The state to continue from, zeros if there is none.

    Raises:
      ValueError: if it does not have that shape.
    """
    if state is None:
        return jnp.zeros(shape, dtype)
    state = jnp.asarray(state, dtype)
    checks.shape("state", state, shape)
    return state
