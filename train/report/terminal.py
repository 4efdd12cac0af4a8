"""Where programs print tables."""

import sys

import rich.console
import rich.table

# Of tables in a file or a pipe, in characters.
WIDTH = 140


def console() -> rich.console.Console:
    """Standard output, wide enough for tables even where it is a pipe."""
    width = None if sys.stdout.isatty() else WIDTH
    return rich.console.Console(
        file=sys.stdout, highlight=False, markup=False, soft_wrap=True, width=width
    )


def table(title: str, *headings: str, no_wrap: bool = False) -> rich.table.Table:
    """An empty table.

    Args:
      title: the line above it.
      headings: of its columns.
      no_wrap: whether cells that are too wide are cut instead of wrapped.
    """
    empty = rich.table.Table(title=title, title_justify="left")
    for heading in headings:
        empty.add_column(heading, no_wrap=no_wrap)
    return empty
