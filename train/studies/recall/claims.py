"""Claims of the study: means with intervals, differences that exclude 0, assertions.

Differences are paired by seed. Intervals are wide enough for all of them to hold
together at the usual level (`intervals.joint_level`). Accuracies lie in [0, 1] and runs
are few, so Student's intervals are approximations.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from train.studies import intervals
from train.studies.recall import config, table

# Largest excess over chance of an accuracy that counts as guessing.
MARGIN = 0.01

Verdict = Literal["above", "below", "not told apart"]


@dataclasses.dataclass(frozen=True)
class Point:
    """The reported runs of one mixer of one width.

    Attributes:
      mixer: name of the mixer of every layer.
      width: E.
      parameters: number of parameters of the model.
      state: numbers that its layers carry from token to token at the end of a row.
      rate: learning rate after the warm-up.
      steps: training steps of each run, by seed.
      accuracies: accuracy of each run on the test split, by seed.
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
        """The interval of the mean accuracy, cut to [0, 1]."""
        ends = intervals.of_mean(np.array(self.accuracies))
        return intervals.Interval(*np.clip(ends, 0, 1).tolist())

    def report(self) -> dict[str, Any]:
        """Returns the entry of report.json."""
        return dataclasses.asdict(self) | {"interval": self.interval._asdict()}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two points, and the interval of the mean difference of their accuracies."""

    one: Point
    other: Point
    interval: intervals.Interval

    @property
    def verdict(self) -> Verdict:
        """Where `one` is, if the interval of the difference excludes 0."""
        if self.interval.low > 0:
            return "above"
        return "below" if self.interval.high < 0 else "not told apart"

    def report(self) -> dict[str, Any]:
        """Returns the entry of report.json."""
        return {
            "one": [self.one.mixer, self.one.width],
            "other": [self.other.mixer, self.other.width],
            "verdict": self.verdict,
            "difference": self.interval._asdict(),
        }


@dataclasses.dataclass(frozen=True)
class Reach:
    """Accuracy of a model with windows: within the windows, and beyond its reach."""

    width: int
    within: intervals.Interval
    beyond: intervals.Interval
    difference: intervals.Interval

    def report(self) -> dict[str, Any]:
        """Returns the entry of report.json."""
        return {
            "width": self.width,
            "within": self.within._asdict(),
            "beyond": self.beyond._asdict(),
            "difference": self.difference._asdict(),
        }


@dataclasses.dataclass(frozen=True)
class Check:
    """An assertion of the study, and whether it holds."""

    words: str
    passed: bool


def points(rows: Sequence[table.Row]) -> list[Point]:
    """Groups the reported runs by mixer and width, in the order of the rows."""
    groups: dict[tuple[str, int], list[table.Row]] = {}
    for row in rows:
        if row.split == "test":
            groups.setdefault((row.mixer, row.width), []).append(row)
    reported = []
    for (mixer, width), group in groups.items():
        runs = sorted(group, key=lambda row: row.seed)
        reported.append(
            Point(
                mixer,
                width,
                runs[0].parameters,
                runs[0].state,
                runs[0].rate,
                tuple(row.steps for row in runs),
                tuple(row.accuracy for row in runs),
            )
        )
    return reported


def ranked(points: Sequence[Point], width: int) -> list[Point]:
    """Sorts the points of a width, the highest mean first."""
    of_width = [point for point in points if point.width == width]
    return sorted(of_width, key=lambda point: -point.interval.mean)


def compare(points: Sequence[Point], *, goal: float) -> list[Comparison]:
    """Compares the first mixer with each other one, and each one's successive widths.

    These are not all pairs: the more intervals hold together, the wider each one is.

    Args:
      points: the reported runs.
      goal: accuracy at which a run stops, and from which on differences do not count.
    """
    pairs: list[tuple[Point, Point]] = []
    for width in dict.fromkeys(point.width for point in points):
        first, *rest = (point for point in points if point.width == width)
        pairs += [(first, other) for other in rest]
    for mixer in dict.fromkeys(point.mixer for point in points):
        widths = (point for point in points if point.mixer == mixer)
        pairs += itertools.pairwise(sorted(widths, key=lambda x: -x.width))
    level = intervals.joint_level(max(len(pairs), 1))
    return [
        Comparison(one, other, _difference(one, other, level, goal))
        for one, other in pairs
    ]


def reaches(
    settings: config.StudyConfig, rows: Sequence[table.DistanceRow]
) -> list[Reach]:
    """Measures how models with windows recall, within the windows and beyond reach.

    Distances in between, which only the convolutions add, are left out: a model may use
    them or not.

    Args:
      settings: configuration of the study.
      rows: answers by run and distance.

    Returns:
      One entry for each width with questions both within and beyond.
    """
    measured = []
    widths = sorted({row.width for row in rows if row.mixer == "window"})
    # Two assertions for each width.
    level = intervals.joint_level(max(2 * len(widths), 1))
    for width in widths:
        answers = [row for row in rows if (row.mixer, row.width) == ("window", width)]
        parts = [
            [row for row in answers if row.distance <= settings.model.window_reach],
            [row for row in answers if row.distance > settings.model.reach],
        ]
        if not all(parts):
            continue
        within, beyond = map(_shares, parts)
        measured.append(
            Reach(
                width,
                intervals.of_mean(within, level=level),
                intervals.of_mean(beyond, level=level),
                intervals.of_difference(within, beyond, level=level),
            )
        )
    return measured


def checks(
    settings: config.StudyConfig,
    points: Sequence[Point],
    windows: Sequence[Reach],
) -> list[Check]:
    """Judges the assertions of the study, of which only the task recall has any.

    That a model learns is asserted of the largest width alone: a smaller one may need
    more steps.

    Args:
      settings: configuration of the study.
      points: the reported runs.
      windows: recall of the models with windows.
    """
    if settings.task != "recall":
        return []
    goal, chance = settings.runs.goal, 1 / settings.recall.num_values
    assertions = [
        Check(
            f"softmax of width {point.width} reaches {goal}: {point.interval}",
            point.interval.mean >= goal,
        )
        for point in points
        if point.mixer == "softmax" and point.width == settings.sizes[-1]
    ]
    for reach in windows:
        assertions.append(
            Check(
                f"windows of width {reach.width} guess beyond their reach: "
                f"{reach.beyond}, chance is {chance:.3g}, at most {MARGIN} more",
                reach.beyond.high <= chance + MARGIN,
            )
        )
        if reach.width == settings.sizes[-1]:
            words = f"windows of width {reach.width} recall more within"
            assertions.append(
                Check(
                    f"{words}: {reach.within}, the difference is {reach.difference}",
                    reach.difference.low > 0,
                )
            )
    return assertions


def _difference(
    one: Point, other: Point, level: float, goal: float
) -> intervals.Interval:
    # A run stops at the goal, so how far it lies beyond it is chance.
    accuracies = (np.minimum(point.accuracies, goal) for point in (one, other))
    return intervals.of_difference(*accuracies, level=level)


def _shares(rows: Sequence[table.DistanceRow]) -> np.ndarray:
    """Computes the share of right answers of each run, over all its questions."""
    right: dict[int, int] = {}
    asked: dict[int, int] = {}
    for row in rows:
        right[row.seed] = right.get(row.seed, 0) + row.right
        asked[row.seed] = asked.get(row.seed, 0) + row.count
    return np.array([right[seed] / asked[seed] for seed in sorted(right)])
