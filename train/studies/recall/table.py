"""The lines of a study: one for each run, and one for each run and distance.

Numbers are written with all their digits, so what is read back is what was written.
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
      task: that was learned.
      mixer: of every layer.
      width: E.
      parameters: of the model.
      state: numbers that its layers carry from token to token at the end of a row.
      split: on which it was judged: 'validation' in the sweep, 'test' in the report.
      rate: learning rate after the warm-up.
      seed: of parameters and batches.
      steps: it took to the goal, or all of them.
      accuracy: on the split.
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
      mixer: as in `Row`.
      width: as in `Row`.
      seed: as in `Row`.
      distance: tokens from the value of a pair to the question for it.
      right: right answers there.
      count: questions there.
    """

    mixer: str
    width: int
    seed: int
    distance: int
    right: int
    count: int


def write(path: pathlib.Path, rows: Sequence[Any], cls: type) -> None:
    """Writes rows of a dataclass as CSV, with its fields as the header."""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(cls)]
    lines = csv.DictWriter(text, names, lineterminator="\n")
    lines.writeheader()
    lines.writerows(map(dataclasses.asdict, rows))
    workdir.write(path, text.getvalue())


def read(path: pathlib.Path, cls: type[T]) -> list[T]:
    """Reads what `write` wrote; no file: no rows.

    Raises:
      ValueError: other columns, or a value of another type.
    """
    if not path.exists():
        return []
    kinds = typing.get_type_hints(cls)
    found = []
    for line in csv.DictReader(io.StringIO(path.read_text())):
        if list(line) != list(kinds):
            raise ValueError(f"{path} is damaged: its columns are {list(line)}")
        try:
            values = {name: kind(line[name]) for name, kind in kinds.items()}
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        found.append(cls(**values))
    return found
