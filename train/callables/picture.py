"""The picture of an audit: which output moved by edits of which input."""

import pathlib
from collections.abc import Sequence

import numpy as np

from attention.properties import findings, outcomes
from train.report import dependency_figure


def draw(
    folder: pathlib.Path, results: Sequence[outcomes.Outcome], title: str
) -> list[str]:
    """Draws which output moved by edits of which input; or removes an old picture.

    Args:
      folder: folder of pictures.
      results: outcomes of the probes.
      title: title of the picture.

    Returns:
      Its path from the folder above, if there is one.
    """
    mapped = next((outcome for outcome in results if outcome.moved is not None), None)
    if mapped is None or mapped.moved is None:
        for stale in folder.glob("dependency.*"):
            stale.unlink()
        return []
    # Rounding is no dependence: less than a share of the most that the edit moved.
    finite = np.isfinite(mapped.moved)
    most = np.max(mapped.moved, axis=0, where=finite, initial=0)
    dependency = mapped.moved > findings.ROUNDING * most
    if mapped.kind != "leak":
        dependency = np.tril(dependency)
    for finding in (outcome.finding for outcome in results if outcome.kind == "leak"):
        if (
            finding is not None
            and finding.row == finding.target_row
            and finding.inputs.shape[1] == len(dependency)
        ):
            dependency[finding.target, finding.source] = True
    picture = dependency_figure.draw(folder, dependency, None, verdict=title)
    return [str(picture.relative_to(folder.parent))]
