"""Tables and lists in Markdown."""

from collections.abc import Iterable


def line(*cells: object) -> str:
    """Formats cells as a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Formats rows, each with a cell for every heading, as a table."""
    headings = list(headings)
    lines: list[Iterable[object]] = [headings, ["---"] * len(headings), *rows]
    return "\n".join(line(*cells) for cells in lines)


def bullets(sentences: Iterable[str]) -> str:
    """Formats sentences as a list."""
    return "\n".join(f"- {sentence}" for sentence in sentences)
