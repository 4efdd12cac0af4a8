"""The summary of a study, which claims what the intervals support and nothing else."""

import math
from collections.abc import Iterable, Sequence

from train.report import markdown
from train.studies import intervals
from train.studies.recall import claims, config

_PERCENT = f"{100 * intervals.LEVEL:g} %"


def summary(
    settings: config.StudyConfig,
    points: Sequence[claims.Point],
    comparisons: Sequence[claims.Comparison],
    reaches: Sequence[claims.Reach],
    checks: Sequence[claims.Check],
) -> str:
    """Writes the text of summary.md.

    Args:
      settings: configuration of the study.
      points: the reported runs.
      comparisons: differences between mixers and between widths.
      reaches: recall of models with windows, by width.
      checks: assertions of the study.
    """
    parts = [_heading(settings)]
    for width in settings.sizes:
        if ranked := claims.ranked(points, width):
            sentences = [*_order(ranked, comparisons), *_edges(settings, ranked)]
            parts += [f"## Width {width}", _table(ranked), markdown.bullets(sentences)]
    if growth := markdown.bullets(_growth(comparisons)):
        parts += ["## From width to width", growth]
    if reaches:
        parts += ["## Recall against distance", _distance(settings, reaches)]
    if checks:
        words = {True: "holds", False: "FAILS"}
        lines = [f"{words[check.passed]}: {check.words}" for check in checks]
        parts += ["## What was asserted", markdown.bullets(lines)]
    parts.append(
        f"Behind a mean in a table stands its {_PERCENT} interval over seeds (Student; "
        "of few accuracies between 0 and 1, an approximation). 'Above' means that the "
        "interval of the paired difference excludes 0; those of all "
        f"{len(comparisons)} comparisons hold together at {_PERCENT} (Bonferroni), and "
        "so do those of recall against distance."
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def _heading(settings: config.StudyConfig) -> str:
    runs, task = settings.runs, settings.rows_of
    return (
        f"# {settings.task.capitalize()}\n\n"
        f"Rows of {task.length} tokens out of {task.vocab_size}; models of "
        f"{_layers(settings)}, each with "
        f"{_convolution(settings)}. The learning rate is the best of "
        f"{len(runs.swept)} by {runs.seeds} seeds on the validation split; accuracies "
        f"are of {runs.count} other seeds on the test split. A run ends at {runs.goal} "
        f"on the validation split, or after {runs.steps} steps: who has not learned "
        "until then might do so later."
    )


def _table(points: Sequence[claims.Point]) -> str:
    return markdown.table(
        ("mixer", "state", "parameters", "rate", "accuracy", "steps"),
        [
            (
                point.mixer,
                f"{point.state:,}",
                f"{point.parameters:,}",
                f"{point.rate:.3g}",
                point.interval,
                f"{min(point.steps)} to {max(point.steps)}",
            )
            for point in points
        ],
    )


def _order(
    points: Sequence[claims.Point],
    comparisons: Sequence[claims.Comparison],
) -> Iterable[str]:
    """Says how the first mixer compares with each other one of the same width."""
    pairs = [x for x in comparisons if x.one in points and x.other in points]
    pairs.sort(key=lambda x: points.index(x.other))
    if pairs:
        words = _verdicts((x.verdict, x.other.mixer) for x in pairs)
        yield f"{pairs[0].one.mixer}: {words}."


def _edges(
    settings: config.StudyConfig, points: Sequence[claims.Point]
) -> Iterable[str]:
    """Says whose best rate might lie outside of the range that was swept."""
    ends = min(settings.runs.swept), max(settings.runs.swept)
    for factor, words in zip(ends, ("least", "greatest"), strict=True):
        rate = factor * settings.optimizer.peak_lr
        names = [x.mixer for x in points if math.isclose(x.rate, rate, rel_tol=1e-6)]
        if names:
            yield f"at the {words} rate that was swept, {rate:.3g}: {', '.join(names)}."


def _growth(comparisons: Sequence[claims.Comparison]) -> Iterable[str]:
    """Says, for each step from width to width, whose accuracy it changes."""
    steps: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for pair in comparisons:
        widths = pair.other.width, pair.one.width
        if widths[0] != widths[1]:
            steps.setdefault(widths, []).append((pair.verdict, pair.one.mixer))
    for (small, large), verdicts in steps.items():
        yield f"{large} against {small}: {_verdicts(verdicts, after=True)}."


def _verdicts(pairs: Iterable[tuple[str, str]], *, after: bool = False) -> str:
    """Lists mixers by verdict.

    Args:
      pairs: verdict and mixer.
      after: True for 'x, y above', False for 'above x, y; not told apart from z'.
    """
    mixers: dict[str, list[str]] = {"above": [], "below": [], "not told apart": []}
    for verdict, mixer in pairs:
        mixers[verdict].append(mixer)
    parts = []
    for verdict, names in mixers.items():
        if names and after:
            parts.append(f"{', '.join(names)} {verdict}")
        elif names:
            link = " from" if verdict == "not told apart" else ""
            parts.append(f"{verdict}{link} {', '.join(names)}")
    return "; ".join(parts)


def _distance(settings: config.StudyConfig, reaches: Sequence[claims.Reach]) -> str:
    model = settings.model
    lines = [
        f"width {reach.width}: {reach.within} up to {model.window_reach} tokens from "
        f"the pair's value to the question, {reach.beyond} beyond {model.reach}"
        for reach in reaches
    ]
    return (
        f"Through {_layers(settings)}, each with "
        f"{_convolution(settings)} and a window of {model.window}, a token sees "
        f"{model.reach} tokens back, {model.window_reach} of them through the windows. "
        f"Chance is {1 / settings.recall.num_values:.3g}."
        "\n\n" + markdown.bullets(lines)
    )


def _layers(settings: config.StudyConfig) -> str:
    count = settings.model.num_layers
    return f"{count} layer{'s' * (count > 1)}"


def _convolution(settings: config.StudyConfig) -> str:
    width = settings.model.convolution
    return "no convolution" if width is None else f"a convolution of width {width}"
