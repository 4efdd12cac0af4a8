"""Which blocks a row of blocks visits: lists made of a block map.

A block map is a boolean grid [I J]; row i visits the columns j where it is true, in
ascending order. Maps that are NumPy arrays give lists that are constants of
the program; others are sorted inside of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

Carry = TypeVar("Carry")
# NumPy arrays are constants of the program.
Known = Array | np.ndarray


class BlockLists(NamedTuple):
    """The blocks that each row of blocks visits.

    Attributes:
      columns: int32 [... I C], the visited columns first, C at most J.
      counts: int32 [... I], how many of them; None: all C, in every row.
    """

    columns: Int[Known, "*A C"]
    counts: Int[Known, "*A"] | None

    def fold(self, step: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        """Applies carry ← step(j, carry) to every j that one row visits, in order."""
        length = self.columns.shape[-1]
        if length == 0:
            return carry
        if length == 1 and self.counts is None:
            return step(self.columns[0], carry)
        return lax.fori_loop(
            0,
            length if self.counts is None else self.counts,
            lambda c, carry: step(self.columns[c], carry),
            carry,
        )


def from_grid(grid: Bool[Known, "*A I J"]) -> BlockLists:
    """Lists the true columns of each row of a grid."""
    if isinstance(grid, np.ndarray):
        counts: Any = np.sum(grid, axis=-1, dtype=np.int32)
        longest = int(np.max(counts, initial=0))
        first = np.argsort(~grid, axis=-1, stable=True)[..., :longest]
        same = np.all(counts == longest)
        return BlockLists(first.astype(np.int32), None if same else counts)
    columns = jnp.argsort(~grid, axis=-1, stable=True).astype(jnp.int32)
    return BlockLists(columns, jnp.sum(grid, axis=-1, dtype=jnp.int32))
