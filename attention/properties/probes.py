"""Probes of a function over positions: does an output depend on a later input?

    yᵢ = f(x₁, …, xᵢ)      for every length, batch, value and mode

Each probe asks in another way, since each kind of leak hides from some of them: one
that hangs on a rare token shows only under that token, a stabilising maximum only
under huge values, an unmasked last chunk only at lengths that do not divide. `PROBES`
holds them all. What a probe saw is an `Outcome`, with the worst as a
`leaks.Finding`.
"""

import contextlib
import dataclasses
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Shaped

from attention.properties import edits, search
from attention.properties import findings as leaks

# Numbers of output that all edits of tokens compare, about.
_OUTPUTS = 2**32
_ROWS = 2
_BATCH = 4
_BATCH_SIZES = (1, 2, 3, 8)
# Replacements of a vector of ordinary size; sizes of huge ones.
_ORDINARY = 8
_HUGE_SIZES = (1e2, 1e3, 1e4, 3e4, 1e6)

Kind = leaks.Kind | Literal["clear", "not applicable", "refused", "skipped", "void"]


class NotApplicable(Exception):
    """The probe cannot be made of this function; the message says why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a probe saw.

    Attributes:
      probe: its name.
      kind: of the worst finding, or why there is none; 'void': it showed nothing.
      tried: what it did, or why nothing, in words.
      finding: the worst, as of `leaks.worst`; None if nothing moved.
      moved: largest movement of output i by edits of input j, [T T], allowed ones
        too; None where the probe has no such matrix.
      figures: more for a report, ready for JSON.
    """

    probe: str
    kind: Kind
    tried: str
    finding: leaks.Finding | None = None
    moved: Float[np.ndarray, "T T"] | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# The probes, one function each


def _edits(subject: edits.Subject) -> Outcome:
    """Every position; of tokens every other id, or as many as the budget allows."""
    if subject.vocab_size is not None:
        return _token_edits(subject, subject.vocab_size)
    rows = edits.rows_of(subject, _ROWS, subject.length)
    made = edits.together(subject, rows, edits.ordinary(subject, _ORDINARY))
    seen = _examine("edits", subject, made)
    tried = f"{len(rows)} x {subject.length} positions, {_ORDINARY} replacements each"
    return _outcome("edits", tried + _doubts(seen), seen.finding, seen.moved)


def _token_edits(subject: edits.Subject, vocab_size: int) -> Outcome:
    """Some models treat a text by its first token: each id comes first, too."""
    rows = edits.rows_of(subject, 1, subject.length)
    wanted = max(1, min(vocab_size - 1, subject.edits // rows.size))
    capped = _OUTPUTS // (subject.length * vocab_size) // rows.size
    count = max(1, min(wanted, capped))
    made = edits.together(subject, rows, edits.ordinary(subject, count))
    seen = _examine("edits", subject, made)
    findings = [seen.finding]
    with contextlib.suppress(leaks.Refused):
        first = edits.each_first(rows[0], len(made[0]), vocab_size=vocab_size)
        findings.append(_examine("edits", subject, first).finding)
    tried = (
        f"{len(rows)} x {subject.length} positions, {count} replacements each of "
        f"{vocab_size - 1}"
    )
    if count < wanted:
        tried += f", for more would compare over {_OUTPUTS:.0e} numbers of output"
    return _outcome("edits", tried + _doubts(seen), leaks.worst(findings), seen.moved)


def _doubts(seen: search.Seen) -> str:
    """Why the result is weaker than it looks, in words."""
    doubts = "" if seen.moved.any() else "; nothing moved at all"
    return doubts + (f"; {seen.refused} calls refused" if seen.refused else "")


def _tiny(subject: edits.Subject) -> Outcome:
    """Vectors replaced by zeros, by nearly nothing, and changed by very little."""
    rows = _vectors(subject)
    scale = leaks.scale(rows)

    def tiny(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        direction = scale * rng.standard_normal(x.shape)
        return np.stack(
            [0 * x, 1e-30 * direction, x + 1e-5 * direction, x + 1e-3 * direction]
        )

    finding = _examine("tiny", subject, edits.together(subject, rows, tiny)).finding
    return _outcome("tiny", "to 0 and 1e-30, by 1e-5 and 1e-3", finding)


def _huge(subject: edits.Subject) -> Outcome:
    """Vectors of huge size. What only turns into NaN is looked at more closely."""
    rows = _vectors(subject)
    scale = leaks.scale(rows)

    def huge(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        direction = scale * rng.standard_normal(x.shape)
        return np.stack([c * direction for size in _HUGE_SIZES for c in (size, -size)])

    finding = _examine("huge", subject, edits.together(subject, rows, huge)).finding
    if finding is not None and finding.kind == "nan-unsafe":
        finding = _number_on_the_way(subject, finding) or finding
    return _outcome("huge", f"sizes {_HUGE_SIZES[0]:g} to {_HUGE_SIZES[-1]:g}", finding)


def _number_on_the_way(
    subject: edits.Subject, finding: leaks.Finding
) -> leaks.Finding | None:
    """Between an edit that shows nothing and one that gives NaN: does a number move?

    exp(s - max s) over a whole sequence first loses small weights, then all of them;
    0 · inf jumps to NaN from nothing.
    """
    row, source, steps = finding.target_row, finding.source, 32
    inputs = np.repeat(finding.inputs[row : row + 1], steps, axis=0)
    nothing, lost = 1e-6, 1.0
    for _ in range(4):
        shares = np.geomspace(nothing, lost, steps)
        edited = inputs.copy()
        edited[:, source] = shares[:, None] * finding.edited[row, source]
        edit = leaks.Edit(source, np.ones(steps, bool), edited, since=source)
        found = _examine("huge", subject, (inputs, iter([edit]))).finding
        if found is None or found.kind != "nan-unsafe":
            return found if found is not None and found.kind == "leak" else None
        nothing, lost = shares[max(found.target_row - 1, 0)], shares[found.target_row]
    return None


def _nonfinite(subject: edits.Subject) -> Outcome:
    """Vectors of NaN and of infinities, and single such features."""
    rows = _vectors(subject)

    def nonfinite(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        one = x.copy()
        one[rng.integers(x.size)] = np.nan
        return np.stack([np.full_like(x, c) for c in (np.nan, np.inf, -np.inf)] + [one])

    made = edits.together(subject, rows, nonfinite)
    finding = _examine("non-finite", subject, made).finding
    return _outcome("non-finite", "NaN, inf, -inf, one feature NaN", finding)


def _batch(subject: edits.Subject) -> Outcome:
    """One row edited at a time: no other row may move.

    In rows that differ; then in equal ones, where what all of them hold ends with the
    edit of one.
    """
    rows = edits.accepted(
        subject,
        [edits.rows_of(subject, size, subject.length) for size in (_BATCH, 2)],
    )
    equal = np.repeat(rows[:1], len(rows), axis=0)
    found = [
        _alone("batch", subject, batch, _diagonal(batch)) for batch in (rows, equal)
    ]
    tried = f"one of {len(rows)} rows at a time, unlike and equal"
    return _outcome("batch", tried, leaks.worst(found))


def _lengths(subject: edits.Subject) -> Outcome:
    """Other lengths: one, a prime, odd ones, past powers of two."""

    def at(length: int) -> leaks.Finding | None:
        return _few("lengths", subject, edits.draw(subject, _ROWS, length))

    return _each("lengths", other_lengths(subject.length), at)


def _batch_sizes(subject: edits.Subject) -> Outcome:
    """Other numbers of rows, where a mask may broadcast along the wrong axis."""

    def at(size: int) -> leaks.Finding | None:
        rows = edits.draw(subject, size, subject.length)
        return _few("batch sizes", subject, rows)

    return _each("batch sizes", _BATCH_SIZES, at)


def _gradients(subject: edits.Subject) -> Outcome:
    """Derivatives by later inputs, which see what moves too little to be seen."""
    if subject.gradient is None:
        raise NotApplicable("a derivative needs vectors and JAX or PyTorch")
    inputs = edits.rows_of(subject, _ROWS, subject.length)
    norms = np.asarray(subject.gradient(inputs), np.float64)
    finite = np.isfinite(norms)
    largest = np.max(norms, where=finite, initial=0.0)
    later = np.triu(norms != 0, 1)
    kinds: dict[leaks.Kind, np.ndarray] = {
        "leak": later & finite & (norms > subject.tolerance * largest),
        "nan-unsafe": later & ~finite,
        "rounding": later,
    }
    finding = None
    if kind := next((kind for kind in leaks.WORST_FIRST if kinds[kind].any()), None):
        source, target = np.argwhere(kinds[kind].T)[0].tolist()
        derivative = float(norms[target, source])
        finding = leaks.Finding(
            kind, "gradients", source, target, derivative, largest, 0, 0, inputs, inputs
        )
    return _outcome("gradients", f"all pairs of {subject.length} positions", finding)


def _training(subject: edits.Subject) -> Outcome:
    """Edits in training mode, of all rows at once and of one at a time."""
    if subject.training is None:
        raise NotApplicable("the function has no training mode")
    subject = dataclasses.replace(subject, fn=subject.training)
    rows = edits.rows_of(subject, _BATCH, subject.length)
    together = edits.together(subject, rows, edits.ordinary(subject, 1))
    found = [
        _examine("training", subject, together).finding,
        _alone("training", subject, rows, _diagonal(rows)),
    ]
    tried = f"{len(rows)} rows at once, then one at a time"
    return _outcome("training", tried, leaks.worst(found))


PROBES: Mapping[str, Callable[[edits.Subject], Outcome]] = types.MappingProxyType(
    {
        "edits": _edits,
        "tiny": _tiny,
        "huge": _huge,
        "non-finite": _nonfinite,
        "batch": _batch,
        "lengths": _lengths,
        "batch sizes": _batch_sizes,
        "gradients": _gradients,
        "training": _training,
    }
)


def run(probe: str, subject: edits.Subject) -> Outcome:
    """Makes one of `PROBES`; that it cannot be made is an outcome too."""
    try:
        return PROBES[probe](subject)
    except NotApplicable as reason:
        return Outcome(probe, "not applicable", str(reason))
    except leaks.Refused as reason:
        return Outcome(probe, "refused", str(reason))


# What they share


def other_lengths(length: int) -> list[int]:
    """One, a prime below `length`, and 2ᵏ + 1 below and above it."""
    power = 2 ** int(math.log2(max(length - 1, 1)))
    prime = next(n for n in range(length, 0, -1) if all(n % d for d in range(2, n)))
    return sorted({1, prime, power + 1, 4 * power + 1} - {length})


def _vectors(subject: edits.Subject) -> Float[np.ndarray, "B T E"]:
    if subject.vocab_size is not None:
        raise NotApplicable("tokens have no size")
    return edits.rows_of(subject, _ROWS, subject.length)


def _examine(probe: str, subject: edits.Subject, made: edits.Edits) -> search.Seen:
    return search.examine(probe, subject.fn, *made, tolerance=subject.tolerance)


def _alone(
    probe: str,
    subject: edits.Subject,
    rows: Shaped[np.ndarray, "B T ..."],
    places: Iterable[tuple[int, int]],
) -> leaks.Finding | None:
    """Edits of one row at a time."""
    one = edits.ordinary(subject, 1)
    made = edits.one_row_at_a_time(subject, rows, places, one, causal=True)
    return _examine(probe, subject, made).finding


def _diagonal(rows: Shaped[np.ndarray, "B T ..."]) -> Iterator[tuple[int, int]]:
    """Each position, in one row after another."""
    return ((position, position % len(rows)) for position in range(rows.shape[1]))


def _few(
    probe: str,
    subject: edits.Subject,
    rows: Shaped[np.ndarray, "B T ..."],
) -> leaks.Finding | None:
    """Edits of each position in all rows, and of each row at a few positions."""
    made = edits.together(subject, rows, edits.ordinary(subject, 1))
    ends = sorted({0, rows.shape[1] // 2, rows.shape[1] - 1})
    places = itertools.product(ends, range(len(rows)))
    return leaks.worst(
        [_examine(probe, subject, made).finding, _alone(probe, subject, rows, places)]
    )


def _each(
    probe: str, sizes: Iterable[int], at: Callable[[int], leaks.Finding | None]
) -> Outcome:
    """One search at each size; those that the function refuses are named."""
    found, done, refused = [], [], []
    for size in sizes:
        try:
            found.append(at(size))
            done.append(str(size))
        except leaks.Refused:
            refused.append(str(size))
    words = [", ".join(done)] if done else []
    if refused:
        words.append(f"refused: {', '.join(refused)}")
    if not done:
        return Outcome(probe, "refused", words[0])
    return _outcome(probe, "; ".join(words), leaks.worst(found))


def _outcome(
    probe: str,
    tried: str,
    finding: leaks.Finding | None,
    moved: Float[np.ndarray, "T T"] | None = None,
) -> Outcome:
    kind = "clear" if finding is None else finding.kind
    return Outcome(probe, kind, tried, finding, moved)
