"""Probes of a function over positions: does an output depend on a later input?

    yᵢ = f(x₁, …, xᵢ)      for every length, batch, value and mode

Each probe asks in another way, since each kind of leak hides from some of them: one
that hangs on a rare token shows only under that token, a stabilising maximum only
under huge values, an unmasked last chunk only at lengths that do not divide. `PROBES`
holds them all; those that try many values stand in `value_probes`. What a probe saw
is an `outcomes.Outcome`, with the worst as a `findings.Finding`.
"""

import dataclasses
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from jaxtyping import Shaped

from attention.properties import (
    calls,
    edits,
    examination,
    findings,
    outcomes,
    subjects,
    value_probes,
)

_ROWS = 2
_BATCH = 4
_BATCH_SIZES = (1, 2, 3, 8)


def _batch(subject: subjects.Subject) -> outcomes.Outcome:
    """One row edited at a time: no other row may move.

    In rows that differ; then in equal ones, where what all of them hold ends with the
    edit of one.
    """
    rows = subjects.first_accepted(
        subject, [subjects.input_rows(subject, size) for size in (_BATCH, 2)]
    )
    equal = np.repeat(rows[:1], len(rows), axis=0)
    worst = findings.worst(
        _edit_single_rows("batch", subject, batch, _diagonal(batch))
        for batch in (rows, equal)
    )
    tried = f"one of {len(rows)} rows at a time, unlike and equal"
    return outcomes.Outcome.of("batch", tried, worst)


def _lengths(subject: subjects.Subject) -> outcomes.Outcome:
    """Other lengths: one, a prime, odd ones, past powers of two."""

    def at(length: int) -> findings.Finding | None:
        rows = subjects.random_rows(subject, _ROWS, length)
        return _edit_each_position_once("lengths", subject, rows)

    return _at_each_size("lengths", other_lengths(subject.length), at)


def _batch_sizes(subject: subjects.Subject) -> outcomes.Outcome:
    """Other numbers of rows, where a mask may broadcast along the wrong axis."""

    def at(size: int) -> findings.Finding | None:
        rows = subjects.random_rows(subject, size, subject.length)
        return _edit_each_position_once("batch sizes", subject, rows)

    return _at_each_size("batch sizes", _BATCH_SIZES, at)


def _gradients(subject: subjects.Subject) -> outcomes.Outcome:
    """Derivatives by later inputs, which see what moves too little to be seen."""
    if subject.gradient is None:
        raise outcomes.NotApplicable("a derivative needs vectors and JAX or PyTorch")
    inputs = subjects.input_rows(subject, _ROWS)
    norms = np.asarray(subject.gradient(inputs), np.float64)
    finite = np.isfinite(norms)
    largest = np.max(norms, where=finite, initial=0.0)
    later = np.triu(norms != 0, 1)
    kinds: dict[findings.Kind, np.ndarray] = {
        "leak": later & finite & (norms > subject.tolerance * largest),
        "nan-unsafe": later & ~finite,
        "rounding": later,
    }
    finding = None
    if kind := next((kind for kind in findings.WORST_FIRST if kinds[kind].any()), None):
        source, target = np.argwhere(kinds[kind].T)[0].tolist()
        finding = findings.Finding(
            kind=kind,
            probe="gradients",
            source=source,
            target=target,
            movement=float(norms[target, source]),
            size=float(largest),
            row=0,
            target_row=0,
            inputs=inputs,
            edited=inputs,
        )
    return outcomes.Outcome.of(
        "gradients", f"all pairs of {subject.length} positions", finding
    )


def _training(subject: subjects.Subject) -> outcomes.Outcome:
    """Edits in training mode, of all rows at once and of one at a time."""
    if subject.training is None:
        raise outcomes.NotApplicable("the function has no training mode")
    subject = dataclasses.replace(subject, fn=subject.training)
    rows = subjects.input_rows(subject, _BATCH)
    replacements = edits.ordinary_replacements(subject, 1)
    in_all_rows = edits.in_all_rows(subject, rows, replacements)
    seen_by_each = [
        examination.examine("training", subject, in_all_rows).finding,
        _edit_single_rows("training", subject, rows, _diagonal(rows)),
    ]
    tried = f"{len(rows)} rows at once, then one at a time"
    return outcomes.Outcome.of("training", tried, findings.worst(seen_by_each))


PROBES: Mapping[str, Callable[[subjects.Subject], outcomes.Outcome]] = (
    types.MappingProxyType(
        {
            "edits": value_probes.edits_probe,
            "tiny": value_probes.tiny_probe,
            "huge": value_probes.huge_probe,
            "non-finite": value_probes.nonfinite_probe,
            "batch": _batch,
            "lengths": _lengths,
            "batch sizes": _batch_sizes,
            "gradients": _gradients,
            "training": _training,
        }
    )
)


def run(probe: str, subject: subjects.Subject) -> outcomes.Outcome:
    """Makes one of `PROBES`; that it cannot be made is an outcome too."""
    try:
        return PROBES[probe](subject)
    except outcomes.NotApplicable as reason:
        return outcomes.Outcome(probe, "not applicable", str(reason))
    except calls.Refused as reason:
        return outcomes.Outcome(probe, "refused", str(reason))


# What they share


def other_lengths(length: int) -> list[int]:
    """One, a prime below `length`, and 2ᵏ + 1 below and above it."""
    power = 2 ** int(math.log2(max(length - 1, 1)))
    prime = next(n for n in range(length, 0, -1) if all(n % d for d in range(2, n)))
    return sorted({1, prime, power + 1, 4 * power + 1} - {length})


def _edit_single_rows(
    probe: str,
    subject: subjects.Subject,
    rows: Shaped[np.ndarray, "B T ..."],
    positions_and_rows: Iterable[tuple[int, int]],
) -> findings.Finding | None:
    """The worst of one edit at each of those positions, in that row alone."""
    series = edits.one_row_at_a_time(
        subject,
        rows,
        positions_and_rows,
        edits.ordinary_replacements(subject, 1),
        causal=True,
    )
    return examination.examine(probe, subject, series).finding


def _diagonal(rows: Shaped[np.ndarray, "B T ..."]) -> Iterator[tuple[int, int]]:
    """Each position, in one row after another."""
    return ((position, position % len(rows)) for position in range(rows.shape[1]))


def _edit_each_position_once(
    probe: str, subject: subjects.Subject, rows: Shaped[np.ndarray, "B T ..."]
) -> findings.Finding | None:
    """The worst of edits of each position in all rows, and of a few in single rows."""
    in_all_rows = edits.in_all_rows(
        subject, rows, edits.ordinary_replacements(subject, 1)
    )
    ends = sorted({0, rows.shape[1] // 2, rows.shape[1] - 1})
    positions_and_rows = itertools.product(ends, range(len(rows)))
    return findings.worst(
        [
            examination.examine(probe, subject, in_all_rows).finding,
            _edit_single_rows(probe, subject, rows, positions_and_rows),
        ]
    )


def _at_each_size(
    probe: str, sizes: Iterable[int], at: Callable[[int], findings.Finding | None]
) -> outcomes.Outcome:
    """One examination at each size; those that the function refuses are named."""
    seen, done, refused = [], [], []
    for size in sizes:
        try:
            seen.append(at(size))
            done.append(str(size))
        except calls.Refused:
            refused.append(str(size))
    words = [", ".join(done)] if done else []
    if refused:
        words.append(f"refused: {', '.join(refused)}")
    if not done:
        return outcomes.Outcome(probe, "refused", words[0])
    return outcomes.Outcome.of(probe, "; ".join(words), findings.worst(seen))
