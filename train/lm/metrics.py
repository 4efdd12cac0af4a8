"""The metrics of a run while it trains: metrics.jsonl, TensorBoard files, progress.

Every logged record becomes one line of JSON, which is flushed at once. A run that
continues from step k first removes the lines of later steps, since it runs those steps
again; thus the file of a finished run contains each record once. JSON has no NaN and no
infinities: they are written as null, and null is read as NaN.
"""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import rich.console
import rich.progress

FILE_NAME = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"

Record = Mapping[str, float]
Log = Callable[[Record], None]


def read(workdir: pathlib.Path) -> list[dict[str, float]]:
    """Reads the records of a run.

    Args:
      workdir: path of the run's folder.

    Returns:
      The records in the order in which they were written, without an incomplete last
      line. The list is empty if the run has logged nothing.

    Raises:
      ValueError: if a line is damaged.
    """
    path = workdir / FILE_NAME
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    try:
        records = [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return [
        {name: math.nan if value is None else value for name, value in record.items()}
        for record in records
    ]


@contextlib.contextmanager
def writer(workdir: pathlib.Path, *, start: int, tensorboard: bool) -> Iterator[Log]:
    """Opens the files to which records are written.

    Args:
      workdir: path of the run's folder.
      start: the step from which the run starts or continues; records of later steps
        are removed.
      tensorboard: whether to write TensorBoard event files too.

    Yields:
      A function that writes one record, which must contain `step`.

    Raises:
      ValueError: if `tensorboard` is True and tensorboardX is not installed.
    """
    with contextlib.ExitStack() as stack:
        events = None
        if tensorboard:
            events = _event_writer(workdir / TENSORBOARD_DIRECTORY, start)
            stack.callback(events.close)
        kept = [record for record in read(workdir) if record["step"] <= start]
        path = workdir / FILE_NAME
        # The file is replaced atomically: a process that is killed here leaves the old
        # file, not a part of the new one.
        shortened = path.with_suffix(".tmp")
        shortened.write_text("".join(map(_line, kept)))
        os.replace(shortened, path)
        file = stack.enter_context(path.open("a"))

        def write(record: Record) -> None:
            file.write(_line(record))
            file.flush()
            if events is not None:
                for name, value in record.items():
                    if name != "step":
                        events.add_scalar(name, value, record["step"])

        yield write


@contextlib.contextmanager
def progress(steps: int, *, start: int) -> Iterator[Log]:
    """Shows the progress of a run.

    On a terminal it is a progress bar, otherwise one line of text for each record.

    Args:
      steps: number of steps of the whole run.
      start: the step from which the run starts or continues.

    Yields:
      A function that shows one record, which must contain `step`, `loss` and
      `tokens_per_second`.
    """
    console = rich.console.Console()
    if not console.is_terminal:
        yield lambda record: print(
            f"step {record['step']}/{steps}  {_summary(record)}", flush=True
        )
        return
    with rich.progress.Progress(
        "step {task.completed:.0f}/{task.total:.0f}",
        rich.progress.BarColumn(),
        "{task.description}",
        rich.progress.TimeRemainingColumn(),
        "left",
        console=console,
    ) as bar:
        task = bar.add_task("compiling", total=steps, completed=start)
        yield lambda record: bar.update(
            task, completed=record["step"], description=_summary(record)
        )


def require_tensorboard() -> None:
    """Raises ValueError unless the package that writes event files is installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "TensorBoard files need tensorboardX: "
            "pip install -c constraints.txt -e '.[tensorboard]'"
        )


def _summary(record: Record) -> str:
    return f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"


def _line(record: Record) -> str:
    finite = {
        name: value if math.isfinite(value) else None for name, value in record.items()
    }
    return json.dumps(finite) + "\n"


def _event_writer(directory: pathlib.Path, start: int) -> Any:
    require_tensorboard()
    import tensorboardX  # an optional dependency, needed for event files only

    return tensorboardX.SummaryWriter(str(directory), purge_step=start + 1)
