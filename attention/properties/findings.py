"""What a pair of inputs that differ at one position shows of a function.

    yᵢ = f(x₁, …, xᵢ)   ⇒   Δⱼ yᵢ = 0 for every j > i, and in every other row

An output that moved though it must not is a `Finding`, of one of three kinds:

    leak         an output moved
    nan-unsafe   it turned into NaN or infinity, and no number moved: 0 · NaN is NaN
    rounding     it moved by less than ROUNDING of the edit's size, or by a few units
                 in the last place: sums in another order (FFT) do that
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import numpy as np
from jaxtyping import Shaped

Kind = Literal["leak", "nan-unsafe", "rounding"]
WORST_FIRST: tuple[Kind, ...] = ("leak", "nan-unsafe", "rounding")

# Share of an edit's size below which a movement is called rounding.
ROUNDING = 1e-5


class NotDeterministic(AssertionError):
    """Equal inputs gave different outputs, so that no movement says anything."""


class LeakError(AssertionError):
    """An output depends on an input that it must not see.

    Attributes:
      source: position of the input that was seen.
      target: earliest position of an output that it moved.
      movement: largest change of that output; NaN where it has no size.
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
      probe: name of the probe that saw it.
      source: position of the edited input.
      target: earliest position of an output that moved; of rounding, the one that
        moved most.
      movement: largest change of that output; NaN where it has no size. For the
        probe 'gradients' its largest |cᵀ ∂yᵢ/∂xⱼ|, of `movements.jacobian_norms`.
      size: size of the edit; of a token's, the most that it moved an output of the
        row; of a derivative, the largest of all derivatives.
      row: row of the batch that was edited.
      target_row: row of the output; another one where rows are mixed.
      inputs: inputs before the edit, [B T ...].
      edited: inputs after it; equal to `inputs` for a derivative.
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


def worst(findings: Iterable[Finding | None]) -> Finding | None:
    """The first finding of the worst kind; of rounding, the one of the largest share.

    None stands for a comparison in which nothing moved; the result is None if all are.
    """
    return min(
        (finding for finding in findings if finding is not None),
        key=lambda finding: (WORST_FIRST.index(finding.kind), -finding.share),
        default=None,
    )
