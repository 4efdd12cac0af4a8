"""Assertions that no output depends on what it must not see, to be read in a test.

    properties.assert_causal(model, tokens, vocab_size=65)
    properties.assert_batch_independent(model, x)

A function maps inputs [B T ...] (token ids, or vectors [B T E]) to outputs [B T ...];
it may be JAX's or NumPy's, and is called with arrays of the library of its inputs.
It should be compiled: the checks call it once for every few edits. What they try is
said in `properties.probes`, and what counts as rounding in `properties.findings`.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, PRNGKeyArray, Shaped

from attention.properties import (
    calls,
    edits,
    examination,
    findings,
    movements,
    outcomes,
    probes,
    subjects,
)

# Edits of tokens that `assert_causal` makes, about.
_TOKEN_EDIT_BUDGET = 10_000
_VALUE_PROBES = ("edits", "tiny", "huge", "non-finite")


def assert_causal(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "..."],
    *,
    vocab_size: int | None = None,
    rng: PRNGKeyArray | None = None,
    tolerance: float = findings.ROUNDING,
) -> None:
    """Asserts that no output moves when a later input, or another row, is edited.

    The probes 'edits', 'tiny', 'huge', 'non-finite' and 'batch' on these inputs. NaN
    that only spreads (0 · NaN) is no leak.

    Args:
      fn: maps [B T ...] to [B T ...].
      inputs: token ids [B T], or floating point vectors [B T E].
      vocab_size: number V of ids, for tokens; None for vectors.
      rng: key of the edits; None stands for a fixed one.
      tolerance: share of an edit's size below which a movement is rounding; with 0 no
        bit may move.

    Raises:
      LeakError: naming the source position, the earliest target that moved and by
        how much.
      AssertionError: if fn is not deterministic on equal input.
      ValueError: on inputs that are neither tokens nor vectors or hold fewer than 2
        positions, tokens without `vocab_size`, a tolerance below 0, or if fn returns
        something else than one array [B T ...].
    """
    subject = subjects.on_inputs(
        fn,
        inputs,
        vocab_size=vocab_size,
        rng=rng,
        token_edit_budget=_TOKEN_EDIT_BUDGET,
        tolerance=tolerance,
    )
    calls.require_two_positions(inputs)
    assert_deterministic(fn, inputs)
    _assert_clear(subject, (*_VALUE_PROBES, "batch"))


def assert_batch_independent(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "..."],
    *,
    vocab_size: int | None = None,
    rng: PRNGKeyArray | None = None,
    tolerance: float = findings.ROUNDING,
) -> None:
    """Asserts that no output of a row moves when another row is edited.

    The function may be causal or not.

    Args:
      fn: maps [B T ...] to [B T ...].
      inputs: token ids [B T], or floating point vectors [B T E]; one position is
        enough.
      vocab_size: number V of ids, for tokens; None for vectors.
      rng: key of the edits; None stands for a fixed one.
      tolerance: share of an edit's size below which a movement is rounding; with 0 no
        bit may move.

    Raises:
      LeakError: naming the source position, the earliest target that moved and by
        how much.
      NotDeterministic: an AssertionError, if equal inputs give different outputs.
      ValueError: on inputs that are neither tokens nor vectors, tokens without
        `vocab_size`, a tolerance below 0, or if fn returns something else than one
        array [B T ...].
    """
    subject = subjects.on_inputs(
        fn,
        inputs,
        vocab_size=vocab_size,
        rng=rng,
        token_edit_budget=_TOKEN_EDIT_BUDGET,
        tolerance=tolerance,
    )
    rows = subjects.input_rows(subject, 2)
    everywhere = itertools.product(range(subject.length), range(len(rows)))
    one = edits.ordinary_replacements(subject, 1)
    series = edits.one_row_at_a_time(subject, rows, everywhere, one, causal=False)
    with _errors_of_the_function():
        seen = examination.examine("batch", subject, series)
    _raise_leak(seen.finding)


def assert_deterministic(
    fn: movements.Function, inputs: Shaped[movements.AnyArray, "B T ..."]
) -> None:
    """Asserts that equal inputs give bitwise equal outputs; NaN equals NaN.

    Args:
      fn: maps [B T ...] to [B T ...].
      inputs: token ids or vectors.

    Raises:
      NotDeterministic: an AssertionError, naming the first output that differed
        between two calls.
      ValueError: if fn returns something else than one array [B T ...].
    """
    first, second = (calls.checked_output(fn(inputs), inputs) for _ in range(2))
    moved = movements.movement(first, second)
    if np.any(moved != 0):
        row, position = np.argwhere(moved != 0)[0]
        raise findings.NotDeterministic(
            f"not deterministic: output {position} of row {row} differs by "
            f"{moved[row, position]:.3g} between two calls with equal input"
        )


def dependency_matrix(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "..."],
    *,
    vocab_size: int | None = None,
    rng: PRNGKeyArray | None = None,
) -> Bool[np.ndarray, "T_out T_in"]:
    """Computes whether output i depends on input j, in any row.

    Of vectors [T E] or [B T E] and a function that JAX can trace: whether its
    derivative is not exactly zero (NaN counts). Otherwise: whether an edit of input j
    moves output i by a bit.

    Args:
      fn: maps [B T ...] to [B T_out ...], or [T E] to [T_out ...].
      inputs: vectors, or token ids [B T].
      vocab_size: number V of ids, for tokens; None for vectors.
      rng: key of cotangents or edits; None stands for a fixed one.

    Returns:
      Bool [T_out T_in]; of edits [T T].

    Raises:
      ValueError: on other inputs, tokens without `vocab_size`, or if fn returns
        something else than one array of such a shape.
    """
    if vocab_size is None and _is_differentiable(fn, inputs):
        rng = calls.key_or_fixed(rng)
        return movements.jacobian_norms(fn, inputs, rng=rng) != 0
    subject = subjects.on_inputs(
        fn,
        inputs,
        vocab_size=vocab_size,
        rng=rng,
        token_edit_budget=_TOKEN_EDIT_BUDGET,
        tolerance=0.0,
    )
    count = 4 if vocab_size is None else min(4, vocab_size - 1)
    series = edits.in_all_rows(
        subject, np.asarray(inputs), edits.ordinary_replacements(subject, count)
    )
    with _errors_of_the_function():
        return examination.examine("edits", subject, series).moved != 0


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


def _assert_clear(subject: subjects.Subject, names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(outcomes.NotApplicable), _errors_of_the_function():
            _raise_leak(probes.PROBES[name](subject).finding)


@contextlib.contextmanager
def _errors_of_the_function() -> Iterator[None]:
    """Raises what the function itself raised, where it refused its inputs."""
    try:
        yield
    except calls.Refused as error:
        raise (error.__cause__ or error) from None


def _raise_leak(finding: findings.Finding | None) -> None:
    if finding is not None and finding.kind == "leak":
        raise finding.error()
