"""The pictures of the study: gradients over distance, time of a step over length."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import axes, figure

from train.report import figures
from train.studies.reach import runs, settings

COLORS = dict(zip(settings.MODELS, (figures.BLUE, figures.VERMILLION), strict=True))
STYLES = dict(zip(settings.STAGES, ((0, (4, 2)), "-"), strict=True))
SHADES = {
    ("attention", "before"): "#56B4E9",
    ("attention", "after"): figures.BLUE,
    ("GRU", "before"): figures.ORANGE,
    ("GRU", "after"): figures.VERMILLION,
}
# Kind of fit and title of each panel.
PANELS = (
    ("exponential", "log g against k: the exponential is a line"),
    ("power", "log g against log k: the power law is a line"),
)


def gradients(
    folder: pathlib.Path,
    measured: Mapping[str, runs.Measurements],
    report: Mapping[str, Any],
) -> pathlib.Path:
    """Draws the norms of every model and stage, with the fitted lines, in two panels.

    Args:
      folder: folder for gradients.png and .npz, which is made if missing.
      measured: the norms, by model.
      report: the fits, from `summary.findings`.

    Returns:
      Path of the picture.
    """
    picture = figure.Figure(figsize=(11, 4.8), layout="constrained")
    panels = picture.subplots(1, len(PANELS), sharey=True)
    first, last = report["distances"]
    distances = np.arange(last + 1)
    arrays: dict[str, np.ndarray] = {"k": distances}
    for plot, (kind, title) in zip(panels, PANELS, strict=True):
        for name, model in measured.items():
            for stage, norms in model.norms.items():
                arrays[f"log norms, {name}, {stage}"] = norms
                fit = report["models"][name][stage][kind]
                color, style = SHADES[name, stage], STYLES[stage]
                with np.errstate(under="ignore"):
                    g = np.exp(norms.astype(np.float64))
                    mean = np.exp(np.mean(norms, axis=0, dtype=np.float64))
                label = f"{name}, {stage} training"
                plot.plot(distances, mean, color=color, linestyle=style, label=label)
                plot.fill_between(
                    distances, g.min(0), g.max(0), color=color, alpha=0.15, linewidth=0
                )
                k = distances[first:]
                x = k if kind == "exponential" else np.log(k)
                line = np.exp(fit["intercept"] + fit["slope"]["mean"] * x)
                plot.plot(k, line, color=figures.GREY, linewidth=0.8)
                arrays[f"{kind}, {name}, {stage}"] = line
        plot.set(title=title, xlabel="k, tokens back", yscale="log")
        plot.title.set_fontsize(10)
        plot.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("g(k), norm of ∂ output T-1 / ∂ input T-1-k")
    panels[1].set_xscale("log", base=2)
    panels[1].set_xlim(1, last)
    panels[1].xaxis.set_major_formatter("{x:g}")
    # The panel shows all norms, but cuts the fitted lines.
    drawn = np.stack([x for model in measured.values() for x in model.norms.values()])
    ends = np.exp([drawn[np.isfinite(drawn)].min() - 2, drawn.max() + 2])
    panels[0].set_ylim(*ends)
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(
        handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    picture.suptitle(
        "geometric mean over runs, band from the least run to the greatest; grey: the "
        "fitted lines",
        fontsize=10,
    )
    return figures.write(folder, "gradients", picture, arrays)


def step_time(folder: pathlib.Path, times: Mapping[str, Any]) -> pathlib.Path:
    """Draws the time of a step of one layer against T.

    Args:
      folder: folder for step_time.png and .npz, which is made if missing.
      times: `step_time` of the report.

    Returns:
      Path of the picture.
    """
    picture = figure.Figure(figsize=(6.4, 4.2), layout="constrained")
    plot = picture.add_subplot()
    arrays: dict[str, Any] = {"T": np.array(times["lengths"])}
    ends = []
    for name, milliseconds in times["milliseconds"].items():
        quartiles = np.array(milliseconds)
        low, median, high = quartiles.T
        arrays[f"{name}, quartiles"] = quartiles
        plot.errorbar(
            times["lengths"],
            median,
            [median - low, high - median],
            color=COLORS[name],
            marker="o",
            markersize=4,
        )
        exponent = times["exponents"][name]
        growth = "" if exponent is None else f", ~ T^{exponent:.2f}"
        ends.append((median[-1], f"{name}{growth}", COLORS[name]))
    _finish(plot)
    plot.set_title(
        f"forward and backward of one layer of width {times['width']}, batch 1",
        fontsize=10,
    )
    figures.label_ends(plot, ends)
    return figures.write(folder, "step_time", picture, arrays)


def _finish(plot: axes.Axes) -> None:
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.xaxis.set_major_formatter("{x:g}")
    plot.set(xlabel="length T", ylabel="time of a step (ms)")
    plot.spines[["top", "right"]].set_visible(False)
    plot.margins(x=0.02)
