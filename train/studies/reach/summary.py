"""Results of the study of gradients over distance: numbers, assertions, text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from train.report import markdown, stopwatch
from train.studies import intervals
from train.studies.reach import gradient_norms, runs, settings

# Largest root mean square residual, in nats, of a line that describes the norms.
FITS = 1.0
# Six intervals hold together: two differences of slopes and four of residuals.
LEVEL = intervals.joint_level(6)
# Distances in the table, to which the greatest of the study is added.
DISTANCES = (1, 16, 64)


def findings(
    measured: Mapping[str, runs.Measurements],
    times: Mapping[str, Sequence[Sequence[float]]],
    config: settings.Config,
    *,
    unigram: float,
) -> dict[str, Any]:
    """Collects all that report.json says about gradients and times.

    Args:
      measured: losses and gradient norms, by model.
      times: quartiles of `runs.step_times`, by model and length.
      config: configuration of the study.
      unigram: loss of the unigram baseline, in nats per token.

    Returns:
      Numbers for JSON, the assertions as `checks`, and whether all hold as `passed`.
    """
    lines = {
        (name, stage): [
            gradient_norms.fitted(norms, nearest=config.nearest)
            for norms in measured[name].norms[stage]
        ]
        for name in measured
        for stage in settings.STAGES
    }
    slopes = {
        key: np.array([run.exponential.slope for run in of_runs])
        for key, of_runs in lines.items()
    }
    attention, gru = settings.MODELS
    differences = {
        stage: intervals.of_difference(
            slopes[gru, stage], slopes[attention, stage], level=LEVEL
        )
        for stage in settings.STAGES
    }
    losses = np.stack([model.losses for model in measured.values()])
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
                "parameters": model.parameters,
                "validation_losses": model.losses.tolist(),
                **{
                    stage: _gradients(model.norms[stage], lines[name, stage])
                    for stage in settings.STAGES
                },
            }
            for name, model in measured.items()
        },
        "difference_of_slopes": {k: x._asdict() for k, x in differences.items()},
        "step_time": _times(times, config.timing),
    }


def _gradients(
    norms: Float[np.ndarray, "R T"], lines: Sequence[gradient_norms.Lines]
) -> dict[str, Any]:
    """Describes one model at one stage: both lines, and norms at some distances."""
    last = norms.shape[1] - 1
    fits: dict[str, dict[str, Any]] = {}
    for kind in gradient_norms.Lines._fields:
        of_runs = [getattr(run, kind) for run in lines]
        slopes = [line.slope for line in of_runs]
        fits[kind] = {
            "slopes": slopes,
            "slope": intervals.of_mean(np.array(slopes))._asdict(),
            "intercept": float(np.mean([line.intercept for line in of_runs])),
            "residuals": [line.residual for line in of_runs],
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
    """Computes the distance in tokens over which a gradient halves, log ½ / slope.

    Args:
      fit: the exponential's `slope`, an interval, and `residuals`, one of each run.

    Returns:
      Mean and ends of the interval; None if the interval of the slope does not exclude
      that the gradient stays, or if the line does not describe the gradient.
    """
    slope = fit["slope"]
    if slope["high"] >= 0 or np.mean(fit["residuals"]) > FITS:
        return None
    # A steeper fall is a shorter life: the ends keep their names.
    return {name: -math.log(2) / slope[name] for name in slope}


def _times(
    times: Mapping[str, Sequence[Sequence[float]]], timing: settings.TimingConfig
) -> dict[str, Any]:
    medians = {name: [x[1] for x in quartiles] for name, quartiles in times.items()}
    return {
        "width": timing.width,
        "lengths": timing.lengths,
        "milliseconds": {name: list(map(list, x)) for name, x in times.items()},
        "exponents": {
            name: stopwatch.growth(timing.lengths, x) for name, x in medians.items()
        },
    }


def words(report: Mapping[str, Any]) -> str:
    """Writes the report as a page of Markdown."""
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
    """Says what the gradients show."""
    sentences = [
        f"{name}, {model['parameters']:,} parameters: "
        f"{_losses(model['validation_losses'])} after training."
        for name, model in report["models"].items()
    ]
    attention, gru = (
        report["models"][name]["validation_losses"] for name in settings.MODELS
    )
    if np.isfinite([attention, gru]).all():
        sentences.append(
            "The GRU's loss minus attention's is "
            f"{intervals.of_difference(np.array(gru), np.array(attention))} nats."
        )
    for stage, difference in report["difference_of_slopes"].items():
        when = f"{stage.capitalize()} training"
        sentences.append(
            f"{when} the GRU's slope minus attention's is "
            f"{intervals.Interval(**difference)} nats per token, run by run."
        )
        for name, model in report["models"].items():
            sentences.append(f"{when}, {name}: {nearer(model[stage])}.")
    return sentences


def _losses(losses: Sequence[float]) -> str:
    if not np.isfinite(losses).all():
        return "a loss that is not finite"
    return f"{intervals.of_mean(np.array(losses))} nats per token"


def nearer(gradients: Mapping[str, Any]) -> str:
    """Says which line fits better, if the interval of the difference excludes 0.

    Args:
      gradients: `residuals` of the fits 'exponential' and 'power', one of each run.
    """
    residuals = [np.array(gradients[k]["residuals"]) for k in ("exponential", "power")]
    difference = intervals.of_difference(*residuals, level=LEVEL)
    words = "the two lines are not told apart"
    if min(x.mean() for x in residuals) > FITS:
        words = "neither line describes it"
    elif difference.high < 0:
        words = "an exponential fits better than a power law"
    elif difference.low > 0:
        words = "a power law fits better than an exponential"
    exponential, power = (x.mean() for x in residuals)
    return f"{words} (they leave {exponential:.2f} and {power:.2f})"


def _gradient_table(
    models: Mapping[str, Any],
) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, model in models.items():
        for stage in settings.STAGES:
            fits = model[stage]
            life = fits["half_life"]
            cells = [f"{name}, {stage}"]
            for kind in ("exponential", "power"):
                slope = intervals.Interval(**fits[kind]["slope"])
                cells += [str(slope), f"{np.mean(fits[kind]['residuals']):.2f}"]
            lived = "none shown" if life is None else str(intervals.Interval(**life))
            cells.insert(2, lived)
            rows.append(cells + [f"{x:.2g}" for x in fits["norms"].values()])
    distances = next(iter(models.values()))["before"]["norms"]
    headings = ["", "slope by k", "half-life, tokens", "left", "slope by log k", "left"]
    return headings + [f"g({k})" for k in distances], rows


def _time_table(times: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, quartiles in times["milliseconds"].items():
        exponent = times["exponents"][name]
        growth = "" if exponent is None else f"{exponent:.2f}"
        rows.append([name, *(f"{x[1]:.3g}" for x in quartiles), growth])
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
