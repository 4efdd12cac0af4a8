"""How far the outputs of a function over positions move when an input is edited.

    Δⱼ yᵢ = f(…, x'ⱼ, …)ᵢ - f(…, xⱼ, …)ᵢ        and        ∂yᵢ / ∂xⱼ

Both are measured here, for any callable: `edit_movements` by replacing one input after
another and comparing outputs bit for bit, `jacobian_norms` by reverse mode. A
derivative sees a dependence however small; an edit sees one without derivative (a
token, a rounding, a comparison).
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

# Of one array, JAX's or NumPy's as the caller gives it.
Function = Callable[[Any], Any]
AnyArray = Array | np.ndarray

# Stands for a change that has no size of its own: 0.0 became -0.0.
_SIGN_OF_ZERO = np.finfo(np.float64).smallest_subnormal


class Changes(NamedTuple):
    """What became of the outputs [B T ...] of a position, over all its features.

    Attributes:
      numbers: the largest change of a number into another number; exactly 0 where no
        bit of a number changed.
      nonfinite: whether a number became NaN or infinite, or the reverse.
    """

    numbers: Float[np.ndarray, "B T"]
    nonfinite: Bool[np.ndarray, "B T"]


class Movements(NamedTuple):
    """Largest movement of output i by edits of input j, both float64 [T_out T_in].

    Attributes:
      own: in the batch row that was edited.
      others: in all other rows of the batch.
    """

    own: Float[np.ndarray, "T_out T_in"]
    others: Float[np.ndarray, "T_out T_in"]


def changes(
    base: Shaped[np.ndarray, "B T ..."], edited: Shaped[np.ndarray, "B T ..."]
) -> Changes:
    """Compares outputs bit for bit; NaN in both has not changed.

    0.0 against -0.0 has changed, by the smallest positive number. Where the dtypes
    differ, numbers are compared.
    """
    shape = (*base.shape[:2], math.prod(base.shape[2:]))
    if base.dtype != edited.dtype:
        base, edited = (x.astype(np.float64) for x in (base, edited))
    base, edited = (np.ascontiguousarray(x).reshape(shape) for x in (base, edited))
    bits = f"u{base.dtype.itemsize}"
    same = base.view(bits) == edited.view(bits)
    numbers, nonfinite = np.zeros(shape[:2]), np.zeros(shape[:2], bool)
    # Few positions have changed, as a rule: only those are looked at closely.
    changed = ~same.all(axis=-1)
    same = same[changed]
    base, edited = (x[changed].astype(np.float64) for x in (base, edited))
    same |= np.isnan(base) & np.isnan(edited)
    finite = np.isfinite(base) & np.isfinite(edited)
    with np.errstate(invalid="ignore"):
        sizes = np.maximum(np.abs(edited - base), _SIGN_OF_ZERO)
    numbers[changed] = np.max(sizes, axis=-1, where=finite & ~same, initial=0.0)
    nonfinite[changed] = (~finite & ~same).any(axis=-1)
    return Changes(numbers, nonfinite)


def movement(
    base: Shaped[np.ndarray, "B T ..."], edited: Shaped[np.ndarray, "B T ..."]
) -> Float[np.ndarray, "B T"]:
    """Largest change over all axes after the first two; NaN where it has no size.

    So `movement != 0` says what has moved; a change to or from NaN or an infinity has
    no size.
    """
    numbers, nonfinite = changes(base, edited)
    return np.where(nonfinite, np.nan, numbers)


def edit_movements(
    fn: Function,
    inputs: Shaped[AnyArray, "B T ..."],
    replacements: Shaped[AnyArray, "R B T ..."],
) -> Movements:
    """How far each output moves when one input is replaced.

    Every position of every row is replaced by each of its replacements, one edit in
    one row at a time, and the output is compared with that of the unedited batch in
    the same batch slot. The slot matters: a compiled product may round differently
    in different rows of its tiles, so equal rows in two slots, or in batches of two
    sizes, may differ in the last bit although nothing leaks.

    Args:
      fn: maps [B T ...] to [B T_out ...]; called 1 + R*B*T times with one shape, so
        it should be compiled. It gets a JAX array where inputs is one, else NumPy's.
      inputs: tokens [B T] or vectors [B T E].
      replacements: replacements[r, b, t] takes the place of inputs[b, t].

    Returns:
      Movements, the largest over rows and replacements.

    Raises:
      ValueError: if the replacements' shape does not fit the inputs'.
    """
    rows, length = inputs.shape[:2]
    if replacements.shape[1:] != inputs.shape:
        raise ValueError(
            f"expected replacements [R, *{list(inputs.shape)}], "
            f"got {list(replacements.shape)}"
        )
    kind = jnp.asarray if isinstance(inputs, jax.Array) else np.asarray
    original, replacements = np.asarray(inputs), np.asarray(replacements)
    base = np.asarray(fn(kind(original)))
    own = np.zeros((base.shape[1], length))
    others = np.zeros_like(own)
    for position, row in itertools.product(range(length), range(rows)):
        for replacement in replacements[:, row, position]:
            edited = original.copy()
            edited[row, position] = replacement
            moved = movement(base, np.asarray(fn(kind(edited))))
            own[:, position] = np.maximum(own[:, position], moved[row])
            moved[row] = 0
            others[:, position] = np.maximum(others[:, position], moved.max(axis=0))
    return Movements(own, others)


def token_replacements(
    rng: PRNGKeyArray, tokens: Int[AnyArray, "B T"], *, vocab_size: int, count: int
) -> Int[np.ndarray, "R B T"]:
    """Replacements for every token: all different, and never the token itself.

    Args:
      rng: key.
      tokens: ids in [0, vocab_size).
      vocab_size: number of ids, at least 2.
      count: replacements per token; vocab_size - 1 or more gives every other id.

    Returns:
      int32 [R B T] with R = min(count, vocab_size - 1).

    Raises:
      ValueError: if there is no other id.
    """
    others = vocab_size - 1
    if others < 1:
        raise ValueError(f"expected at least 2 ids to choose from, got {vocab_size}")
    # token + 1 + (start + r) mod (V - 1), r = 0 … R-1, never returns to the token.
    start = np.asarray(jax.random.randint(rng, tokens.shape, 0, others))
    turn = np.arange(min(count, others))[:, None, None]
    shift = 1 + (start[None] + turn) % others
    return ((np.asarray(tokens)[None] + shift) % vocab_size).astype(np.int32)


def jacobian_norms(
    fn: Function, inputs: Float[AnyArray, "*B T E"], *, rng: PRNGKeyArray
) -> Float[np.ndarray, "T_out T_in"]:
    """Size of the derivative of output i by input j.

    One backward pass per output position with a random normal cotangent c over the
    features (and the batch): a column of cᵀ ∂yᵢ/∂xⱼ is exactly zero where the
    derivative is, and zero elsewhere with probability 0. The whole Jacobian is
    never formed; the passes run one after another in one compiled program.

    The size is the largest absolute entry, not the Euclidean norm, since squares of
    small derivatives underflow to zero.

    Args:
      fn: maps [T E] to [T_out ...], or [B T E] to [B T_out ...].
      inputs: floating point [T E] or [B T E].
      rng: key of the cotangents.

    Returns:
      Float [T_out T_in], the largest over the batch (across rows too). An input with
      a derivative that is not finite may give NaN in its whole column, since the
      backward pass multiplies it by the zeros of the other outputs.

    Raises:
      ValueError: on inputs that are not floating point [T E] or [B T E].
    """
    inputs = jnp.asarray(inputs)
    floating = jnp.issubdtype(inputs.dtype, jnp.floating)
    if inputs.ndim not in (2, 3) or not floating:
        raise ValueError(
            "expected floating point inputs [T E] or [B T E], "
            f"got {inputs.dtype} {list(inputs.shape)}"
        )
    time = inputs.ndim - 2

    outputs = jax.eval_shape(fn, inputs)
    noise = jax.random.normal(rng, outputs.shape, outputs.dtype)

    @jax.jit
    def norms(inputs: Array, noise: Array) -> Array:
        _, pullback = jax.vjp(fn, inputs)
        positions = jax.lax.broadcasted_iota(jnp.int32, noise.shape, time)
        features = tuple(axis for axis in range(inputs.ndim) if axis != time)

        def row(target: Array) -> Array:
            (gradient,) = pullback(jnp.where(positions == target, noise, 0))
            return jnp.max(jnp.abs(gradient), axis=features)

        return jax.lax.map(row, jnp.arange(noise.shape[time]))

    return np.asarray(norms(inputs, noise))
