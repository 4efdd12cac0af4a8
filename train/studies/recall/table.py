"""The CSV files of a study: a line for each run, and one for each run and distance.

Numbers are written with all their digits, so that reading them back changes none.
"""

import csv
import dataclasses
import io
import pathlib
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from train import workdir

RESULTS, DISTANCE = "results.csv", "distance.csv"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Row:
    """One run: a line of results.csv.

    Attributes:
      task: name of the task.
      mixer: name of the mixer of every layer.
      width: E.
      parameters: number of parameters of the model.
      state: numbers that its layers carry from token to token at the end of a row.
      split: split of the accuracy: 'validation' in the sweep, 'test' in the report.
      rate: learning rate after the warm-up.
      seed: seed of parameters and batches.
      steps: training steps until the goal was reached, or all of them.
      accuracy: share of right answers on the split.
    """

    task: str
    mixer: str
    width: int
    parameters: int
    state: int
    split: str
    rate: float
    seed: int
    steps: int
    accuracy: float


@dataclasses.dataclass(frozen=True)
class DistanceRow:
    """Answers of one run of the report at one distance: a line of distance.csv.

    Attributes:
      mixer: name of the mixer of every layer.
      width: E.
      seed: seed of parameters and batches.
      distance: tokens from the value of a pair to the question for it.
      right: number of right answers at that distance.
      count: number of questions at that distance.
    """

    mixer: str
    width: int
    seed: int
    distance: int
    right: int
    count: int


def write(path: pathlib.Path, rows: Sequence[Any], cls: type) -> None:
    """Writes instances of a dataclass as CSV, with its fields as the header.

    Args:
      path: the file, which is replaced.
      rows: instances of `cls`.
      cls: the dataclass.
    """
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(cls)]
    lines = csv.DictWriter(text, names, lineterminator="\n")
    lines.writeheader()
    lines.writerows(map(dataclasses.asdict, rows))
    workdir.write(path, text.getvalue())


def read(path: pathlib.Path, cls: type[T]) -> list[T]:
    """Reads a file that `write` has written.

    Args:
      path: the file.
      cls: dataclass of its rows.

    Returns:
      The rows; none if there is no such file.

    Raises:
      ValueError: the columns differ from the fields, or a value has another type.
    """
    if not path.exists():
        return []
    kinds = typing.get_type_hints(cls)
    rows = []
    for line in csv.DictReader(io.StringIO(path.read_text())):
        if list(line) != list(kinds):
            raise ValueError(f"{path} is damaged: its columns are {list(line)}")
        try:
            values = {name: kind(line[name]) for name, kind in kinds.items()}
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        rows.append(cls(**values))
    return rows
