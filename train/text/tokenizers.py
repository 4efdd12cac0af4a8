"""Lossless tokenizers, which map text to token ids and back.

bytes   id = value of a UTF-8 byte; V = 256; encodes any text
chars   id = rank of a character among the V distinct characters of a text
"""

import dataclasses
import types
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Int, UInt
from numpy.typing import ArrayLike


def check_ids(ids: ArrayLike, vocab_size: int) -> np.ndarray:
    """Checks token ids on the host.

    A compiled program cannot raise an error: it clamps an index out of range, and
    reads -1 as the last row. Ids are therefore checked before they are passed to one.

    Args:
      ids: integers of any shape.
      vocab_size: V; valid ids are 0 to V - 1.

    Returns:
      The same ids as int32.

    Raises:
      ValueError: if an id is outside the vocabulary, or is not an integer.
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
        """Encodes a text, as UTF-8, or raw bytes to int32 ids."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, np.uint8).astype(np.int32)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Decodes ids to bytes, the exact inverse of `encode`.

        Raises:
          ValueError: if an id is outside 0 … 255.
        """
        return check_ids(ids, self.vocab_size).astype(np.uint8).tobytes()

    def decode(self, ids: ArrayLike) -> str:
        """Decodes ids to text; each ill-formed UTF-8 sequence becomes one U+FFFD.

        Raises:
          ValueError: if an id is outside 0 … 255.
        """
        return self.decode_bytes(ids).decode(errors="replace")

    def to_json(self) -> dict[str, str]:
        """Returns the values that define this tokenizer, for JSON."""
        return {"name": "bytes"}


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """Characters as tokens: id = rank of the character in `characters`.

    Attributes:
      characters: V distinct characters in ascending order of code point.

    Raises:
      ValueError: if there are no characters, or they are repeated or not in order.
    """

    characters: str

    def __post_init__(self) -> None:
        if not self.characters or self.characters != _distinct(self.characters):
            raise ValueError("characters must be distinct, ascending and at least one")

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """Makes the tokenizer of the distinct characters of a text."""
        return cls(_distinct(text))

    @property
    def vocab_size(self) -> int:
        """V, the number of distinct characters."""
        return len(self.characters)

    def encode(self, text: str) -> Int[np.ndarray, "M"]:
        """Encodes a text to int32 ids.

        Raises:
          ValueError: if a character of the text is not in `characters`.
        """
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
        """Decodes ids to text in UTF-8.

        Raises:
          ValueError: if an id is outside 0 … V-1.
        """
        return self.decode(ids).encode()

    def decode(self, ids: ArrayLike) -> str:
        """Decodes ids to text, the exact inverse of `encode`.

        Raises:
          ValueError: if an id is outside 0 … V-1.
        """
        checked = check_ids(ids, self.vocab_size)
        return "".join(self.characters[i] for i in checked.flat)

    def to_json(self) -> dict[str, str]:
        """Returns the values that define this tokenizer, for JSON."""
        return {"name": "chars", "characters": self.characters}


Tokenizer = ByteTokenizer | CharTokenizer

TOKENIZERS: Mapping[str, Callable[[str], Tokenizer]] = types.MappingProxyType(
    {"bytes": lambda text: ByteTokenizer(), "chars": CharTokenizer.of}
)


def _distinct(text: str) -> str:
    return "".join(sorted(set(text)))


def _code_points(text: str) -> UInt[np.ndarray, "M"]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
