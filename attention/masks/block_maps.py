"""Which blocks of a mask are empty, partial or full, decided without forming T x S.

Queries and keys are cut into blocks of consecutive positions. Under a mask m, block I
of the queries and block J of the keys are

    EMPTY      ¬some[I, J]                 no query of I sees a key of J
    FULL       every[I, J]                 every query of I sees every key of J
    PARTIAL    some[I, J] ∧ ¬every[I, J]   anything

EMPTY and FULL are guarantees, PARTIAL is always allowed: `some` may be True too often,
`every` too rarely. A mask decides by the first and the last position of each block, and
a composition by its parts:

    m ∧ n      some ∧ some      every ∧ every
    m ∨ n      some ∨ some      every ∨ every
    ¬m         ¬every           ¬some
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

# NumPy's where everything is known while tracing: plain operators leave it to NumPy.
Known = Array | np.ndarray


class Blocks(NamedTuple):
    """The map of a mask's blocks: NumPy arrays if it is known while tracing."""

    some: Bool[Known, "#B #N #I #J"]
    every: Bool[Known, "#B #N #I #J"]

    def __and__(self, other: "Blocks") -> "Blocks":
        return Blocks(self.some & other.some, self.every & other.every)

    def __or__(self, other: "Blocks") -> "Blocks":
        return Blocks(self.some | other.some, self.every | other.every)

    def __invert__(self) -> "Blocks":
        return Blocks(~self.every, ~self.some)


# Every query sees every key; and nothing is known.
FULL = Blocks(np.ones((1, 1, 1, 1), bool), np.ones((1, 1, 1, 1), bool))
PARTIAL = Blocks(np.ones((1, 1, 1, 1), bool), np.zeros((1, 1, 1, 1), bool))


@dataclasses.dataclass(frozen=True)
class Spans:
    """The first and last positions of the I blocks of queries and J blocks of keys."""

    query_first: Int[Known, "1 1 I 1"]
    query_last: Int[Known, "1 1 I 1"]
    key_first: Int[np.ndarray, "1 1 1 J"]
    key_last: Int[np.ndarray, "1 1 1 J"]
    # T and S; and how many positions a block has, save for the last ones.
    lengths: tuple[int, int]
    sizes: tuple[int, int]

    @classmethod
    def cut(cls, T: int, S: int, *, query_block: int, key_block: int) -> "Spans":
        """Cuts T queries and S keys into blocks; the last ones end with T and S."""
        # A block is no longer than the sequence, which keeps sizes within int32.
        query_block, key_block = min(query_block, max(T, 1)), min(key_block, max(S, 1))
        query_first, query_last = _ends(T, query_block)
        key_first, key_last = _ends(S, key_block)
        return cls(
            query_first[None, None, :, None],
            query_last[None, None, :, None],
            key_first[None, None, None, :],
            key_last[None, None, None, :],
            lengths=(T, S),
            sizes=(query_block, key_block),
        )

    def shifted(self, offset: Int[Any, ""] | None) -> "Spans":
        """The same blocks with the queries at their absolute positions."""
        if offset is None:
            return self
        return dataclasses.replace(
            self,
            query_first=self.query_first + offset,
            query_last=self.query_last + offset,
        )

    def of(self, size: int) -> "Spans":
        """The same blocks counted in chunks of so many positions."""
        return dataclasses.replace(
            self,
            query_first=self.query_first // size,
            query_last=self.query_last // size,
            key_first=self.key_first // size,
            key_last=self.key_last // size,
        )

    def positions(self) -> tuple[Int[Known, "1 1 T 1"], Int[np.ndarray, "1 1 1 S"]]:
        """Of all queries and of all keys, one by one."""
        T, S = (np.arange(length, dtype=np.int32) for length in self.lengths)
        return (
            self.query_first[:, :, :1] + T[None, None, :, None],
            self.key_first[:, :, :, :1] + S[None, None, None, :],
        )

    def spread(self, blocks: Blocks) -> Blocks:
        """Broadcasts over all blocks of queries and keys."""
        grid = (self.query_first.shape[2], self.key_first.shape[3])
        return Blocks(*(_broadcast(x, (*x.shape[:2], *grid)) for x in blocks))


def _broadcast(x: Known, shape: tuple[int, ...]) -> Known:
    if isinstance(x, np.ndarray):
        return np.broadcast_to(x, shape)
    return jnp.broadcast_to(x, shape)


def _ends(length: int, block: int) -> tuple[Int[np.ndarray, "I"], Int[np.ndarray, "I"]]:
    first = np.arange(0, length, block, dtype=np.int32)
    return first, np.minimum(first + (block - 1), length - 1)


def equal(queries: tuple[Known, Known], keys: tuple[Known, Known]) -> Blocks:
    """Where numbers are equal, by the least and the largest one of each block."""
    query_least, query_most = queries
    key_least, key_most = keys
    return Blocks(
        some=(key_least <= query_most) & (query_least <= key_most),
        every=(key_least == query_most) & (query_least == key_most),
    )


def reduce(
    f: Callable[..., Array],
    data: Shaped[Array, "..."],
    block: int,
    *,
    axis: int,
    fill: Any,
) -> Shaped[Array, "..."]:
    """Reduces each block along an axis; `fill` changes nothing at the ragged end."""
    length = data.shape[axis]
    padding = [(0, 0)] * data.ndim
    padding[axis] = (0, -length % block)
    data = jnp.pad(data, padding, constant_values=fill)
    count = data.shape[axis] // block
    blocks = (*data.shape[:axis], count, block, *data.shape[axis + 1 :])
    return f(data.reshape(blocks), axis=axis + 1)
