"""Checks for any function over positions: which output depends on which input.

A function of a sequence is causal when output i depends on inputs j <= i only:

    yᵢ = f(x₁, …, xᵢ)   ⇔   ∂yᵢ/∂xⱼ = 0 and Δⱼ yᵢ = 0 for every j > i

where Δⱼ replaces input j. Both sides are checked here, each as a matrix
[T_out T_in] of sizes whose entry (i, j) is exactly zero where output i does not
depend on input j: `jacobian_norms` by reverse mode, `edit_movements` by replacing
one input after another and comparing outputs bit for bit. A derivative sees a
dependence however small, an edit sees one without derivative (a token, a rounding,
a comparison).

The functions know nothing of models: they take any callable.
"""

import itertools
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


class LeakError(AssertionError):
    """An output depends on an input that it must not see.

    Attributes:
      source: position of the input that was seen.
      target: earliest position of an output that it moved.
      movement: largest change of that output (or its derivative); NaN where a
        number became NaN.
    """

    def __init__(self, source: int, target: int, movement: float, *, where: str):
        super().__init__(
            f"output {target}{where} depends on input {source}: "
            f"it moved by {movement:.3g}"
        )
        self.source = source
        self.target = target
        self.movement = movement


class Movements(NamedTuple):
    """Largest movement of output i by edits of input j, both float64 [T_out T_in].

    Attributes:
      own: in the batch row that was edited.
      others: in all other rows of the batch.
    """

    own: Float[np.ndarray, "T_out T_in"]
    others: Float[np.ndarray, "T_out T_in"]


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


def dependency_matrix(
    fn: Function, inputs: Float[AnyArray, "*B T E"], *, rng: PRNGKeyArray
) -> Bool[np.ndarray, "T_out T_in"]:
    """Whether output i depends on input j: its derivative is not exactly zero.

    Args and Raises: as in `jacobian_norms`.

    Returns:
      Bool [T_out T_in]. NaN counts as a dependence.
    """
    return jacobian_norms(fn, inputs, rng=rng) != 0


def movement(
    base: Shaped[np.ndarray, "B T ..."], edited: Shaped[np.ndarray, "B T ..."]
) -> Float[np.ndarray, "B T"]:
    """Largest absolute change over all axes after the first two.

    Bits are compared: equal bits, or NaN in both, have not moved and give exactly 0;
    0.0 against -0.0 has moved and gives the smallest positive number. A change
    between a number and NaN gives NaN. So `movement != 0` says what moved.
    """
    bits = f"u{base.dtype.itemsize}"
    same = base.view(bits) == edited.view(bits)
    same |= np.isnan(base) & np.isnan(edited)
    with np.errstate(invalid="ignore"):
        change = np.abs(edited.astype(np.float64) - base.astype(np.float64))
    change = np.where(same, 0.0, np.maximum(change, _SIGN_OF_ZERO))
    return change.reshape(*change.shape[:2], -1).max(axis=-1)


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


def find_dependence(
    sizes: Float[np.ndarray, "T_out T_in"],
    allowed: Bool[np.ndarray, "T_out T_in"],
    *,
    where: str = "",
) -> LeakError | None:
    """The first dependence outside `allowed`, as the error to raise, or None.

    Args:
      sizes: of `jacobian_norms` or `edit_movements`.
      allowed: True where output i may depend on input j.
      where: words after the output's position in the message.

    Returns:
      The earliest source that reaches where it must not, and the earliest target
      that it reaches so.
    """
    found = np.argwhere(((sizes != 0) & ~allowed).T)
    if not len(found):
        return None
    source, target = found[0].tolist()
    return LeakError(source, target, float(sizes[target, source]), where=where)


def find_leak(movements: Movements) -> LeakError | None:
    """The first movement that a causal function of independent rows cannot show.

    Outputs of the edited row before the edit are looked at first, then all outputs
    of other rows.
    """
    earlier = np.tril(np.ones(movements.own.shape, bool))
    other_rows = " in another row of the batch"
    return find_dependence(movements.own, earlier) or find_dependence(
        movements.others, np.zeros_like(earlier), where=other_rows
    )


def assert_deterministic(fn: Function, inputs: Shaped[AnyArray, "B T ..."]) -> None:
    """Equal inputs give bitwise equal outputs (NaN counts as equal to NaN).

    Raises:
      AssertionError: naming the first output that differed between two calls.
    """
    moved = movement(np.asarray(fn(inputs)), np.asarray(fn(inputs)))
    if np.any(moved != 0):
        row, position = np.argwhere(moved != 0)[0]
        raise AssertionError(
            f"not deterministic: output {position} of row {row} differs by "
            f"{moved[row, position]:.3g} between two calls with equal input"
        )


def assert_causal(
    fn: Function,
    inputs: Shaped[AnyArray, "B T ..."],
    replacements: Shaped[AnyArray, "R B T ..."],
) -> None:
    """No output moves, in any bit, when a later input or another row is edited.

    Args: as in `edit_movements`. `token_replacements` draws them for tokens.

    Raises:
      LeakError: naming the source position, the earliest target that moved and by
        how much.
      AssertionError: if fn is not deterministic on equal input.
    """
    assert_deterministic(fn, inputs)
    leak = find_leak(edit_movements(fn, inputs, replacements))
    if leak is not None:
        raise leak
