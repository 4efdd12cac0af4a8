"""What a study may say: means with intervals, differences that exclude 0, assertions.

Differences are paired by seed. Each interval is wide enough for all of them to hold
together at the usual level (Bonferroni): with m of them, each at 1 - (1 - level) / m.
Accuracies lie in [0, 1] and runs are few: intervals of Student are approximations.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from train.studies import intervals
from train.studies.recall import config, table

# By how much the accuracy of a guess may exceed chance.
MARGIN = 0.01

Verdict = Literal["above", "below", "not told apart"]


@dataclasses.dataclass(frozen=True)
class Point:
    """The report of one mixer of one width.

    Attributes:
      mixer: as in `table.Row`.
      width: as in `table.Row`.
      parameters: as in `table.Row`.
      state: as in `table.Row`.
      rate: as in `table.Row`.
      steps: of each run, by seed.
      accuracies: of each run on the test split, by seed.
    """

    mixer: str
    width: int
    parameters: int
    state: int
    rate: float
    steps: tuple[int, ...]
    accuracies: tuple[float, ...]

    @property
    def interval(self) -> intervals.Interval:
        """Of the mean accuracy, in [0, 1]."""
        found = intervals.of_mean(np.array(self.accuracies))
        return intervals.Interval(*np.clip(found, 0, 1).tolist())

    def report(self) -> dict[str, Any]:
        """As in report.json."""
        return dataclasses.asdict(self) | {"interval": self.interval._asdict()}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One against another: the interval of the mean difference of their accuracies."""

    one: Point
    other: Point
    interval: intervals.Interval

    @property
    def verdict(self) -> Verdict:
        """Where `one` stands; only an interval without 0 tells."""
        if self.interval.low > 0:
            return "above"
        return "below" if self.interval.high < 0 else "not told apart"

    def report(self) -> dict[str, Any]:
        """As in report.json."""
        return {
            "one": [self.one.mixer, self.one.width],
            "other": [self.other.mixer, self.other.width],
            "verdict": self.verdict,
            "difference": self.interval._asdict(),
        }


@dataclasses.dataclass(frozen=True)
class Reach:
    """Accuracy of a model of windows: within the windows, and beyond its reach."""

    width: int
    within: intervals.Interval
    beyond: intervals.Interval
    difference: intervals.Interval

    def report(self) -> dict[str, Any]:
        """As in report.json."""
        return {
            "width": self.width,
            "within": self.within._asdict(),
            "beyond": self.beyond._asdict(),
            "difference": self.difference._asdict(),
        }


@dataclasses.dataclass(frozen=True)
class Check:
    """An assertion of the study."""

    words: str
    passed: bool


def points(rows: Sequence[table.Row]) -> list[Point]:
    """The runs of the report, joined by mixer and width, in their order."""
    groups: dict[tuple[str, int], list[table.Row]] = {}
    for row in rows:
        if row.split == "test":
            groups.setdefault((row.mixer, row.width), []).append(row)
    found = []
    for (mixer, width), own in groups.items():
        own = sorted(own, key=lambda row: row.seed)
        found.append(
            Point(
                mixer,
                width,
                own[0].parameters,
                own[0].state,
                own[0].rate,
                tuple(row.steps for row in own),
                tuple(row.accuracy for row in own),
            )
        )
    return found


def ranked(found: Sequence[Point], width: int) -> list[Point]:
    """The points of a width, the highest mean first."""
    own = [point for point in found if point.width == width]
    return sorted(own, key=lambda point: -point.interval.mean)


def compare(found: Sequence[Point], *, goal: float) -> list[Comparison]:
    """The mixer that is named first against each other one; then each one's widths.

    Not all pairs: the more intervals have to hold together, the wider each of them is.

    Args:
      found: what was reported.
      goal: accuracy at which runs end.
    """
    pairs: list[tuple[Point, Point]] = []
    for width in dict.fromkeys(point.width for point in found):
        first, *others = (point for point in found if point.width == width)
        pairs += [(first, other) for other in others]
    for mixer in dict.fromkeys(point.mixer for point in found):
        own = sorted((x for x in found if x.mixer == mixer), key=lambda x: -x.width)
        pairs += itertools.pairwise(own)
    level = 1 - (1 - intervals.LEVEL) / max(len(pairs), 1)
    return [
        Comparison(one, other, _difference(one, other, level, goal))
        for one, other in pairs
    ]


def reaches(
    settings: config.StudyConfig, rows: Sequence[table.DistanceRow]
) -> list[Reach]:
    """How windows recall, by width; [] where nothing is asked within, or beyond.

    In between stands what the convolutions add, which a model may use or not.

    Args:
      settings: of the study.
      rows: of its recall by distance.
    """
    found = []
    widths = sorted({row.width for row in rows if row.mixer == "window"})
    # Two assertions for each width.
    level = 1 - (1 - intervals.LEVEL) / max(2 * len(widths), 1)
    for width in widths:
        own = [row for row in rows if (row.mixer, row.width) == ("window", width)]
        parts = [
            [row for row in own if row.distance <= settings.model.window_reach],
            [row for row in own if row.distance > settings.model.reach],
        ]
        if not all(parts):
            continue
        within, beyond = map(_shares, parts)
        found.append(
            Reach(
                width,
                intervals.of_mean(within, level=level),
                intervals.of_mean(beyond, level=level),
                intervals.of_difference(within, beyond, level=level),
            )
        )
    return found


def checks(
    settings: config.StudyConfig,
    found: Sequence[Point],
    reached: Sequence[Reach],
) -> list[Check]:
    """The study's own assertions, of recall; the other tasks make none.

    What must have been learned is asserted of the largest width only: a smaller one may
    need more steps.
    """
    if settings.task != "recall":
        return []
    goal, chance = settings.runs.goal, 1 / settings.recall.num_values
    made = [
        Check(
            f"softmax of width {point.width} reaches {goal}: {point.interval}",
            point.interval.mean >= goal,
        )
        for point in found
        if point.mixer == "softmax" and point.width == settings.sizes[-1]
    ]
    for reach in reached:
        made.append(
            Check(
                f"windows of width {reach.width} guess beyond their reach: "
                f"{reach.beyond}, chance is {chance:.3g}, at most {MARGIN} more",
                reach.beyond.high <= chance + MARGIN,
            )
        )
        if reach.width == settings.sizes[-1]:
            words = f"windows of width {reach.width} recall more within"
            made.append(
                Check(
                    f"{words}: {reach.within}, the difference is {reach.difference}",
                    reach.difference.low > 0,
                )
            )
    return made


def _difference(
    one: Point, other: Point, level: float, goal: float
) -> intervals.Interval:
    # Runs end at the goal: what they are beyond it is chance.
    accuracies = (np.minimum(point.accuracies, goal) for point in (one, other))
    return intervals.of_difference(*accuracies, level=level)


def _shares(rows: Sequence[table.DistanceRow]) -> np.ndarray:
    """Of all questions of each run, the share that is answered rightly."""
    right: dict[int, int] = {}
    asked: dict[int, int] = {}
    for row in rows:
        right[row.seed] = right.get(row.seed, 0) + row.right
        asked[row.seed] = asked.get(row.seed, 0) + row.count
    return np.array([right[seed] / asked[seed] for seed in sorted(right)])
