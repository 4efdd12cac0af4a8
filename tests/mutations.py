"""Small wrong edits of the code, for `tests.mutants`: one row each, as literal text.

The rows stand in tests/mutations_of_*.py by room: file -> (old, new, what is wrong),
where old occurs exactly once in the file. A fourth entry says why no test can tell the
edit from the original: such a mutation is run too, and reported apart.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tests import (
    mutations_of_arguments,
    mutations_of_attention,
    mutations_of_flash,
    mutations_of_masks,
    mutations_of_mechanisms,
    mutations_of_modules,
    mutations_of_probes,
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
    mutations_of_attention.ROWS,
    mutations_of_flash.ROWS,
    mutations_of_arguments.ROWS,
    mutations_of_masks.ROWS,
    mutations_of_mechanisms.ROWS,
    mutations_of_modules.ROWS,
    mutations_of_probes.ROWS,
)

MUTATIONS = tuple(
    Mutation(file, *row)
    for room in _ROOMS
    for file, rows in room.items()
    for row in rows
)
