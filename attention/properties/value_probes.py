"""Probes that replace one input after another: by which values does a leak show?"""

import contextlib

import numpy as np
from jaxtyping import Float

from attention.properties import (
    calls,
    edits,
    examination,
    findings,
    outcomes,
    subjects,
)

# Numbers of output that all edits of tokens compare, about.
_OUTPUTS = 2**32
_ROWS = 2
# Replacements of a vector of ordinary size; sizes of huge ones.
_ORDINARY = 8
_HUGE_SIZES = (1e2, 1e3, 1e4, 3e4, 1e6)


def edits_probe(subject: subjects.Subject) -> outcomes.Outcome:
    """Every position; of tokens every other id, or as many as the budget allows."""
    if subject.vocab_size is not None:
        return _token_edits(subject, subject.vocab_size)
    rows = subjects.input_rows(subject, _ROWS)
    replacements = edits.ordinary_replacements(subject, _ORDINARY)
    seen = examination.examine(
        "edits", subject, edits.in_all_rows(subject, rows, replacements)
    )
    tried = f"{len(rows)} x {subject.length} positions, {_ORDINARY} replacements each"
    return outcomes.Outcome.of("edits", tried + _doubts(seen), seen.finding, seen.moved)


def _token_edits(subject: subjects.Subject, vocab_size: int) -> outcomes.Outcome:
    """Some models treat a text by its first token: each id comes first, too."""
    rows = subjects.input_rows(subject, 1)
    wanted = max(1, min(vocab_size - 1, subject.token_edit_budget // rows.size))
    capped = _OUTPUTS // (subject.length * vocab_size) // rows.size
    count = max(1, min(wanted, capped))
    replacements = edits.ordinary_replacements(subject, count)
    series = edits.in_all_rows(subject, rows, replacements)
    seen = examination.examine("edits", subject, series)
    worst = seen.finding
    with contextlib.suppress(calls.Refused):
        behind_first = edits.behind_each_first_token(
            rows[0], len(series.inputs), vocab_size=vocab_size
        )
        finding = examination.examine("edits", subject, behind_first).finding
        worst = findings.worst((worst, finding))
    tried = (
        f"{len(rows)} x {subject.length} positions, {count} replacements each of "
        f"{vocab_size - 1}"
    )
    if count < wanted:
        tried += f", for more would compare over {_OUTPUTS:.0e} numbers of output"
    return outcomes.Outcome.of("edits", tried + _doubts(seen), worst, seen.moved)


def _doubts(seen: examination.Examination) -> str:
    """Why the result is weaker than it looks, in words."""
    doubts = "" if seen.moved.any() else "; nothing moved at all"
    return doubts + (f"; {seen.refusals} calls refused" if seen.refusals else "")


def tiny_probe(subject: subjects.Subject) -> outcomes.Outcome:
    """Vectors replaced by zeros, by nearly nothing, and changed by very little."""
    rows = _vectors(subject)
    scale = edits.scale(rows)

    def tiny(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        direction = scale * rng.standard_normal(x.shape)
        return np.stack(
            [0 * x, 1e-30 * direction, x + 1e-5 * direction, x + 1e-3 * direction]
        )

    series = edits.in_all_rows(subject, rows, tiny)
    finding = examination.examine("tiny", subject, series).finding
    return outcomes.Outcome.of("tiny", "to 0 and 1e-30, by 1e-5 and 1e-3", finding)


def huge_probe(subject: subjects.Subject) -> outcomes.Outcome:
    """Vectors of huge size. What only turns into NaN is looked at more closely."""
    rows = _vectors(subject)
    scale = edits.scale(rows)

    def huge(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        direction = scale * rng.standard_normal(x.shape)
        return np.stack([c * direction for size in _HUGE_SIZES for c in (size, -size)])

    series = edits.in_all_rows(subject, rows, huge)
    finding = examination.examine("huge", subject, series).finding
    if finding is not None and finding.kind == "nan-unsafe":
        finding = _number_on_the_way(subject, finding) or finding
    return outcomes.Outcome.of(
        "huge", f"sizes {_HUGE_SIZES[0]:g} to {_HUGE_SIZES[-1]:g}", finding
    )


def _number_on_the_way(
    subject: subjects.Subject, nan_unsafe: findings.Finding
) -> findings.Finding | None:
    """Between an edit that shows nothing and one that gives NaN: does a number move?

    exp(s - max s) over a whole sequence first loses small weights, then all of them;
    0 · inf jumps to NaN from nothing.
    """
    row, source, steps = nan_unsafe.target_row, nan_unsafe.source, 32
    inputs = np.repeat(nan_unsafe.inputs[row : row + 1], steps, axis=0)
    nothing, lost = 1e-6, 1.0
    for _ in range(4):
        shares = np.geomspace(nothing, lost, steps)
        edited = inputs.copy()
        edited[:, source] = shares[:, None] * nan_unsafe.edited[row, source]
        edit = edits.Edit(source, np.ones(steps, bool), edited, since=source)
        series = edits.Series(inputs, iter([edit]))
        finding = examination.examine("huge", subject, series).finding
        if finding is None or finding.kind != "nan-unsafe":
            return finding if finding is not None and finding.kind == "leak" else None
        step = finding.target_row
        nothing, lost = shares[max(step - 1, 0)], shares[step]
    return None


def nonfinite_probe(subject: subjects.Subject) -> outcomes.Outcome:
    """Vectors of NaN and of infinities, and single such features."""
    rows = _vectors(subject)

    def nonfinite(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        one = x.copy()
        one[rng.integers(x.size)] = np.nan
        return np.stack([np.full_like(x, c) for c in (np.nan, np.inf, -np.inf)] + [one])

    series = edits.in_all_rows(subject, rows, nonfinite)
    finding = examination.examine("non-finite", subject, series).finding
    return outcomes.Outcome.of("non-finite", "NaN, inf, -inf, one feature NaN", finding)


def _vectors(subject: subjects.Subject) -> Float[np.ndarray, "B T E"]:
    if subject.vocab_size is not None:
        raise outcomes.NotApplicable("tokens have no size")
    return subjects.input_rows(subject, _ROWS)
