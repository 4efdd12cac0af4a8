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
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Shaped

from attention.properties import movements

# NumPy arrays [B T ...] -> [B T ...].
Function = Callable[[np.ndarray], np.ndarray]
Kind = Literal["leak", "nan-unsafe", "rounding"]
WORST_FIRST: tuple[Kind, ...] = ("leak", "nan-unsafe", "rounding")

# Share of an edit's size below which a movement is called rounding.
ROUNDING = 1e-5
# Units in the last place of a row's largest output: of float32, and of its own dtype.
_ULPS_FLOAT32, _ULPS = 64, 2
# An edit is huge beyond this many times the scale of the inputs.
_ORDINARY = 30


class Refused(ValueError):
    """The function raised, or returned something else than one array [B T ...]."""


class NotDeterministic(AssertionError):
    """Equal inputs gave other outputs, so that no movement says anything."""


class LeakError(AssertionError):
    """An output depends on an input that it must not see.

    Attributes:
      source: position of the input that was seen.
      target: earliest position of an output that it moved.
      movement: as of `Finding`.
    """

    def __init__(
        self,
        source: int,
        target: int,
        movement: float,
        *,
        where: str = "",
        probe: str = "",
    ):
        seen_by = f" ({probe})" if probe else ""
        how = "it moved by"
        if probe == "gradients":
            how = "its derivative in a random direction is"
        super().__init__(
            f"output {target}{where} depends on input {source}: "
            f"{how} {movement:.3g}{seen_by}"
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
      target: earliest position of an output that moved; of rounding, the one that
        moved most.
      movement: largest change of that output; NaN where it has no size. For the
        probe 'gradients' its largest |cᵀ ∂yᵢ/∂xⱼ|, of `movements.jacobian_norms`.
      size: of the edit; of a token's, the most that it moved an output of the row;
        of a derivative, the largest of all.
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

    @property
    def share(self) -> float:
        """Of rounding: the movement in proportion to the size; otherwise 0."""
        rounds = self.kind == "rounding"
        return self.movement / (self.size or self.movement) if rounds else 0.0

    def error(self) -> LeakError:
        """The finding as the error to raise."""
        where = "" if self.row == self.target_row else " in another row of the batch"
        return LeakError(
            self.source, self.target, self.movement, where=where, probe=self.probe
        )


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
      Refused: if it raises, or as of `answer`.
    """
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return answer(fn(inputs.copy()), inputs)
    except Refused:  # who says more of what went wrong
        raise
    # Foreign code: anything may go wrong.
    except (Exception, SystemExit) as error:
        line = " ".join(str(error).split())
        raise Refused(f"{type(error).__name__}: {line}") from error


def answer(
    output: Any, inputs: Shaped[movements.AnyArray, "B T ..."]
) -> Shaped[np.ndarray, "B T ..."]:
    """What a function returned of such inputs, as NumPy's.

    Raises:
      Refused: if it is something else than one array [B T ...].
    """
    if not isinstance(output, np.ndarray | jax.Array):
        raise Refused(f"returned {type(output).__name__!r}, expected one array")
    if output.shape[:2] != inputs.shape[:2]:
        raise Refused(
            f"expected outputs {list(inputs.shape[:2])} + features, "
            f"got {list(output.shape)}"
        )
    return np.asarray(output)


def worst(findings: Iterable[Finding | None]) -> Finding | None:
    """The first of the worst kind; of rounding, the largest share."""
    return min(
        (finding for finding in findings if finding is not None),
        key=lambda x: (WORST_FIRST.index(x.kind), -x.share),
        default=None,
    )


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
    base = call(fn, inputs)
    return compare_with(base, probe, fn, inputs, edit, tolerance=tolerance)[0]


def compare_with(
    base: Shaped[np.ndarray, "B T ..."],
    probe: str,
    fn: Function,
    inputs: Shaped[np.ndarray, "B T ..."],
    edit: Edit,
    *,
    tolerance: float,
) -> tuple[Finding | None, Float[np.ndarray, "T"]]:
    """What an edit shows, where the outputs of the unedited inputs are known.

    Args:
      base: outputs of `inputs`.
      probe: name of the probe that made the edit.
      fn: the function.
      inputs: unedited.
      edit: of these inputs.
      tolerance: share of an edit's size that is rounding; 0: no bit may move.

    Returns:
      The worst finding, and how far outputs of the edited rows moved, infinite where a
      movement has no size.

    Raises:
      Refused: if the function raises, or returns another shape.
    """
    outputs = call(fn, edit.inputs)
    if outputs.shape != base.shape:
        raise Refused(f"returned {list(base.shape)}, then {list(outputs.shape)}")
    numbers, nonfinite = movements.changes(base, outputs)
    reached = np.where(nonfinite, np.inf, numbers)[edit.rows].max(axis=0)
    allowed = edit.rows[:, None] & (np.arange(base.shape[1]) >= edit.since)
    moved = (nonfinite | (numbers > 0)) & ~allowed
    if not moved.any():
        return None, reached
    sizes, ordinary = _sizes(inputs, edit)
    # 0 · NaN is NaN, and a huge number may overflow: no sign of a dependence yet.
    spreads = not ordinary or bool(nonfinite[edit.rows, edit.position].any())
    unsafe = nonfinite & spreads
    more = numbers > 0
    if tolerance > 0:
        more = _moved_more(base, outputs, edit.rows, sizes, tolerance)
    kind, where = _worst_kind(moved, unsafe, (nonfinite & ~unsafe) | more)
    if kind == "rounding":
        where = where & (numbers == numbers[where].max())
    target = int(np.argmax(where.any(axis=0)))
    target_row = int(np.argmax(np.where(where[:, target], numbers[:, target], -1)))
    row = target_row if edit.rows[target_row] else int(np.argmax(edit.rows))
    finding = Finding(
        kind=kind,
        probe=probe,
        source=edit.position,
        target=target,
        # What moved though no number did became NaN or infinite, or was.
        movement=float(numbers[target_row, target]) or np.nan,
        size=float(numbers[row].max() if sizes is None else sizes[row]),
        row=row,
        target_row=target_row,
        inputs=inputs,
        edited=edit.inputs,
    )
    return finding, reached


def _worst_kind(
    moved: Bool[np.ndarray, "B T"],
    unsafe: Bool[np.ndarray, "B T"],
    depends: Bool[np.ndarray, "B T"],
) -> tuple[Kind, Bool[np.ndarray, "B T"]]:
    """The worst kind of what moved though it must not, and where it did."""
    kinds: dict[Kind, np.ndarray] = {
        "leak": moved & depends,
        "nan-unsafe": moved & unsafe,
        "rounding": moved,
    }
    kind = next(kind for kind in WORST_FIRST if kinds[kind].any())
    return kind, kinds[kind]


def _sizes(
    inputs: Shaped[np.ndarray, "B T ..."], edit: Edit
) -> tuple[Float[np.ndarray, "B"] | None, bool]:
    """How large the edit is in every row (tokens: None), and whether that is usual."""
    if np.issubdtype(inputs.dtype, np.integer):
        return None, True
    before, after = (
        x[:, edit.position].astype(np.float64).reshape(len(x), -1)
        for x in (inputs, edit.inputs)
    )
    is_number = np.isfinite(after).all()
    sizes = np.abs(after - before if is_number else before).max(axis=1, initial=0.0)
    return sizes, bool(is_number and sizes.max() <= _ORDINARY * scale(inputs))


def scale(inputs: Float[np.ndarray, "..."]) -> float:
    """Root mean square of the inputs; 1 if they are all zero."""
    wide = inputs.astype(np.float64)
    return float(np.sqrt(np.mean(np.where(np.isfinite(wide), wide, 0) ** 2))) or 1.0


def _moved_more(
    base: Shaped[np.ndarray, "B T ..."],
    outputs: Shaped[np.ndarray, "B T ..."],
    rows: Bool[np.ndarray, "B"],
    sizes: Float[np.ndarray, "B"] | None,
    tolerance: float,
) -> Bool[np.ndarray, "B T"]:
    """Which outputs moved by more than another order of sums could explain.

    Each feature is measured by itself: a column of -1e9 must not hide the others. A
    token's edit is as large as the largest movement of the feature; in a row that was
    not edited, the largest of any row counts. No feature is held to be finer than the
    finest tenth of them.
    """
    shape = (*base.shape[:2], -1)
    before, after = (x.astype(np.float64).reshape(shape) for x in (base, outputs))
    finite = np.isfinite(before) & np.isfinite(after)
    before, after = (np.where(finite, x, 0) for x in (before, after))
    change = np.abs(after - before)
    edit = change.max(axis=1) if sizes is None else sizes[:, None]
    edit = np.where(rows[:, None], edit, edit[rows].max(axis=0))
    largest = np.maximum(np.abs(before), np.abs(after)).max(axis=1)
    threshold = np.maximum(
        tolerance * _at_least_tenth(edit), _ulps(base.dtype) * _at_least_tenth(largest)
    )
    return (change > threshold[:, None]).any(axis=-1)


def _at_least_tenth(x: Float[np.ndarray, "B F"]) -> Float[np.ndarray, "B F"]:
    """The numbers of the features, none below their lowest decile."""
    return np.maximum(x, np.quantile(x, 0.1, axis=-1, keepdims=True, method="lower"))


def _ulps(dtype: np.dtype) -> float:
    """A few units in the last place, relative to a number."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    narrow = _ULPS * float(jnp.finfo(dtype).eps)
    return max(_ULPS_FLOAT32 * float(np.finfo(np.float32).eps), narrow)
