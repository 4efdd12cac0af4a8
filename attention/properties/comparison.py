"""Compares the outputs of a pair of inputs that differ at one position.

Outputs are compared in the same batch slots, bit for bit: an honest causal function
gives exactly the same bits. What moved though it must not is a `findings.Finding`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Shaped

from attention.properties import calls, edits, findings, movements

# Units in the last place of a row's largest output: of float32, and of its own dtype.
_ULPS_FLOAT32, _ULPS = 64, 2
# An edit is huge beyond this many times the scale of the inputs.
_ORDINARY = 30


class Comparison(NamedTuple):
    """What an edit shows.

    Attributes:
      finding: the worst that moved though it must not; None if nothing did.
      reached: how far outputs of the edited rows moved, allowed ones included;
        infinite where a movement has no size.
    """

    finding: findings.Finding | None
    reached: Float[np.ndarray, "T"]


def compare(
    probe: str,
    fn: calls.NumpyFunction,
    inputs: Shaped[np.ndarray, "B T ..."],
    edited: Shaped[np.ndarray, "B T ..."],
    *,
    tolerance: float,
) -> findings.Finding | None:
    """Compares what a function makes of a pair of inputs.

    Outputs before the first position at which the inputs differ must not move, nor
    any output of a row in which they do not differ.

    Args:
      probe: name of the probe that made the pair.
      fn: maps [B T ...] to [B T ...].
      inputs: before the edit.
      edited: after it.
      tolerance: share of an edit's size that is rounding; with 0 no bit may move.

    Returns:
      The worst that moved though it must not; None if nothing did.

    Raises:
      Refused: if the function raises, or returns another length.
      ValueError: if the inputs do not differ.
    """
    differs = movements.movement(inputs, edited) != 0
    if not differs.any():
        raise ValueError("the two inputs are equal: there is nothing to compare")
    position = int(np.argmax(differs.any(axis=0)))
    edit = edits.Edit(position, differs.any(axis=1), edited, since=position)
    base = calls.call(fn, inputs)
    return compare_with(base, probe, fn, inputs, edit, tolerance=tolerance).finding


def compare_with(
    base: Shaped[np.ndarray, "B T ..."],
    probe: str,
    fn: calls.NumpyFunction,
    inputs: Shaped[np.ndarray, "B T ..."],
    edit: edits.Edit,
    *,
    tolerance: float,
) -> Comparison:
    """Compares an edit with the known outputs of the unedited inputs.

    Args:
      base: outputs of `inputs`.
      probe: name of the probe that made the edit.
      fn: maps [B T ...] to [B T ...].
      inputs: unedited.
      edit: of these inputs.
      tolerance: share of an edit's size that is rounding; with 0 no bit may move.

    Raises:
      Refused: if the function raises, or returns another shape.
    """
    outputs = calls.call(fn, edit.inputs)
    if outputs.shape != base.shape:
        raise calls.Refused(f"returned {list(base.shape)}, then {list(outputs.shape)}")
    numbers, nonfinite = movements.changes(base, outputs)
    reached = np.where(nonfinite, np.inf, numbers)[edit.rows].max(axis=0)
    allowed = edit.rows[:, None] & (np.arange(base.shape[1]) >= edit.since)
    moved = (nonfinite | (numbers > 0)) & ~allowed
    if not moved.any():
        return Comparison(None, reached)
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
    finding = findings.Finding(
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
    return Comparison(finding, reached)


def _worst_kind(
    moved: Bool[np.ndarray, "B T"],
    unsafe: Bool[np.ndarray, "B T"],
    depends: Bool[np.ndarray, "B T"],
) -> tuple[findings.Kind, Bool[np.ndarray, "B T"]]:
    """The worst kind of what moved though it must not, and where it did."""
    kinds: dict[findings.Kind, np.ndarray] = {
        "leak": moved & depends,
        "nan-unsafe": moved & unsafe,
        "rounding": moved,
    }
    kind = next(kind for kind in findings.WORST_FIRST if kinds[kind].any())
    return kind, kinds[kind]


def _sizes(
    inputs: Shaped[np.ndarray, "B T ..."], edit: edits.Edit
) -> tuple[Float[np.ndarray, "B"] | None, bool]:
    """How large the edit is in every row, and whether that is an ordinary size.

    An edit of tokens has no size by itself: None, and ordinary.
    """
    if np.issubdtype(inputs.dtype, np.integer):
        return None, True
    before, after = (
        x[:, edit.position].astype(np.float64).reshape(len(x), -1)
        for x in (inputs, edit.inputs)
    )
    is_number = np.isfinite(after).all()
    sizes = np.abs(after - before if is_number else before).max(axis=1, initial=0.0)
    return sizes, bool(is_number and sizes.max() <= _ORDINARY * edits.scale(inputs))


def _moved_more(
    base: Shaped[np.ndarray, "B T ..."],
    outputs: Shaped[np.ndarray, "B T ..."],
    rows: Bool[np.ndarray, "B"],
    sizes: Float[np.ndarray, "B"] | None,
    tolerance: float,
) -> Bool[np.ndarray, "B T"]:
    """Which outputs moved by more than another order of sums could explain.

    Each feature is measured by itself: a column of -1e9 must not hide another. A
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
