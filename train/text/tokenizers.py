"""Tokenizers: text to token ids and back, without loss.

bytes   id = value of a UTF-8 byte; V = 256, any text
chars   id = rank of a character among those of a text; V = their number
"""

import dataclasses
import types
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Int, UInt
from numpy.typing import ArrayLike


def check_ids(ids: ArrayLike, vocab_size: int) -> np.ndarray:
    """Checks token ids on the host, where a wrong one can still be named.

    Inside a compiled program an index out of range is clamped, and -1 means the last
    row, so ids are checked before they get there.

    Args:
      ids: integers of any shape.
      vocab_size: V; valid ids are 0 to V - 1.

    Returns:
      The same ids as int32.

    Raises:
      ValueError: an id is outside the vocabulary, or not an integer.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return array.astype(np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"token ids must be integers, got dtype {array.dtype}")
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        raise ValueError(
            f"token id {wrong[0]} is outside the vocabulary of {vocab_size} ids "
            f"(0 to {vocab_size - 1})"
        )
    return array.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens: id = value of the byte."""

    @property
    def vocab_size(self) -> int:
        """V = 256."""
        return 256

    def encode(self, text: str | bytes) -> Int[np.ndarray, "M"]:
        """The bytes of a text (UTF-8), or raw bytes, as int32 ids."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, np.uint8).astype(np.int32)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact inverse of `encode`; raises ValueError for an unknown id."""
        return check_ids(ids, self.vocab_size).astype(np.uint8).tobytes()

    def decode(self, ids: ArrayLike) -> str:
        """Text; each ill-formed sequence, as a cut character, becomes one U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def to_json(self) -> dict[str, str]:
        """What identifies this tokenizer, ready for JSON."""
        return {"name": "bytes"}


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """Characters as tokens: id = rank of the character among those of a text.

    Attributes:
      characters: the V distinct characters in ascending order of code point.

    Raises:
      ValueError: the characters are none, repeated or out of order.
    """

    characters: str

    def __post_init__(self) -> None:
        if not self.characters or self.characters != _distinct(self.characters):
            raise ValueError("characters must be distinct, ascending and at least one")

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """The tokenizer of the characters that stand in `text`."""
        return cls(_distinct(text))

    @property
    def vocab_size(self) -> int:
        """V, the number of distinct characters."""
        return len(self.characters)

    def encode(self, text: str) -> Int[np.ndarray, "M"]:
        """The characters of a text as int32 ids; ValueError for an unknown one."""
        table, points = _code_points(self.characters), _code_points(text)
        ids = np.minimum(np.searchsorted(table, points), table.size - 1)
        unknown = points[table[ids] != points]
        if unknown.size:
            raise ValueError(
                f"character {chr(unknown[0])!r} (U+{unknown[0]:04X}) is not among the "
                f"{self.vocab_size} characters of the text"
            )
        return ids.astype(np.int32)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The text of the ids in UTF-8; raises ValueError for an unknown id."""
        return self.decode(ids).encode()

    def decode(self, ids: ArrayLike) -> str:
        """The exact inverse of `encode`; raises ValueError for an unknown id."""
        checked = check_ids(ids, self.vocab_size)
        return "".join(self.characters[i] for i in checked.flat)

    def to_json(self) -> dict[str, str]:
        """What identifies this tokenizer, ready for JSON."""
        return {"name": "chars", "characters": self.characters}


Tokenizer = ByteTokenizer | CharTokenizer

TOKENIZERS: Mapping[str, Callable[[str], Tokenizer]] = types.MappingProxyType(
    {"bytes": lambda text: ByteTokenizer(), "chars": CharTokenizer.of}
)


def _distinct(text: str) -> str:
    return "".join(sorted(set(text)))


def _code_points(text: str) -> UInt[np.ndarray, "M"]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
