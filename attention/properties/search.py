"""Many edits of some inputs: the worst that they show, and the smallest of them."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from attention.properties import findings, movements

# Calls that may be refused before a search gives up.
_PATIENCE = 100


class Seen(NamedTuple):
    """What some edits showed.

    Attributes:
      finding: the worst, as of `leaks.worst`.
      moved: largest movement of output i of a row by edits of its input j, allowed
        ones included; infinite where it has no size.
      refused: edits that the function refused.
    """

    finding: findings.Finding | None
    moved: Float[np.ndarray, "T T"]
    refused: int


def examine(
    probe: str,
    fn: findings.Function,
    inputs: Shaped[np.ndarray, "B T ..."],
    edits: Iterable[findings.Edit],
    *,
    tolerance: float,
) -> Seen:
    """The worst that any of the edits shows, and how far they moved what.

    Args:
      probe: name of the probe that makes them.
      fn: the function.
      inputs: unedited.
      edits: of these inputs.
      tolerance: share of an edit's size that is rounding; 0: no bit may move.

    Returns:
      What was seen.

    Raises:
      Refused: if the function refuses the inputs, or every edit of them.
      NotDeterministic: if a leak does not show again, or the unedited inputs give
        other outputs after it.
    """
    base = findings.call(fn, inputs)
    if not np.isfinite(base.astype(np.float64)).any() and base.size:
        raise findings.Refused("returned no finite number")
    moved = np.zeros((inputs.shape[1],) * 2)
    finding: findings.Finding | None = None
    first_refusal: findings.Refused | None = None
    answered, refused = False, 0
    for edit in edits:
        parts = [edit]
        while parts and (answered or refused < _PATIENCE):
            part = parts.pop()
            try:
                found, own = findings.compare_with(
                    base, probe, fn, inputs, part, tolerance=tolerance
                )
            except findings.Refused as refusal:
                first_refusal = first_refusal or refusal
                refused += 1
                parts += _halves(inputs, part)
                continue
            moved[:, part.position] = np.maximum(moved[:, part.position], own)
            # Only the worst is kept: each holds a whole batch.
            finding = findings.worst((finding, found))
            answered = True
        if parts:
            break
    if first_refusal is not None and not answered:
        raise first_refusal
    if finding is not None and finding.kind == "leak":
        _confirm(fn, base, finding, tolerance)
    return Seen(finding, moved, refused)


def _halves(
    inputs: Shaped[np.ndarray, "B T ..."], edit: findings.Edit
) -> list[findings.Edit]:
    """The edit in half of its rows, and in the others; nothing of a single row."""
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
    fn: findings.Function,
    base: Shaped[np.ndarray, "B T ..."],
    finding: findings.Finding,
    tolerance: float,
) -> None:
    """Raises NotDeterministic where a leak is the function's own memory, or chance."""
    numbers, _ = movements.changes(base, findings.call(fn, finding.inputs))
    again = findings.compare(
        finding.probe, fn, finding.inputs, finding.edited, tolerance=tolerance
    )
    noise = numbers.max(initial=0.0)
    if again is None or again.kind != "leak" or noise > 0.1 * again.movement:
        raise findings.NotDeterministic(
            f"not deterministic: equal inputs {list(base.shape[:2])} "
            f"gave outputs that differ by up to {noise:.3g}"
        )


def shrink(
    fn: findings.Function, finding: findings.Finding, *, tolerance: float
) -> findings.Finding:
    """The smallest pair of inputs found that still shows a leak.

    One row instead of the batch, as little as possible after the edit and before it:
    nothing, or as much as a power of two; each is kept if the leak still shows.

    Args:
      fn: the function that leaks, in the mode in which it does.
      finding: of a probe other than 'gradients'.
      tolerance: as of `examine`.

    Returns:
      The finding at the smaller inputs, with its positions there.
    """
    smallest = finding

    def attempt(rows: slice | list[int], positions: slice) -> bool:
        nonlocal smallest
        pair = [x[rows, positions] for x in (smallest.inputs, smallest.edited)]
        try:
            found = findings.compare(finding.probe, fn, *pair, tolerance=tolerance)
        except ValueError:
            found = None
        if found is None or found.kind != "leak":
            return False
        smallest = found
        return True

    everything = slice(None)
    attempt([finding.target_row], everything) or attempt(
        sorted({finding.row, finding.target_row}), everything
    )
    end = max(smallest.source, smallest.target) + 1
    while end < smallest.inputs.shape[1] and not attempt(everything, slice(0, end)):
        end = 2 ** end.bit_length()
    kept = 2
    while kept < smallest.inputs.shape[1] and not attempt(
        everything, slice(-kept, None)
    ):
        kept *= 2
    return smallest
