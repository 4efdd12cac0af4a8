"""Pictures of the study: accuracy against state, and recall against distance."""

import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import axes, figure, text, transforms

from models import mixers
from train.report import figures
from train.studies import intervals
from train.studies.recall import claims, config, table

# What mixers carry -> the name of their family, and its colour.
_FAMILIES: Mapping[mixers.Carries, tuple[str, str]] = types.MappingProxyType(
    {
        "keys and values": ("softmax attention", figures.BLUE),
        "matrices": ("linear attention", figures.ORANGE),
        "vectors": ("recurrence of vectors", figures.VERMILLION),
    }
)
# Offsets of a label from its point (right, up), in the order in which they are tried.
_OFFSETS = [
    (x, y)
    for y in (0, 9, -9, 18, -18, 27, -27, 36, -36, 45, -45, 54, 63, 72, 81)
    for x in (7, -7)
]


def accuracy(
    folder: pathlib.Path,
    settings: config.StudyConfig,
    points: Sequence[claims.Point],
) -> pathlib.Path:
    """Draws the accuracy of each mixer and width against the numbers it carries.

    Args:
      folder: folder for accuracy.png and .npz, which is made if missing.
      settings: configuration of the study.
      points: the reported runs.

    Returns:
      Path of the picture.
    """
    picture = figure.Figure(figsize=(8.4, 5.4), layout="constrained")
    plot = picture.add_subplot()
    plot.set_xscale("log")
    carrying = [point for point in points if point.state]
    states = [point.state for point in carrying] or [1]
    # This leaves space for the last label, and gives a single point a range.
    plot.set_xlim(min(states) / 1.5, max(states) * 2)
    for mixer in dict.fromkeys(point.mixer for point in carrying):
        of_mixer = [point for point in carrying if point.mixer == mixer]
        color = _color(mixer)
        line = np.array([(point.state, point.interval.mean) for point in of_mixer])
        plot.plot(*line.T, color=color, linewidth=0.8, alpha=0.5)
        for point in of_mixer:
            last = point.width == settings.sizes[-1]
            plot.errorbar(
                [point.state],
                [point.interval.mean],
                _bars([point.interval]),
                color=color,
                marker="o",
                markersize=6,
                markerfacecolor=color if last else "white",
                linewidth=1.2,
                capsize=2,
            )
    for point in points:
        if not point.state and point.width == settings.sizes[-1]:
            plot.axhline(point.interval.mean, color=figures.GREY, linestyle=(0, (4, 3)))
            plot.annotate(
                f"{point.mixer} (no state)",
                (1, point.interval.mean),
                (-2, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=figures.GREY,
                fontsize=8,
                ha="right",
            )
    plot.set_ylim(-0.03, 1.06)
    plot.set_xlabel("numbers carried from token to token, all layers")
    plot.set_ylabel("accuracy on the test split")
    plot.set_title(
        f"{settings.task} within {settings.runs.steps} steps: mean of "
        f"{settings.runs.count} seeds, {100 * intervals.LEVEL:g} % intervals; widths "
        f"{settings.widths}, the largest filled",
        fontsize=10,
    )
    plot.spines[["top", "right"]].set_visible(False)
    _legend(plot)
    _label(picture, plot, carrying)
    arrays: dict[str, Any] = {
        name: np.array([getattr(point, name) for point in points])
        for name in ("mixer", "width", "state", "parameters", "accuracies")
    }
    ends = np.array([point.interval for point in points])
    arrays |= {"mean": ends[:, 0], "low": ends[:, 1], "high": ends[:, 2]}
    return figures.write(folder, "accuracy", picture, arrays)


def distance(
    folder: pathlib.Path,
    settings: config.StudyConfig,
    rows: Sequence[table.DistanceRow],
) -> pathlib.Path:
    """Draws the recall of windows and, for comparison, softmax against distance.

    Args:
      folder: folder for distance.png and .npz, which is made if missing.
      settings: configuration of the study.
      rows: answers by run and distance.

    Returns:
      Path of the picture.
    """
    picture = figure.Figure(figsize=(7.2, 4.2), layout="constrained")
    plot = picture.add_subplot()
    model, chance = settings.model, 1 / settings.recall.num_values
    plot.axvline(model.reach, color=figures.GREY, linewidth=0.8)
    plot.annotate(
        f"{model.num_layers} × (window {model.window} + convolution "
        f"{model.convolution or 1} − 2) = {model.reach}",
        (model.reach, 1.08),
        (4, 0),
        textcoords="offset points",
        color=figures.GREY,
        fontsize=8,
        va="center",
    )
    plot.axhline(chance, color=figures.GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    ends: list[tuple[float, str, str]] = [(chance, "chance", figures.GREY)]
    arrays = {}
    styles = {
        ("softmax", settings.sizes[-1]): (figures.GREY, "-"),
        ("window", settings.sizes[0]): (figures.ORANGE, "-"),
        ("window", settings.sizes[-1]): (figures.BLUE, "-"),
    }
    for (mixer, width), (color, style) in styles.items():
        answers = [row for row in rows if (row.mixer, row.width) == (mixer, width)]
        if not answers:
            continue
        x, accuracies = _by_distance(answers)
        means = np.array([interval.mean for interval in accuracies])
        plot.errorbar(
            x,
            means,
            _bars(accuracies),
            color=color,
            linestyle=style,
            marker="o",
            markersize=3,
            linewidth=1.2,
        )
        ends.append((means[-1], f"{mixer}, width {width}", color))
        arrays[f"{mixer} {width}"] = np.column_stack([x, accuracies])
    plot.set_ylim(-0.03, 1.12)
    plot.set_xlabel("distance from the pair's value to the question (tokens)")
    plot.set_ylabel("accuracy on the test split")
    plot.spines[["top", "right"]].set_visible(False)
    plot.margins(x=0.02)
    figures.label_ends(plot, ends)
    return figures.write(folder, "distance", picture, arrays)


def _by_distance(
    rows: Sequence[table.DistanceRow],
) -> tuple[np.ndarray, list[intervals.Interval]]:
    """Returns the distances at which every run was asked, and the mean accuracies."""
    seeds = {row.seed for row in rows}
    shares: dict[int, list[float]] = {}
    for row in rows:
        shares.setdefault(row.distance, []).append(row.right / row.count)
    asked = sorted(x for x, of_runs in shares.items() if len(of_runs) == len(seeds))
    return np.array(asked), [intervals.of_mean(np.array(shares[x])) for x in asked]


def _color(mixer: str) -> str:
    _, color = _FAMILIES[mixers.MIXERS[mixer].carries]
    return color


def _bars(accuracies: Sequence[intervals.Interval]) -> np.ndarray:
    """Returns the lengths of error bars below and above, cut to [0, 1]."""
    means, low, high = np.array(accuracies).T
    return np.stack([means - np.clip(low, 0, 1), np.clip(high, 0, 1) - means])


def _legend(plot: axes.Axes) -> None:
    for name, color in _FAMILIES.values():
        plot.plot([], [], "o", color=color, label=name)
    plot.legend(loc="upper left", frameon=False, fontsize=8)


def _label(
    picture: figure.Figure, plot: axes.Axes, points: Sequence[claims.Point]
) -> None:
    """Writes each mixer beside its largest width, over no other label or point."""
    picture.draw_without_rendering()
    # The layout must not change any more: it would move the points under the labels.
    picture.set_layout_engine("none")
    taken = [
        transforms.Bbox.from_bounds(x - 8, y - 8, 16, 16)
        for x, y in plot.transData.transform(
            [(point.state, point.interval.mean) for point in points]
        )
    ]
    last = {point.mixer: point for point in sorted(points, key=lambda x: x.width)}
    for point in sorted(last.values(), key=lambda x: -x.interval.mean):
        # The last offset is kept if all of them collide.
        for offset in _OFFSETS:
            label = _annotate(plot, point, offset)
            box = label.get_window_extent().padded(1)
            label.remove()
            if not any(map(box.overlaps, taken)):
                break
        taken.append(box)
        leader = {"arrowstyle": "-", "linewidth": 0.5, "color": figures.GREY}
        _annotate(plot, point, offset, leader if offset[1] else None)


def _annotate(
    plot: axes.Axes,
    point: claims.Point,
    offset: tuple[int, int],
    leader: dict[str, Any] | None = None,
) -> text.Annotation:
    return plot.annotate(
        point.mixer,
        (point.state, point.interval.mean),
        offset,
        textcoords="offset points",
        color=_color(point.mixer),
        fontsize=8,
        ha="left" if offset[0] > 0 else "right",
        va="center",
        arrowprops=leader,
    )
