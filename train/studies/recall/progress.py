"""Progress of a study: a live line on a terminal, and a line for each result."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import rich.console
import rich.progress

from train.studies.recall import claims, config, runs

Announce = Callable[[str, int], runs.Announce]
Finish = Callable[[claims.Point], None]


@contextlib.contextmanager
def progress(
    settings: config.StudyConfig, missing: Sequence[tuple[str, int]]
) -> Iterator[tuple[Announce, Finish]]:
    """Shows mixer, phase, step, accuracies so far, and the time left.

    Args:
      settings: configuration of the study.
      missing: mixers and widths still to be run.

    Yields:
      A function that makes the announcer of a mixer and width, and one that shows the
      result of a mixer and width.
    """
    console = rich.console.Console(highlight=False, markup=False, soft_wrap=True)
    # A step takes longer the wider the model is.
    shares = [width for _, width in missing]
    with rich.progress.Progress(
        "{task.description}",
        rich.progress.BarColumn(bar_width=10),
        rich.progress.TimeRemainingColumn(),
        "left",
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=3600,
    ) as bar:
        task = bar.add_task("compiling", total=sum(shares))
        finished = 0

        def announce(mixer: str, width: int) -> runs.Announce:
            where = f"{mixer} {width}"
            bar.update(task, description=f"{where}: compiling")

            def show(phase: str, step: int, accuracy: np.ndarray) -> None:
                within = step / settings.runs.steps + (phase == runs.REPORT)
                bar.update(
                    task,
                    completed=sum(shares[:finished]) + width * within / 2,
                    description=f"{where}: {phase} {step}/{settings.runs.steps}, "
                    f"accuracy {accuracy.min():.2f} to {accuracy.max():.2f}",
                )

            return show

        def finish(point: claims.Point) -> None:
            nonlocal finished
            finished += 1
            bar.update(task, completed=sum(shares[:finished]))
            line = (
                f"{finished}/{len(shares)}  {point.mixer}, width {point.width}: "
                f"accuracy {point.interval} at rate {point.rate:.3g}, "
                f"state {point.state:,}, {min(point.steps)} to {max(point.steps)} steps"
            )
            bar.console.print(line)

        yield announce, finish
