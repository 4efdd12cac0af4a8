"""Edits of inputs: where a probe replaces one, and by what.

Edits of all rows of a batch at once, at one position, show what an output sees of its
future in few calls; edits of one row at a time show what rows see of one another.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from attention.properties import subjects

# Tokens (more fit no cache) and numbers of output in one call, at most.
_CALL_TOKENS, _CALL_OUTPUTS = 2**11, 2**24

# Maps a generator and one input [...] to its replacements [R ...], the same number R
# for each input.
Replacements = Callable[[np.random.Generator, np.ndarray], np.ndarray]


class Edit(NamedTuple):
    """Inputs of which one position was edited.

    Attributes:
      position: position that was edited.
      rows: rows in which it was.
      inputs: inputs with the edit.
      since: first output of those rows that may move.
    """

    position: int
    rows: Bool[np.ndarray, "B"]
    inputs: Shaped[np.ndarray, "B T ..."]
    since: int


class Series(NamedTuple):
    """Inputs, and edits of them, to be read once."""

    inputs: Shaped[np.ndarray, "B T ..."]
    edits: Iterator[Edit]


def ordinary_replacements(subject: subjects.Subject, count: int) -> Replacements:
    """Other ids, all different; or vectors of the scale of the inputs."""
    vocab_size = subject.vocab_size
    if vocab_size is None:
        return lambda rng, x: scale(x) * rng.standard_normal((count, *x.shape))

    def other_ids(rng: np.random.Generator, token: Any) -> np.ndarray:
        turn = (rng.integers(vocab_size - 1) + np.arange(count)) % (vocab_size - 1)
        return (token + 1 + turn) % vocab_size

    return other_ids


def scale(inputs: Float[np.ndarray, "..."]) -> float:
    """Root mean square of the finite inputs; 1 if they are all zero."""
    wide = inputs.astype(np.float64)
    return float(np.sqrt(np.mean(np.where(np.isfinite(wide), wide, 0) ** 2))) or 1.0


def in_all_rows(
    subject: subjects.Subject,
    rows: Shaped[np.ndarray, "B T ..."],
    replacements: Replacements,
) -> Series:
    """One edit in every row of a batch, all at the same position.

    The rows are repeated until a call is as large as is fast, so that each of its
    copies takes another replacement.

    Args:
      subject: the function, which may accept fewer rows.
      rows: inputs.
      replacements: of each of them.
    """
    rng = np.random.default_rng(subject.seed)
    count = len(replacements(rng, rows[0, 0]))
    length, width = rows.shape[1], subject.vocab_size or rows[0, 0].size
    slots = min(_CALL_TOKENS // length, _CALL_OUTPUTS // (length * width))
    most = max(1, min(count, slots // len(rows)))
    sizes = sorted({most, min(2, most), 1}, reverse=True)
    inputs = subjects.first_accepted(
        subject, [np.repeat(rows, size, axis=0) for size in sizes]
    )
    copies = len(inputs) // len(rows)
    every_row = np.ones(len(inputs), bool)

    def generate() -> Iterator[Edit]:
        for position in range(length):
            values = np.stack([replacements(rng, row[position]) for row in rows])
            for start in range(0, count, copies):
                chosen = (start + np.arange(copies)) % count
                edited = inputs.copy()
                # A huge number is infinite in float16.
                with np.errstate(over="ignore"):
                    some = values[:, chosen].astype(inputs.dtype)
                edited[:, position] = some.reshape(len(inputs), *some.shape[2:])
                yield Edit(position, every_row, edited, since=position)

    return Series(inputs, generate())


def behind_each_first_token(
    row: Int[np.ndarray, "T"], count: int, *, vocab_size: int
) -> Series:
    """Rows that begin with different ids, edited behind it, halfway and at the end.

    Args:
      row: the tokens that follow the first.
      count: number of first tokens that are tried.
      vocab_size: number V of ids.
    """
    inputs = np.repeat(row[None], count, axis=0)
    inputs[:, 0] = (row[0] + 1 + np.arange(count)) % vocab_size

    def generate() -> Iterator[Edit]:
        for position in sorted({1, len(row) // 2, len(row) - 1} - {0}):
            edited = inputs.copy()
            edited[:, position] = (row[position] + 1) % vocab_size
            yield Edit(position, np.ones(count, bool), edited, since=position)

    return Series(inputs, generate())


def one_row_at_a_time(
    subject: subjects.Subject,
    rows: Shaped[np.ndarray, "B T ..."],
    positions_and_rows: Iterable[tuple[int, int]],
    replacements: Replacements,
    *,
    causal: bool,
) -> Series:
    """Edits in one row of the batch, one by one.

    Args:
      subject: decides the seed.
      rows: inputs.
      positions_and_rows: which position of which row to edit.
      replacements: of each of those inputs.
      causal: whether earlier outputs of the edited row must not move either.
    """
    rng = np.random.default_rng(subject.seed)

    def generate() -> Iterator[Edit]:
        for position, row in positions_and_rows:
            since = position if causal else 0
            for value in replacements(rng, rows[row, position]):
                edited = rows.copy()
                edited[row, position] = value
                yield Edit(position, np.arange(len(rows)) == row, edited, since)

    return Series(rows, generate())
