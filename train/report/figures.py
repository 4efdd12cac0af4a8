"""Pictures of a run, each with the arrays behind it.

Every function writes FOLDER/NAME.png and FOLDER/NAME.npz and returns the picture's
path. Both files appear complete or not at all. Matplotlib is used through its objects
only, so nothing here touches the state of pyplot or needs a display.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from matplotlib import (
    axes,
    colors,
    figure,
    font_manager,
)

# Okabe and Ito's palette, distinct for the colour-blind.
BLUE, ORANGE, VERMILLION, GREY = "#0072B2", "#E69F00", "#D55E00", "#767676"
_NOTHING = "#E4E4E4"
_SIGNS = {"\n": "↵", "\t": "⇥", " ": "␣"}
_MONOSPACE = font_manager.FontProperties(family="DejaVu Sans Mono")


def loss_curve(
    folder: pathlib.Path,
    steps: Int[np.ndarray, "N"],
    losses: Float[np.ndarray, "N"],
    *,
    validation_steps: Shaped[np.ndarray, "P"],
    validation_losses: Float[np.ndarray, "P"],
    baselines: Mapping[str, float],
    yscale: str,
    name: str = "loss",
) -> pathlib.Path:
    """Draws the loss over the steps, with baselines as labelled lines.

    Args:
      folder: folder for the files, which is made if missing.
      steps: steps at which the training loss was logged.
      losses: training loss there, nats per token.
      validation_steps: steps of validation points; may be empty.
      validation_losses: nats per token.
      baselines: name -> nats per token.
      yscale: 'linear' or 'log'.
      name: name of the files.

    Returns:
      Path of the picture.

    Raises:
      ValueError: steps and losses differ in length.
    """
    curves = {
        "training": (np.asarray(steps), np.asarray(losses)),
        "validation": (np.asarray(validation_steps), np.asarray(validation_losses)),
    }
    for label, (x, y) in curves.items():
        if x.ndim != 1 or x.shape != y.shape:
            raise ValueError(
                f"expected as many {label} losses as steps, "
                f"got {list(y.shape)} and {list(x.shape)}"
            )
    picture = figure.Figure(figsize=(7.2, 4.2), layout="constrained")
    plot = picture.add_subplot()
    ends = [(loss, f"{key} {loss:.2f}", GREY) for key, loss in baselines.items()]
    for loss in baselines.values():
        plot.axhline(loss, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    for (label, (x, y)), color in zip(curves.items(), (BLUE, VERMILLION), strict=True):
        if len(x):
            marker = "o" if label == "validation" else None
            plot.plot(x, y, color=color, linewidth=1.4, marker=marker, markersize=4)
            ends.append((y[-1], f"{label} {y[-1]:.2f}", color))
    plot.set_yscale(yscale)
    plot.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    plot.set_xlabel("step")
    plot.set_ylabel("loss (nats per token)")
    plot.spines[["top", "right"]].set_visible(False)
    plot.margins(x=0.01)
    label_ends(plot, ends)
    arrays = {f"{key}_steps": x for key, (x, _) in curves.items()}
    arrays |= {f"{key}_losses": y for key, (_, y) in curves.items()}
    arrays |= {f"baseline_{key}": np.asarray(x) for key, x in baselines.items()}
    return write(folder, name, picture, arrays)


def attention_heads(
    folder: pathlib.Path,
    weights: Float[np.ndarray, "L N T T"],
    tokens: Sequence[str],
    *,
    name: str = "attention",
) -> pathlib.Path:
    """Draws the attention weights of every head of every layer on one sentence.

    Layers go down, heads to the right; in a panel, queries down and keys to the
    right. One colour scale from 0 to 1, of the square root, since most weights are
    small; a weight of exactly 0 is grey, so that the mask shows.

    Args:
      folder: folder for the files, which is made if missing.
      weights: each row a distribution over keys.
      tokens: T tokens as text; white space and control characters are shown by signs.
      name: name of the files.

    Returns:
      Path of the picture.

    Raises:
      ValueError: the weights are not square in queries and keys, or the number of
        tokens is not T.
    """
    weights = np.asarray(weights)
    length = len(tokens)
    if weights.ndim != 4 or weights.shape[2:] != (length, length):
        raise ValueError(
            f"expected weights [L, N, {length}, {length}] for {length} tokens, "
            f"got {list(weights.shape)}"
        )
    layers, heads = weights.shape[:2]
    labels = [printable(token) for token in tokens]
    rotation = 90 if max(map(len, labels), default=0) > 1 else 0
    # Inches: space for a legible label per token, unless there are very many panels.
    side = min(max(1.5, 0.085 * length), 24 / max(layers, heads))
    size = min(7.0, 0.9 * 72 * side / length)
    picture = figure.Figure(
        figsize=(heads * side + 1.2, layers * side + 0.6), layout="constrained"
    )
    panels = picture.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for (layer, head), plot in np.ndenumerate(panels):
        image = plot.imshow(
            np.ma.masked_equal(weights[layer, head], 0),
            cmap="Blues",
            norm=colors.PowerNorm(0.5, vmin=0, vmax=1),
            interpolation="nearest",
        )
        plot.set_facecolor(_NOTHING)
        plot.tick_params(length=0, pad=1)
        plot.spines[:].set(color=GREY, linewidth=0.5)
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_ticks(
                range(length), labels, font=_MONOSPACE, fontsize=size, parse_math=False
            )
        plot.xaxis.set_tick_params(rotation=rotation)
        if layer == 0:
            plot.set_title(f"head {head}", fontsize=10)
        if head == 0:
            plot.set_ylabel(f"layer {layer}", fontsize=10)
    picture.supxlabel("key (grey: weight exactly 0)", fontsize=10)
    picture.supylabel("query", fontsize=10)
    bar = picture.colorbar(image, ax=panels, fraction=0.03, aspect=40, pad=0.01)
    bar.set_label("attention weight", fontsize=10)
    bar.ax.tick_params(labelsize=7)
    arrays = {"weights": weights, "tokens": np.asarray(tokens, dtype=str)}
    return write(folder, name, picture, arrays)


def printable(token: str) -> str:
    """Formats a token as a label, with signs for white space and missing glyphs."""
    font = font_manager.get_font(font_manager.findfont(_MONOSPACE))
    signs = (_SIGNS.get(character, character) for character in token)
    return "".join(
        sign
        if sign.isprintable() and font.get_char_index(ord(sign))
        else f"{ord(sign):02X}"
        for sign in signs
    )


def label_ends(
    plot: axes.Axes, ends: Sequence[tuple[float, str, str]], *, gap: float = 0.06
) -> None:
    """Writes labels (value, text, colour) to the right of the axes without overlap."""
    points = np.array([(plot.get_xlim()[1], value) for value, _, _ in ends])
    heights = (plot.transScale + plot.transLimits).transform(points)[:, 1]
    # A value that is not finite has no height: its label is at the bottom.
    heights = np.where(np.isfinite(heights), heights, 0.0)
    order = np.argsort(heights)
    # The positions nearest to the heights that keep the gap, by isotonic regression:
    # max over a <= i of min over b >= i of the mean of a … b.
    steps = gap * np.arange(len(ends))
    wanted = heights[order] - steps
    count = range(len(ends))
    for i, end in enumerate(order):
        position = steps[i] + max(
            min(wanted[a : b + 1].mean() for b in count[i:]) for a in count[: i + 1]
        )
        _, text, color = ends[end]
        plot.annotate(
            text,
            (1, heights[end]),
            (1.03, position),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=color,
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6},
        )


def write(
    folder: pathlib.Path,
    name: str,
    picture: figure.Figure,
    arrays: Mapping[str, Any],
) -> pathlib.Path:
    """Writes arrays and picture under temporary names, then renames both.

    Args:
      folder: folder for the files, which is made if missing.
      name: name of the files.
      picture: the picture.
      arrays: the arrays behind it, by name.

    Returns:
      Path of the picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.npz", folder / f"{name}.png"]
    temporary = [folder / f".{path.name}.tmp" for path in paths]
    try:
        with temporary[0].open("wb") as file:
            # np.savez names its arrays by keyword.
            np.savez_compressed(file, **arrays)
        with temporary[1].open("wb") as file:
            picture.savefig(file, format="png", dpi=150)
        for source, path in zip(temporary, paths, strict=True):
            source.replace(path)
    finally:
        for source in temporary:
            source.unlink(missing_ok=True)
    return paths[1]
