"""A pair of inputs that differ at one position, and what the outputs show of it.

    yᵢ = f(x₁, …, xᵢ)   ⇒   Δⱼ yᵢ = 0 for every j > i, and in every other row

`compare` looks at one such pair. What moved though it must not is a `Finding`:

    leak         an output moved
    nan-unsafe   it turned into NaN or infinity, and no number moved: 0 · NaN is NaN
    rounding     it moved by less than ROUNDING of the edit's size, or by a few units
                 in the last place: sums in another order (FFT) do that

Outputs are compared in the same batch slots, bit for bit: an honest causal function
gives exactly the same bits.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Shaped

from attention import movements

# NumPy arrays [B T ...] -> [B T ...].
Function = Callable[[np.ndarray], np.ndarray]
Kind = Literal["leak", "nan-unsafe", "rounding"]
WORST_FIRST: tuple[Kind, ...] = ("leak", "nan-unsafe", "rounding")

# Share of an edit's size below which a movement is called rounding.
ROUNDING = 1e-5
# Units in the last place of a row's largest output: of float32, and of its own dtype.
_ULPS_FLOAT32, _ULPS = 16, 2
# An edit is huge if it is this many times the scale of the inputs.
_HUGE = 30


class Refused(Exception):
    """The function raised, or returned another length than it was given."""


class LeakError(AssertionError):
    """An output depends on an input that it must not see.

    Attributes:
      source: position of the input that was seen.
      target: earliest position of an output that it moved.
      movement: largest change of that output (or its derivative); NaN where it has
        no size.
    """

    def __init__(self, source: int, target: int, movement: float, *, where: str):
        super().__init__(
            f"output {target}{where} depends on input {source}: "
            f"it moved by {movement:.3g}"
        )
        self.source = source
        self.target = target
        self.movement = movement


@dataclasses.dataclass(frozen=True)
class Finding:
    """An output that moved though it must not, and the pair of inputs that shows it.

    Attributes:
      kind: 'leak', 'nan-unsafe' or 'rounding'.
      probe: that saw it.
      source: position of the edited input.
      target: earliest position of an output that moved.
      movement: largest change of that output; NaN where it has no size. For the
        probe 'gradients' the derivative.
      size: of the edit.
      row: of the batch that was edited.
      target_row: of the output; another one where rows are mixed.
      inputs: before the edit, [B T ...].
      edited: after it; equal to `inputs` for a derivative.
    """

    kind: Kind
    probe: str
    source: int
    target: int
    movement: float
    size: float
    row: int
    target_row: int
    inputs: Shaped[np.ndarray, "B T ..."]
    edited: Shaped[np.ndarray, "B T ..."]

    def error(self) -> LeakError:
        """The finding as the error to raise."""
        where = "" if self.row == self.target_row else " in another row of the batch"
        where = f"{where} [{self.probe}]"
        return LeakError(self.source, self.target, self.movement, where=where)


class Edit(NamedTuple):
    """Inputs [B T ...] of which one position was edited.

    Attributes:
      position: that was edited.
      rows: in which it was.
      inputs: with the edit.
      since: first output of those rows that may move.
    """

    position: int
    rows: Bool[np.ndarray, "B"]
    inputs: Shaped[np.ndarray, "B T ..."]
    since: int


def call(fn: Function, inputs: Shaped[np.ndarray, "B T ..."]) -> np.ndarray:
    """The outputs [B T ...] of foreign code on a copy of the inputs.

    Raises:
      Refused: if it raises, or returns other leading axes.
    """
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            outputs = np.asarray(fn(inputs.copy()))
    # Foreign code: anything may go wrong.
    except Exception as error:
        line = " ".join(str(error).split())
        raise Refused(f"{type(error).__name__}: {line}") from error
    if outputs.shape[:2] != inputs.shape[:2]:
        raise Refused(
            f"expected outputs {list(inputs.shape[:2])} + features, "
            f"got {list(outputs.shape)}"
        )
    return outputs


def examine(
    probe: str,
    fn: Function,
    inputs: Shaped[np.ndarray, "B T ..."],
    edits: Iterable[Edit],
    *,
    tolerance: float,
) -> tuple[Finding | None, Float[np.ndarray, "T T"]]:
    """The worst that any of the edits shows, and how far they moved what.

    Args:
      probe: name of the probe that makes them.
      fn: the function.
      inputs: unedited.
      edits: of these inputs.
      tolerance: share of an edit's size that is rounding; 0: no bit may move.

    Returns:
      The worst finding, of the earliest source among equals, and the largest movement
      of output i of a row by edits of its input j, allowed ones included: [T T],
      infinite where it has no size.
    """
    base = call(fn, inputs)
    moved = np.zeros((inputs.shape[1],) * 2)
    findings = []
    for edit in edits:
        found, own = _compare(probe, fn, inputs, base, edit, tolerance)
        moved[:, edit.position] = np.maximum(moved[:, edit.position], own)
        findings.append(found)
    return worst(findings), moved


def worst(findings: Iterable[Finding | None]) -> Finding | None:
    """The first of the worst kind."""
    found = [finding for finding in findings if finding is not None]
    return min(found, key=lambda x: WORST_FIRST.index(x.kind), default=None)


def compare(
    probe: str,
    fn: Function,
    inputs: Shaped[np.ndarray, "B T ..."],
    edited: Shaped[np.ndarray, "B T ..."],
    *,
    tolerance: float,
) -> Finding | None:
    """What one pair of inputs shows.

    Outputs before the first position at which the inputs differ must not move, nor
    any output of a row in which they do not differ.

    Raises:
      Refused: if the function raises, or returns another length.
      ValueError: if the inputs do not differ.
    """
    differs = movements.movement(inputs, edited) != 0
    if not differs.any():
        raise ValueError("the two inputs are equal: there is nothing to compare")
    position = int(np.argmax(differs.any(axis=0)))
    edit = Edit(position, differs.any(axis=1), edited, since=position)
    return _compare(probe, fn, inputs, call(fn, inputs), edit, tolerance)[0]


def _compare(
    probe: str,
    fn: Function,
    inputs: Shaped[np.ndarray, "B T ..."],
    base: Shaped[np.ndarray, "B T ..."],
    edit: Edit,
    tolerance: float,
) -> tuple[Finding | None, Float[np.ndarray, "T"]]:
    """The worst that an edit shows, and how far it moved outputs of its own rows."""
    outputs = call(fn, edit.inputs)
    if outputs.shape != base.shape:
        raise Refused(f"returned {list(base.shape)}, then {list(outputs.shape)}")
    numbers, nonfinite = movements.changes(base, outputs)
    own = np.where(nonfinite, np.inf, numbers)[edit.rows].max(axis=0)
    allowed = edit.rows[:, None] & (np.arange(base.shape[1]) >= edit.since)
    moved = (nonfinite | (numbers > 0)) & ~allowed
    if not moved.any():
        return None, own
    sizes, ordinary = _sizes(inputs, edit, numbers)
    # 0 · inf is NaN, and a huge number may overflow: no sign of a dependence yet.
    unsafe = nonfinite & (not ordinary)
    threshold = 0.0 if tolerance == 0 else _rounding(base, sizes, tolerance)
    leak = moved & ((nonfinite & ~unsafe) | (numbers > threshold))
    kinds = {"leak": leak, "nan-unsafe": moved & unsafe, "rounding": moved}
    kind = next(kind for kind in WORST_FIRST if kinds[kind].any())
    size = np.where(nonfinite & (numbers == 0), np.nan, numbers)
    target = int(np.argmax(kinds[kind].any(axis=0)))
    candidates = np.where(kinds[kind][:, target], np.nan_to_num(size[:, target]), -1)
    target_row = int(np.argmax(candidates))
    own_row = edit.rows[target_row]
    row = target_row if own_row else int(np.argmax(edit.rows))
    finding = Finding(
        kind=kind,
        probe=probe,
        source=edit.position,
        target=target,
        movement=float(size[target_row, target]),
        size=float(sizes[row]),
        row=row,
        target_row=target_row,
        inputs=inputs,
        edited=edit.inputs,
    )
    return finding, own


def _sizes(
    inputs: Shaped[np.ndarray, "B T ..."],
    edit: Edit,
    numbers: Float[np.ndarray, "B T"],
) -> tuple[Float[np.ndarray, "B"], bool]:
    """How large the edit is in every row, and whether it is of ordinary size.

    A token has no size: that of its edit is the largest movement it causes. In a row
    that was not edited, the size is the largest in any row.
    """
    ordinary = True
    if np.issubdtype(inputs.dtype, np.integer):
        sizes = numbers.max(axis=1)
    else:
        before, after = (
            x[:, edit.position].astype(np.float64).reshape(len(x), -1)
            for x in (inputs, edit.inputs)
        )
        is_number = np.isfinite(after).all()
        sizes = np.abs(after - before if is_number else before).max(axis=1, initial=0.0)
        ordinary = bool(is_number and sizes.max() <= _HUGE * scale(inputs))
    return np.where(edit.rows, sizes, sizes.max()), ordinary


def scale(inputs: Float[np.ndarray, "B T E"]) -> float:
    """Root mean square of the inputs; 1 if they are all zero."""
    wide = inputs.astype(np.float64)
    return float(np.sqrt(np.mean(np.where(np.isfinite(wide), wide, 0) ** 2))) or 1.0


def _rounding(
    base: Shaped[np.ndarray, "B T ..."],
    sizes: Float[np.ndarray, "B"],
    tolerance: float,
) -> Float[np.ndarray, "B 1"]:
    """The movement up to which each row's outputs may have been rounded otherwise."""
    ulp = 0.0
    if jnp.issubdtype(base.dtype, jnp.floating):
        ulp = max(
            _ULPS_FLOAT32 * float(np.finfo(np.float32).eps),
            _ULPS * float(jnp.finfo(base.dtype).eps),
        )
    values = np.abs(base.astype(np.float64)).reshape(len(base), -1)
    largest = np.where(np.isfinite(values), values, 0).max(axis=1, initial=0.0)
    return np.maximum(tolerance * sizes, ulp * largest)[:, None]


def shrink(fn: Function, finding: Finding, *, tolerance: float) -> Finding:
    """The smallest pair of inputs found that still shows a leak.

    One row instead of the batch, nothing after the edit, as little as possible before
    it; each is kept if the leak still shows.

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
            found = compare(finding.probe, fn, *pair, tolerance=tolerance)
        except (Refused, ValueError):
            found = None
        if found is None or found.kind != "leak":
            return False
        smallest = found
        return True

    everything = slice(None)
    attempt([finding.target_row], everything) or attempt(
        sorted({finding.row, finding.target_row}), everything
    )
    attempt(everything, slice(0, max(smallest.source, smallest.target) + 1))
    kept = 2
    while kept < smallest.inputs.shape[1] and not attempt(
        everything, slice(-kept, None)
    ):
        kept *= 2
    return smallest
