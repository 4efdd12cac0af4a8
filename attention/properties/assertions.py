"""Assertions about any function over positions, to be read in a test.

    properties.assert_causal(model, tokens, vocab_size=65)
    properties.assert_padding_invariant(model, x, lengths)
    properties.assert_equivalent(fast, plain, q, k, v)

A function maps inputs [B T ...] (token ids, or vectors [B T E]) to outputs [B T ...];
it may be JAX's or NumPy's, and is called with arrays of the kind that it is given here.
It should be compiled: the checks call it once for every few edits. What they measure,
and what counts as rounding, is said in `properties.findings` and
`properties.probes`.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray, Shaped

from attention.properties import (
    edits,
    equivalence,
    findings,
    hull,
    movements,
    probes,
    search,
)

LeakError = findings.LeakError
assert_equivalent = equivalence.assert_equivalent
assert_in_hull = hull.assert_in_hull

# Edits of tokens that `assert_causal` makes, about.
_EDITS = 10_000
_VALUES = ("edits", "tiny", "huge", "non-finite")


def assert_causal(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "B T ..."],
    *,
    vocab_size: int | None = None,
    rng: PRNGKeyArray | None = None,
    tolerance: float = findings.ROUNDING,
) -> None:
    """No output moves when a later input, or another row, is edited.

    The probes 'edits', 'tiny', 'huge', 'non-finite' and 'batch' on these inputs. NaN
    that only spreads (0 · NaN) is no leak.

    Args:
      fn: maps [B T ...] to [B T ...].
      inputs: token ids, or floating point vectors [B T E].
      vocab_size: number of ids; for tokens only.
      rng: key of the edits; None: a fixed one.
      tolerance: share of an edit's size below which a movement is rounding; 0: no bit
        may move.

    Raises:
      LeakError: naming the source position, the earliest target that moved and by
        how much.
      AssertionError: if fn is not deterministic on equal input.
      ValueError: on inputs that are neither or hold fewer than 2 positions, tokens
        without `vocab_size`, a tolerance below 0, or if fn returns something else than
        one array [B T ...].
    """
    subject = edits.given(
        fn, inputs, vocab_size=vocab_size, rng=rng, edits=_EDITS, tolerance=tolerance
    )
    _positions(inputs)
    assert_deterministic(fn, inputs)
    _assert_clear(subject, (*_VALUES, "batch"))


def assert_batch_independent(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "B T ..."],
    *,
    vocab_size: int | None = None,
    rng: PRNGKeyArray | None = None,
    tolerance: float = findings.ROUNDING,
) -> None:
    """No output of a row moves when another row is edited, causal or not.

    Args, Raises: as in `assert_causal`; one position is enough.
    """
    subject = edits.given(
        fn, inputs, vocab_size=vocab_size, rng=rng, edits=_EDITS, tolerance=tolerance
    )
    rows = edits.rows_of(subject, 2, subject.length)
    places = itertools.product(range(subject.length), range(len(rows)))
    one = edits.ordinary(subject, 1)
    made = edits.one_row_at_a_time(subject, rows, places, one, causal=False)
    with _own_errors():
        seen = search.examine("batch", subject.fn, *made, tolerance=tolerance)
    _raise_leak(seen.finding)


def assert_deterministic(
    fn: movements.Function, inputs: Shaped[movements.AnyArray, "B T ..."]
) -> None:
    """Equal inputs give bitwise equal outputs (NaN counts as equal to NaN).

    Raises:
      NotDeterministic: an AssertionError, naming the first output that differed
        between two calls.
      ValueError: if fn returns something else than one array [B T ...].
    """
    first, second = (findings.answer(fn(inputs), inputs) for _ in range(2))
    moved = movements.movement(first, second)
    if np.any(moved != 0):
        row, position = np.argwhere(moved != 0)[0]
        raise findings.NotDeterministic(
            f"not deterministic: output {position} of row {row} differs by "
            f"{moved[row, position]:.3g} between two calls with equal input"
        )


def assert_padding_invariant(
    fn: Callable[[Any, Any], Any],
    inputs: Shaped[movements.AnyArray, "B T ..."],
    lengths: Int[movements.AnyArray, "B"],
    *,
    vocab_size: int | None = None,
    rng: PRNGKeyArray | None = None,
    nan_safe: bool = False,
    atol: float = 1e-5,
) -> None:
    """Outputs within a row's length do not depend on what stands beyond it.

    They keep their bits under any padding, and equal those of the row alone, cut to
    its length, within `atol`.

    Args:
      fn: maps inputs [B T ...] and lengths [B] to outputs [B T ...].
      inputs: token ids or vectors.
      lengths: of the rows, from 1 to T.
      vocab_size: number of ids; for tokens only.
      rng: key of the padding; None: a fixed one.
      nan_safe: whether NaN and infinities are padding that must not matter either.
      atol: largest difference from the row alone.

    Raises:
      AssertionError: naming row, position and size of the first difference.
      ValueError: on inputs as of `assert_causal`, lengths that are not such or leave
        nothing to pad, or if fn returns something else than one array [B T ...].
    """
    rows, lengths = edits.checked(inputs, vocab_size=vocab_size), np.asarray(lengths)
    in_range = (lengths > 0) & (lengths <= rows.shape[1])
    if lengths.shape != rows.shape[:1] or not in_range.all():
        raise ValueError(
            f"expected {len(rows)} lengths from 1 to {rows.shape[1]}, "
            f"got {lengths.tolist()}"
        )
    inside = np.arange(rows.shape[1]) < lengths[:, None]
    if inside.all():
        raise ValueError(f"expected a length below {rows.shape[1]}: nothing is padded")
    base = findings.answer(fn(inputs, lengths), rows)
    generator = np.random.default_rng(edits.seed(rng))
    fills: list[np.ndarray]
    if vocab_size is not None:
        fills = [generator.integers(vocab_size, size=rows.shape) for _ in range(2)]
    else:
        sizes = (0, 1, 1e3, np.nan, np.inf) if nan_safe else (0, 1, 1e3)
        fills = [c * np.abs(generator.standard_normal(rows.shape)) for c in sizes]
    beyond = ~inside.reshape(inside.shape + (1,) * (rows.ndim - 2))
    for fill in fills:
        padded = np.where(beyond, fill.astype(rows.dtype), rows)
        found = findings.answer(fn(edits.like(inputs, padded), lengths), rows)
        moved = np.where(inside, movements.movement(base, found), 0)
        for row, position in np.argwhere(moved != 0)[:1]:
            raise AssertionError(
                f"output {position} of row {row} sees the padding after its length "
                f"{lengths[row]}: it moved by {moved[row, position]:.3g}"
            )
    for row, length in enumerate(lengths.tolist()):
        one = rows[row : row + 1, :length]
        output = fn(edits.like(inputs, one), lengths[row : row + 1])
        alone = findings.answer(output, one)[0]
        what = f"row {row} padded, against the row alone,"
        equivalence.assert_close(base[row, :length], alone, what, rtol=0.0, atol=atol)


def assert_permutation_equivariant(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "B T ..."],
    *,
    rng: PRNGKeyArray | None = None,
    atol: float = 1e-5,
) -> None:
    """Permuted inputs give outputs permuted alike: f(x[:, p]) = f(x)[:, p].

    True of attention without mask and positions, of nothing causal.

    Raises:
      AssertionError: naming the largest difference.
      ValueError: on fewer than 2 positions, or if fn returns something else than one
        array [B T ...].
    """
    generator = np.random.default_rng(edits.seed(rng))
    length = _positions(inputs)
    outputs = findings.answer(fn(inputs), inputs)
    for p in (generator.permutation(length), np.roll(np.arange(length), 1)):
        permuted = fn(edits.like(inputs, np.asarray(inputs)[:, p]))
        found = findings.answer(permuted, inputs)
        what = f"under the permutation {p.tolist()}"
        equivalence.assert_close(found, outputs[:, p], what, rtol=0.0, atol=atol)


def assert_streaming_equals_full(
    fn: movements.Function,
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    inputs: Shaped[movements.AnyArray, "B T ..."],
    *,
    atol: float = 1e-5,
) -> None:
    """Inputs given piece by piece to `step` give the outputs of `fn` on all at once.

    One position at a time, all at once, and in two uneven pieces either way round.

    Args:
      fn: maps [B T ...] to [B T ...].
      step: maps a state and the next inputs [B t ...] to (state, outputs [B t ...]).
      state: before the first input; it is used several times.
      inputs: token ids or vectors.
      atol: largest difference.

    Raises:
      AssertionError: naming the pieces and the largest difference.
    """
    length = inputs.shape[1]
    third = max(length // 3, 1)
    splits = ([1] * length, [length], [third, length - third], [length - third, third])
    wanted = np.asarray(fn(inputs))
    for pieces in splits:
        now, start, outputs = state, 0, []
        for piece in filter(None, pieces):
            now, output = step(now, inputs[:, start : start + piece])
            start += piece
            outputs.append(np.asarray(output))
        what = f"in pieces of {pieces}"
        equivalence.assert_close(
            np.concatenate(outputs, axis=1), wanted, what, rtol=0.0, atol=atol
        )


def dependency_matrix(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "..."],
    *,
    vocab_size: int | None = None,
    rng: PRNGKeyArray | None = None,
) -> Bool[np.ndarray, "T_out T_in"]:
    """Whether output i depends on input j, in any row.

    Of vectors [T E] or [B T E] and a function that JAX can trace: whether its
    derivative is not exactly zero (NaN counts). Otherwise: whether an edit of input j
    moves output i by a bit.

    Args:
      fn: maps [B T ...] to [B T_out ...], or [T E] to [T_out ...].
      inputs: vectors, or token ids [B T].
      vocab_size: number of ids; for tokens only.
      rng: key of cotangents or edits; None: a fixed one.

    Returns:
      Bool [T_out T_in]; of edits [T T].

    Raises:
      ValueError: on other inputs, tokens without `vocab_size`, or if fn returns
        something else than one array of such a shape.
    """
    if vocab_size is None and _is_differentiable(fn, inputs):
        rng = equivalence.key_or_fixed(rng)
        return movements.jacobian_norms(fn, inputs, rng=rng) != 0
    subject = edits.given(
        fn, inputs, vocab_size=vocab_size, rng=rng, edits=_EDITS, tolerance=0.0
    )
    count = 4 if vocab_size is None else min(4, vocab_size - 1)
    made = edits.together(subject, np.asarray(inputs), edits.ordinary(subject, count))
    with _own_errors():
        return search.examine("edits", subject.fn, *made, tolerance=0.0).moved != 0


def _is_differentiable(fn: movements.Function, inputs: Any) -> bool:
    """Whether JAX can trace it from vectors [T E] or [B T E] to vectors."""
    x = jnp.asarray(inputs)
    if x.ndim not in (2, 3) or not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    try:
        y = jax.eval_shape(fn, x)
    except jax.errors.JAXTypeError:
        return False
    batch = x.shape[:-2]
    shape = getattr(y, "shape", None)
    if shape is None or len(shape) <= len(batch) or shape[: len(batch)] != batch:
        raise ValueError(f"expected one array {[*batch, 'T', '...']}, got {y}")
    return jnp.issubdtype(y.dtype, jnp.floating)


def _positions(inputs: Shaped[movements.AnyArray, "B T ..."]) -> int:
    """T of inputs [B T ...]; ValueError where none could see another."""
    if inputs.ndim < 2 or inputs.shape[1] < 2:
        raise ValueError(
            f"expected inputs [B T ...] of 2 positions at least, got {inputs.shape}"
        )
    return inputs.shape[1]


def _assert_clear(subject: edits.Subject, names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(probes.NotApplicable), _own_errors():
            _raise_leak(probes.PROBES[name](subject).finding)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raises what the function itself raised, where it refused its inputs."""
    try:
        yield
    except findings.Refused as error:
        raise (error.__cause__ or error) from None


def _raise_leak(finding: findings.Finding | None) -> None:
    if finding is not None and finding.kind == "leak":
        raise finding.error()
