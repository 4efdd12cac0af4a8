"""What the study of gradients over distance found: numbers, assertions, words."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from train.report import markdown, stopwatch
from train.studies import intervals
from train.studies.reach import gradient_norms, runs, settings

# What a line may leave, in nats, root mean square, and still describe the norms.
FITS = 1.0
# Of each of six intervals, so that all hold together (Bonferroni): two differences of
# slopes and four of what lines leave.
LEVEL = 1 - (1 - intervals.LEVEL) / 6
# Distances of the table; the greatest of the study is added.
DISTANCES = (1, 16, 64)


def findings(
    found: Mapping[str, runs.Found],
    times: Mapping[str, Sequence[Sequence[float]]],
    config: settings.Config,
    *,
    unigram: float,
) -> dict[str, Any]:
    """Everything that report.json says about gradients and times.

    Args:
      found: by model.
      times: of `runs.step_times`.
      config: of the study.
      unigram: loss of that baseline, nats per token.

    Returns:
      Numbers for JSON, the assertions as `checks`, and whether all hold as `passed`.
    """
    lines = {
        (name, stage): [
            gradient_norms.fitted(norms, nearest=config.nearest)
            for norms in found[name].norms[stage]
        ]
        for name in found
        for stage in settings.STAGES
    }
    slopes = {key: [x.exponential.slope for x in own] for key, own in lines.items()}
    attention, gru = settings.MODELS
    differences = {
        stage: intervals.of_difference(
            np.array(slopes[gru, stage]),
            np.array(slopes[attention, stage]),
            level=LEVEL,
        )
        for stage in settings.STAGES
    }
    losses = np.stack([x.losses for x in found.values()])
    checks = {
        f"every loss is finite and below {unigram:.2f}, the unigram baseline": (
            bool(np.all(losses < unigram))
        )
    } | {
        f"{stage} training the GRU's slope lies below attention's": bool(x.high < 0)
        for stage, x in differences.items()
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "unigram": unigram,
        "distances": [config.nearest, config.model.context - 1],
        "log_floor": gradient_norms.FLOOR,
        "models": {
            name: {
                "parameters": own.parameters,
                "validation_losses": own.losses.tolist(),
                **{
                    stage: _gradients(own.norms[stage], lines[name, stage])
                    for stage in settings.STAGES
                },
            }
            for name, own in found.items()
        },
        "difference_of_slopes": {k: x._asdict() for k, x in differences.items()},
        "step_time": _times(times, config.timing),
    }


def _gradients(
    norms: Float[np.ndarray, "R T"], lines: Sequence[gradient_norms.Lines]
) -> dict[str, Any]:
    """Of one model at one stage: both lines, and norms at some distances."""
    last = norms.shape[1] - 1
    fits: dict[str, dict[str, Any]] = {}
    for kind in gradient_norms.Lines._fields:
        own = [getattr(x, kind) for x in lines]
        fits[kind] = {
            "slopes": [x.slope for x in own],
            "slope": intervals.of_mean(np.array([x.slope for x in own]))._asdict(),
            "intercept": float(np.mean([x.intercept for x in own])),
            "residuals": [x.residual for x in own],
        }
    return {
        **fits,
        "half_life": half_life(fits["exponential"]),
        "norms": {
            str(k): math.exp(np.mean(norms[:, k], dtype=np.float64))
            for k in (*(k for k in DISTANCES if k < last), last)
        },
    }


def half_life(fit: Mapping[str, Any]) -> dict[str, float] | None:
    """Tokens after which a gradient is halved: mean, and ends of its interval.

    Args:
      fit: of the exponential: `slope`, an interval, and `residuals`.

    Returns:
      An interval; None where the slope does not show that the gradient falls, or the
      line does not describe it.
    """
    slope = fit["slope"]
    if slope["high"] >= 0 or np.mean(fit["residuals"]) > FITS:
        return None
    # A steeper fall is a shorter life: the ends keep their names.
    return {name: -math.log(2) / slope[name] for name in slope}


def _times(
    times: Mapping[str, Sequence[Sequence[float]]], timing: settings.TimingConfig
) -> dict[str, Any]:
    medians = {name: [x[1] for x in own] for name, own in times.items()}
    return {
        "width": timing.width,
        "lengths": timing.lengths,
        "milliseconds": {name: list(map(list, own)) for name, own in times.items()},
        "exponents": {
            name: stopwatch.growth(timing.lengths, own) for name, own in medians.items()
        },
    }


def words(report: Mapping[str, Any]) -> str:
    """The report as a page of Markdown."""
    first, last = report["distances"]
    times = report["step_time"]
    checks = [
        f"{'Holds' if holds else 'Does NOT hold'}: {check}."
        for check, holds in report["checks"].items()
    ]
    parts = [
        "# How far back a gradient reaches",
        "g(k) is the norm of the derivative of a layer's last output by its input k "
        "tokens earlier: the geometric mean over rows of text and runs. Slopes are of "
        f"log g over k = {first} … {last}, against k (nats per token) and against "
        "log k (the exponent of a power law), with 95 % intervals over the runs; "
        "a line describes the norms if it leaves at most "
        f"{FITS:g} nat; "
        "*left* is the root mean square that a line leaves, in nats. Norms below "
        f"1e{report['log_floor'] / math.log(10):.0f} count as 0.",
        markdown.table(*_gradient_table(report["models"])),
        markdown.bullets([*_sentences(report), *checks]),
        "# Time of a step",
        f"Forward and backward of one layer of width {times['width']}, batch 1: "
        "milliseconds, medians in turns.",
        markdown.table(*_time_table(times)),
        markdown.bullets(_time_sentences(times)),
    ]
    return "\n\n".join(parts) + "\n"


def _sentences(report: Mapping[str, Any]) -> list[str]:
    """What the gradients say."""
    found = [
        f"{name}, {model['parameters']:,} parameters: "
        f"{_losses(model['validation_losses'])} after training."
        for name, model in report["models"].items()
    ]
    attention, gru = (
        report["models"][name]["validation_losses"] for name in settings.MODELS
    )
    if np.isfinite([attention, gru]).all():
        found.append(
            "The GRU's loss minus attention's is "
            f"{intervals.of_difference(np.array(gru), np.array(attention))} nats."
        )
    for stage, difference in report["difference_of_slopes"].items():
        when = f"{stage.capitalize()} training"
        found.append(
            f"{when} the GRU's slope minus attention's is "
            f"{intervals.Interval(**difference)} nats per token, run by run."
        )
        for name, model in report["models"].items():
            found.append(f"{when}, {name}: {nearer(model[stage])}.")
    return found


def _losses(losses: Sequence[float]) -> str:
    if not np.isfinite(losses).all():
        return "a loss that is not finite"
    return f"{intervals.of_mean(np.array(losses))} nats per token"


def nearer(gradients: Mapping[str, Any]) -> str:
    """Which line leaves less, as far as the runs tell."""
    left = [np.array(gradients[k]["residuals"]) for k in ("exponential", "power")]
    difference = intervals.of_difference(*left, level=LEVEL)
    words = "the two lines are not told apart"
    if min(x.mean() for x in left) > FITS:
        words = "neither line describes it"
    elif difference.high < 0:
        words = "an exponential fits better than a power law"
    elif difference.low > 0:
        words = "a power law fits better than an exponential"
    return f"{words} (they leave {left[0].mean():.2f} and {left[1].mean():.2f})"


def _gradient_table(
    models: Mapping[str, Any],
) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, model in models.items():
        for stage in settings.STAGES:
            own = model[stage]
            life = own["half_life"]
            cells = [f"{name}, {stage}"]
            for kind in ("exponential", "power"):
                slope = intervals.Interval(**own[kind]["slope"])
                cells += [str(slope), f"{np.mean(own[kind]['residuals']):.2f}"]
            lived = "none shown" if life is None else str(intervals.Interval(**life))
            cells.insert(2, lived)
            rows.append(cells + [f"{x:.2g}" for x in own["norms"].values()])
    distances = next(iter(models.values()))["before"]["norms"]
    headings = ["", "slope by k", "half-life, tokens", "left", "slope by log k", "left"]
    return headings + [f"g({k})" for k in distances], rows


def _time_table(times: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, own in times["milliseconds"].items():
        exponent = times["exponents"][name]
        grown = "" if exponent is None else f"{exponent:.2f}"
        rows.append([name, *(f"{x[1]:.3g}" for x in own), grown])
    headings = ["", *(f"T = {n}" for n in times["lengths"]), "time ~ T^"]
    return headings, rows


def _time_sentences(times: Mapping[str, Any]) -> list[str]:
    attention, gru = (times["milliseconds"][name] for name in settings.MODELS)
    ratios = [y[1] / x[1] for x, y in zip(attention, gru, strict=True)]
    faster = [str(n) for n, x in zip(times["lengths"], ratios, strict=True) if x > 1]
    listed = ", ".join(
        f"{x:.2g} at T = {n}" for n, x in zip(times["lengths"], ratios, strict=True)
    )
    where = f"at T = {', '.join(faster)}" if faster else "at none of these lengths"
    return [
        f"A step of the GRU takes, as a multiple of attention's: {listed}.",
        f"Attention is the faster one {where}.",
        "The GRU makes T steps, each of which waits for the one before. Attention's "
        "work grows with T², but its products wait for nothing: what they take depends "
        "on how much a machine does at once.",
    ]
