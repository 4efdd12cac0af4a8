"""Studies mixers on a task with one right answer: accuracy against state, by seeds.

    python -m train.study --config=configs/recall.py --workdir=runs/recall

For each mixer and width: seeds x learning rates on the validation split, then as many
fresh seeds at the best rate on the test split, in one vmapped program. WORKDIR then
holds

    config.json           every value of the configuration
    results.csv           a line for each run of the sweep and of the report
    distance.csv          recall: right answers of each run at each distance
    summary.md            what the intervals support, in words
    report.json           the same in numbers
    figures/              pictures, and the arrays behind them

Each mixer and width is written when it is done; a rerun in the same workdir goes on
with those that are missing. Every field of the configuration is a flag, such as
--config.runs.steps=800.

Exit status: 0 studied, and what the study asserts holds; 1 it does not; 2 unusable
arguments or input; 130 Ctrl-C, 143 SIGTERM (both with what was finished saved).
"""

import json
import pathlib
import time

from absl import flags

from train import cli, workdir
from train.report import machine
from train.studies.recall import claims, config, picture, progress, runs, summary, table

SUMMARY = "summary.md"
_ROW, _DISTANCE = table.Row, table.DistanceRow


def prepare(settings: config.StudyConfig, path: pathlib.Path) -> None:
    """Claims the folder for this study, or checks that it belongs to it already.

    Args:
      settings: configuration of the study.
      path: the workdir, which is made if it is missing.

    Raises:
      ValueError: the folder cannot be written, its files are damaged, or it holds
        another study. In that case nothing is written.
    """
    results = path / table.RESULTS
    if results.exists() and not (path / workdir.CONFIG).exists():
        raise ValueError(
            f"workdir {str(path)!r} holds {results.name} without {workdir.CONFIG}: "
            "of which study?"
        )
    workdir.claim(path, settings)
    table.read(results, _ROW)
    table.read(path / table.DISTANCE, _DISTANCE)


def study(settings: config.StudyConfig, path: pathlib.Path) -> bool:
    """Runs the missing mixers and widths of a study, and reports all of them.

    Args:
      settings: configuration of the study.
      path: a workdir that `prepare` has claimed.

    Returns:
      Whether all assertions of the study hold.
    """
    began = time.perf_counter()
    rows = table.read(path / table.RESULTS, _ROW)
    done = {(row.mixer, row.width) for row in rows}
    distances = table.read(path / table.DISTANCE, _DISTANCE)
    if settings.task == "recall":
        done &= {(row.mixer, row.width) for row in distances}
    # An interrupted run may have written a pair to one of the two files only.
    rows = [row for row in rows if (row.mixer, row.width) in done]
    distances = [row for row in distances if (row.mixer, row.width) in done]
    missing = [pair for pair in settings.combinations if pair not in done]
    with progress.progress(settings, missing) as (announce, finish):
        for mixer, width in missing:
            new_rows, by_distance = runs.run(
                settings, mixer, width, announce=announce(mixer, width)
            )
            rows += new_rows
            distances += by_distance
            if distances:
                table.write(path / table.DISTANCE, distances, _DISTANCE)
            table.write(path / table.RESULTS, rows, _ROW)
            (point,) = claims.points(new_rows)
            finish(point)
    seconds = None
    if len(missing) == len(settings.combinations):  # not resumed
        seconds = time.perf_counter() - began
    return _report(settings, path, rows, distances, seconds)


def _report(
    settings: config.StudyConfig,
    path: pathlib.Path,
    rows: list[table.Row],
    distances: list[table.DistanceRow],
    seconds: float | None,
) -> bool:
    """Writes, draws and prints the results; returns whether all assertions hold."""
    points = claims.points(rows)
    comparisons = claims.compare(points, goal=settings.runs.goal)
    reaches = claims.reaches(settings, distances)
    checks = claims.checks(settings, points, reaches)
    words = summary.summary(settings, points, comparisons, reaches, checks)
    workdir.write(path / SUMMARY, words)
    report = {
        # None where the study asserts nothing.
        "passed": all(check.passed for check in checks) if checks else None,
        "checks": [check.__dict__ for check in checks],
        "points": [point.report() for point in points],
        "comparisons": [pair.report() for pair in comparisons],
        "reaches": [reach.report() for reach in reaches],
        "seconds": seconds,
        "machine": machine.describe(),
    }
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    workdir.write(path / workdir.REPORT, text)
    folder = path / workdir.FIGURES
    picture.accuracy(folder, settings, points)
    if distances:
        picture.distance(folder, settings, distances)
    print(words, end="")
    return all(check.passed for check in checks)


def define_flags(values: flags.FlagValues) -> None:
    """Declares the program's flags."""
    cli.define_config(values, config.StudyConfig)
    flags.DEFINE_string("workdir", None, "folder of the study", flag_values=values)


def main(values: flags.FlagValues) -> int:
    """Parses flags, and runs the study."""
    settings = cli.read_config(values, config.StudyConfig)
    path = cli.workdir(values, example="runs/recall")
    with cli.usage_errors():
        prepare(settings, path)
    return 0 if study(settings, path) else 1


if __name__ == "__main__":
    cli.run(main, define_flags)
