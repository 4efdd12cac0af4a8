"""The picture of which output depends on which input, with the arrays behind it."""

import pathlib
import textwrap
from typing import Any

import numpy as np
from jaxtyping import Bool
from matplotlib import collections, colors, figure, lines, patches

from train.report import figures


def draw(
    folder: pathlib.Path,
    dependency: Bool[np.ndarray, "T T"],
    declared: Bool[np.ndarray, "T T"] | None,
    *,
    verdict: str,
) -> pathlib.Path:
    """Draws which output depends on which input, and the outline of the mask.

    Args:
      folder: folder for the files, which is made if missing.
      dependency: True where output i (row) depends on input j (column).
      declared: True where the mask allows that; None for the causal mask, j <= i.
      verdict: one line, the title.

    Returns:
      Path of the picture.

    Raises:
      ValueError: the two are not square matrices of one shape.
    """
    dependency = np.asarray(dependency)
    length = len(dependency)
    allowed = np.tri(length, dtype=bool) if declared is None else np.asarray(declared)
    if not dependency.shape == allowed.shape == (length, length):
        raise ValueError(
            "expected two square matrices of one shape, "
            f"got {list(dependency.shape)} and {list(allowed.shape)}"
        )
    missing = ~dependency & allowed & (declared is not None)
    kinds = {
        "no dependence": ~dependency & ~missing,
        "dependence, allowed": dependency & allowed,
        "leak: not allowed": dependency & ~allowed,
        "declared, no dependence": missing,
    }
    palette = ["white", "#8FBFE0", figures.VERMILLION, figures.ORANGE]
    picture = figure.Figure(figsize=(5.6, 5.2), layout="constrained")
    plot = picture.add_subplot()
    plot.imshow(
        np.argmax(list(kinds.values()), axis=0),
        cmap=colors.ListedColormap(palette),
        vmin=-0.5,
        vmax=3.5,
        interpolation="nearest",
    )
    plot.add_collection(
        collections.LineCollection(outline(allowed), color="black", linewidth=1.2)
    )
    plot.set_title(textwrap.fill(verdict, 60), fontsize=10)
    plot.set_xlabel("input position j")
    plot.set_ylabel("output position i")
    handles: list[Any] = [
        patches.Patch(
            facecolor=color, edgecolor=figures.GREY, linewidth=0.5, label=label
        )
        for color, (label, cells) in zip(palette, kinds.items(), strict=True)
        if cells.any()
    ]
    handles.append(
        lines.Line2D(
            [],
            [],
            color="black",
            label="causal" if declared is None else "declared mask",
        )
    )
    picture.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    return figures.write(
        folder, "dependency", picture, {"dependency": dependency, "declared": allowed}
    )


def outline(cells: Bool[np.ndarray, "T T"]) -> list[np.ndarray]:
    """Returns the edges between True and False cells, as segments of (x, y) ends."""
    padded = np.pad(cells, 1)
    segments = []
    for i, j in np.argwhere(padded[1:] != padded[:-1]):
        segments.append(np.array([(j - 1.5, i - 0.5), (j - 0.5, i - 0.5)]))
    for i, j in np.argwhere(padded[:, 1:] != padded[:, :-1]):
        segments.append(np.array([(j - 0.5, i - 1.5), (j - 0.5, i - 0.5)]))
    return segments
