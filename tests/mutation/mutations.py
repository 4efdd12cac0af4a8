"""Small wrong edits of the code, for `tests.mutants`: one row each, as literal text.

The rows stand in tests/mutation/*.py by room: file -> (old, new, what is wrong),
where old occurs exactly once in the file. A fourth entry says why no test can tell the
edit from the original: such a mutation is run too, and reported apart.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tests.mutation import (
    arguments,
    attention,
    flash,
    masks,
    mechanisms,
    modules,
    probes,
)


class Mutation(NamedTuple):
    """A wrong edit.

    Attributes:
      file: that is edited, from the root of the repository.
      old: text that occurs in it once.
      new: text in its place.
      wrong: what is wrong then.
      equivalent: why it is not wrong after all; empty where it is.
    """

    file: str
    old: str
    new: str
    wrong: str
    equivalent: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.wrong}"

    def apply(self, text: str) -> str:
        """The file's text with the edit made.

        Raises:
          ValueError: the old text does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text occurs {count} times, not 1")
        return text.replace(self.old, self.new)


_ROOMS: tuple[Mapping[str, tuple[tuple[str, ...], ...]], ...] = (
    attention.ROWS,
    flash.ROWS,
    arguments.ROWS,
    masks.ROWS,
    mechanisms.ROWS,
    modules.ROWS,
    probes.ROWS,
)

MUTATIONS = tuple(
    Mutation(file, *row)
    for room in _ROOMS
    for file, rows in room.items()
    for row in rows
)
