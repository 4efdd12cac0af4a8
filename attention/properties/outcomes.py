"""What a probe saw of a function, or why it saw nothing."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from attention.properties import findings

Kind = findings.Kind | Literal["clear", "not applicable", "refused", "skipped", "void"]


class NotApplicable(Exception):
    """The probe cannot be made of this function; the message says why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a probe saw.

    Attributes:
      probe: its name.
      kind: kind of the worst finding, or why there is none; 'void' if the probe showed
        nothing, for or against the function.
      tried: what it did, or why it did nothing, in words.
      finding: the worst of what moved though it must not; None if nothing did.
      moved: largest movement of output i by edits of input j, [T T], allowed ones
        too; None where the probe has no such matrix.
      figures: more for report.json.
    """

    probe: str
    kind: Kind
    tried: str
    finding: findings.Finding | None = None
    moved: Float[np.ndarray, "T T"] | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        probe: str,
        tried: str,
        finding: findings.Finding | None,
        moved: Float[np.ndarray, "T T"] | None = None,
    ) -> "Outcome":
        """The outcome of a probe that ran: its worst finding says the kind."""
        kind = "clear" if finding is None else finding.kind
        return cls(probe, kind, tried, finding, moved)
