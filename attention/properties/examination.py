"""Runs a series of edits, and keeps the worst that they show."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from attention.properties import (
    calls,
    comparison,
    edits,
    findings,
    movements,
    subjects,
)

# Calls that may be refused before an examination gives up.
_PATIENCE = 100


class Examination(NamedTuple):
    """What a series of edits showed.

    Attributes:
      finding: the worst that moved though it must not; None if nothing did.
      moved: largest movement of output i of a row by edits of its input j, allowed
        ones included; infinite where it has no size.
      refusals: number of edits that the function refused.
    """

    finding: findings.Finding | None
    moved: Float[np.ndarray, "T T"]
    refusals: int


def examine(probe: str, subject: subjects.Subject, series: edits.Series) -> Examination:
    """Finds the worst that any of the edits shows, and how far they moved what.

    Args:
      probe: name of the probe that makes them.
      subject: the function, and what counts as rounding.
      series: inputs, and edits of them.

    Raises:
      Refused: if the function refuses the inputs, or every edit of them.
      NotDeterministic: if a leak does not show again, or the unedited inputs give
        other outputs after it.
    """
    fn, tolerance, inputs = subject.fn, subject.tolerance, series.inputs
    base = calls.call(fn, inputs)
    if not np.isfinite(base.astype(np.float64)).any() and base.size:
        raise calls.Refused("returned no finite number")
    moved = np.zeros((inputs.shape[1],) * 2)
    worst: findings.Finding | None = None
    first_refusal: calls.Refused | None = None
    answered, refusals = False, 0
    for edit in series.edits:
        parts = [edit]
        while parts and (answered or refusals < _PATIENCE):
            part = parts.pop()
            try:
                finding, reached = comparison.compare_with(
                    base, probe, fn, inputs, part, tolerance=tolerance
                )
            except calls.Refused as refusal:
                first_refusal = first_refusal or refusal
                refusals += 1
                parts += _halves(inputs, part)
                continue
            moved[:, part.position] = np.maximum(moved[:, part.position], reached)
            # Only the worst is kept: each holds a whole batch.
            worst = findings.worst((worst, finding))
            answered = True
        if parts:
            break
    if first_refusal is not None and not answered:
        raise first_refusal
    if worst is not None and worst.kind == "leak":
        _confirm(fn, base, worst, tolerance)
    return Examination(worst, moved, refusals)


def _halves(
    inputs: Shaped[np.ndarray, "B T ..."], edit: edits.Edit
) -> list[edits.Edit]:
    """The edit in each half of its rows; nothing for an edit of a single row."""
    rows = np.flatnonzero(edit.rows)
    if len(rows) < 2:
        return []
    parts = []
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        edited = inputs.copy()
        edited[half] = edit.inputs[half]
        chosen = np.isin(np.arange(len(inputs)), half)
        parts.append(edit._replace(rows=chosen, inputs=edited))
    return parts


def _confirm(
    fn: calls.NumpyFunction,
    base: Shaped[np.ndarray, "B T ..."],
    finding: findings.Finding,
    tolerance: float,
) -> None:
    """Raises NotDeterministic where a leak is the function's own memory, or chance."""
    numbers, _ = movements.changes(base, calls.call(fn, finding.inputs))
    again = comparison.compare(
        finding.probe, fn, finding.inputs, finding.edited, tolerance=tolerance
    )
    noise = numbers.max(initial=0.0)
    if again is None or again.kind != "leak" or noise > 0.1 * again.movement:
        raise findings.NotDeterministic(
            f"not deterministic: equal inputs {list(base.shape[:2])} "
            f"gave outputs that differ by up to {noise:.3g}"
        )
