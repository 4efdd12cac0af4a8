"""Which blocks a row of blocks visits: lists made of a block map.

A block map is a boolean grid [I J]; what is visited by row i are the columns j where it
is true, in ascending order. Maps that are NumPy arrays give lists that are constants of
the program; others are sorted inside of it.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

Carry = TypeVar("Carry")


class Visits(NamedTuple):
    """The blocks that each row of blocks visits.

    Attributes:
      order: int32 [... I C], the visited columns first, C at most J.
      visited: int32 [... I], how many of them; None: all C, in every row.
    """

    order: Int[Array, "*A C"]
    visited: Int[Array, "*A"] | None

    def fold(self, step: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
        """Applies carry ← step(j, carry) to every j that one row visits, in order."""
        length = self.order.shape[-1]
        if length == 0:
            return carry
        if length == 1 and self.visited is None:
            return step(self.order[0], carry)
        return lax.fori_loop(
            0,
            length if self.visited is None else self.visited,
            lambda c, carry: step(self.order[c], carry),
            carry,
        )


def of(grid: Bool[Array, "*A I J"]) -> Visits:
    """Lists the true columns of each row of a grid."""
    if not isinstance(grid, np.ndarray):
        order = jnp.argsort(~grid, axis=-1, stable=True).astype(jnp.int32)
        return Visits(order, jnp.sum(grid, axis=-1, dtype=jnp.int32))
    count = np.sum(grid, axis=-1, dtype=np.int32)
    longest = int(np.max(count, initial=0))
    order = np.argsort(~grid, axis=-1, stable=True)[..., :longest].astype(np.int32)
    return Visits(order, None if np.all(count == longest) else count)
