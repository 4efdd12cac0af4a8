"""The log-log picture of time and memory against T, and of time against N."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import axes, figure

from train.bench import presets
from train.report import figures

_COLORS = (figures.VERMILLION, figures.BLUE, "#009E73", figures.ORANGE, "#CC79A7")
_STYLES = {"jit": "-", "eager": ":"}
# Sweep and quantity of each panel.
_PANELS = (("length", "time"), ("length", "memory"), ("heads", "time"))
_ACROSS = {"length": "length T", "heads": "heads N at fixed N · H"}
_UP = {"time": "time (ms)", "memory": "temporary memory (MB)"}


def draw(
    folder: pathlib.Path, rows: Sequence[Mapping[str, Any]], *, dtype: str
) -> pathlib.Path:
    """Draws the measurements in one dtype: forward above, forward+backward below.

    Args:
      folder: folder for attention_DTYPE.png and .npz, which is made if missing.
      rows: rows of `implementations.sweep` whose verdict is 'measured'.
      dtype: dtype of the rows that are drawn.

    Returns:
      Path of the picture.
    """
    rows = [row for row in rows if row["dtype"] == dtype]
    directions = presets.DIRECTIONS
    picture = figure.Figure(figsize=(12, 7.2), layout="constrained")
    panels = picture.subplots(len(directions), len(_PANELS), squeeze=False)
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    arrays: dict[str, np.ndarray] = {}
    for direction, line in zip(directions, panels, strict=True):
        for (sweep, quantity), plot in zip(_PANELS, line, strict=True):
            chosen = [
                row
                for row in rows
                if (row["direction"], row["sweep"]) == (direction, sweep)
            ]
            drawn = _panel(plot, chosen, quantity, colors)
            plot.set(title=direction, xlabel=_ACROSS[sweep], ylabel=_UP[quantity])
            for name, points in drawn.items():
                arrays[f"{name}, {direction}, {quantity} by {sweep}"] = points
    handles = {
        label: handle
        for plot in panels.flat
        for handle, label in zip(*plot.get_legend_handles_labels(), strict=True)
    }
    picture.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    picture.suptitle(f"attention, {dtype}: medians, bars from quartile to quartile")
    return figures.write(folder, f"attention_{dtype}", picture, arrays)


def _panel(
    plot: axes.Axes,
    rows: Sequence[Mapping[str, Any]],
    quantity: str,
    colors: Mapping[str, str],
) -> dict[str, np.ndarray]:
    """Draws a line for each implementation and mode, and returns its points."""
    drawn = {}
    for name, color in colors.items():
        for mode, style in _STYLES.items():
            points = [
                _point(row, quantity)
                for row in rows
                if (row["implementation"], row["mode"]) == (name, mode)
                and (quantity == "time" or row["temporary_bytes"])
            ]
            if not points:
                continue
            x, low, y, high = drawn[f"{name} {mode}"] = np.array(points).T
            plot.errorbar(
                x,
                y,
                [y - low, high - y],
                label=f"{name} {mode}",
                color=color,
                linestyle=style,
                marker="o",
                markersize=3,
                linewidth=1.2,
            )
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.xaxis.set_major_formatter("{x:g}")
    plot.spines[["top", "right"]].set_visible(False)
    return drawn


def _point(row: Mapping[str, Any], quantity: str) -> list[float]:
    """Returns T or N, then first quartile, median and third quartile."""
    size = row["length"] if row["sweep"] == "length" else row["num_heads"]
    if quantity == "time":
        return [size, *row["milliseconds"]]
    return [size, *3 * [row["temporary_bytes"] / 1e6]]
