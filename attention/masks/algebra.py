"""Mask expressions: evaluation of any mask, and composition (see `attention.masks`).

    (m ∧ n)[i, j] = m[i, j] ∧ n[i, j],   (m ∨ n)[i, j],   (¬m)[i, j]

Every mask is a frozen dataclass registered as a pytree: arrays and offsets are leaves,
sizes and functions static. The classes validate nothing, since transformations rebuild
them around tracers and placeholders; the functions of `attention.masks` do.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Integer

from attention.masks import block_maps


def static() -> Any:
    """A field that is no leaf of the pytree, but part of its structure."""
    return dataclasses.field(metadata={"static": True})


Visible = Bool[Array, "#B #N #T #S"]
Valid = Bool[Array, "#B L"] | None
Predicate = Callable[..., Any]
# A NumPy number is static: a block map that is made of it is a constant of the program.
Offset = Int[Array, ""] | np.int32
Lengths = Int[Array, ""] | Int[Array, "B"] | np.int32


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a mask is evaluated; four dimensions each, to broadcast."""

    query: Int[Array, "#B 1 T 1"]
    key: Int[Array, "#B 1 1 S"]
    batch: Int[Array, "B"] | None
    head: Int[Array, "N"] | None
    # The places count 0, 1, 2 ... in every dimension: data can be used as it stands.
    in_order: bool
    # The number of keys of the whole sequence, of which these may be a part.
    length: int | None

    def spread(self, visible: Visible) -> Bool[Array, "#B #N T S"]:
        """Broadcasts over all queries and keys."""
        full = (self.query.shape[2], self.key.shape[3])
        return jnp.broadcast_to(visible, (*visible.shape[:2], *full))

    def rows(self, data: Array) -> Array:
        """Takes the batch rows of data, along its first dimension."""
        return self._take(data, self.batch, axis=0)

    def heads(self, data: Array) -> Array:
        """Takes the heads of data, along its second dimension."""
        return self._take(data, self.head, axis=1)

    def _take(self, data: Array, index: Array | None, *, axis: int) -> Array:
        if self.in_order or index is None or data.shape[axis] == 1:
            return data
        return jnp.take(data, index, axis=axis, mode="clip")


class Mask:
    """Base of all masks; make one with the functions of `attention.masks`."""

    def at(
        self,
        query_positions: Integer[ArrayLike, "T"] | Integer[ArrayLike, "B T"],
        key_positions: Integer[ArrayLike, "S"] | Integer[ArrayLike, "B S"],
        *,
        batch: Int[Array, "B"] | None = None,
        head: Int[Array, "N"] | None = None,
        length: int | None = None,
    ) -> Bool[Array, "#B #N T S"]:
        """Evaluates the mask at the given positions, in any order.

        Args:
          query_positions: of the queries, before the mask's own offset is added.
          key_positions: of the keys. A negative one marks an empty slot (of a ring
            buffer, say), which nobody may attend to, under `~` either.
          batch: rows of the mask's arrays to take, and at which to evaluate a
            predicate; None: all rows, and row 0 for a predicate.
          head: the same for heads.
          length: number of keys of the whole sequence, of which these positions may
            be a part; only `bigbird` asks for it.

        Returns:
          True = may attend. B and N are 1 where nothing depends on them.

        Raises:
          TypeError: if positions are not integers.
          ValueError: if positions have neither 1 nor 2 dimensions, or a mask needs
            the length and was given none.
        """
        query = _positions("query_positions", query_positions)[:, None, :, None]
        key = _positions("key_positions", key_positions)[:, None, None, :]
        places = Places(query, key, batch, head, in_order=False, length=length)
        return places.spread(self._visible(places) & (key >= 0))

    def materialize(
        self,
        T: int,
        S: int,
        *,
        batch_size: int | None = None,
        num_heads: int | None = None,
    ) -> Visible:
        """The mask as one array for T queries and S keys.

        Args:
          T: number of queries.
          S: number of keys.
          batch_size: rows B; None: as many as the mask's arrays have, or 1.
          num_heads: query heads N; None: as many as the mask's arrays have, or 1.

        Returns:
          [B|1 N|1 T S], 1 where nothing depends on a dimension; T and S are 1 only
          where `dense` arrays are of that size and nothing else needs more.

        Raises:
          ValueError: if the mask's arrays fit neither 1 nor the sizes asked for.
        """
        places = Places(
            jnp.arange(T, dtype=jnp.int32)[None, None, :, None],
            jnp.arange(S, dtype=jnp.int32)[None, None, None, :],
            jnp.arange(1 if batch_size is None else batch_size, dtype=jnp.int32),
            jnp.arange(1 if num_heads is None else num_heads, dtype=jnp.int32),
            in_order=True,
            length=S,
        )
        visible = self._visible(places)
        for name, size, asked in zip(
            "BN", visible.shape[:2], (batch_size, num_heads), strict=True
        ):
            if asked is not None and size not in (1, asked):
                raise ValueError(
                    f"mask must have {name} = {asked} or 1, got {name} = {size}"
                )
        return visible

    def blocks(
        self, T: int, S: int, *, query_block: int, key_block: int
    ) -> block_maps.Blocks:
        """Which blocks of T queries and S keys are empty, partial or full.

        Args:
          T: number of queries.
          S: number of keys.
          query_block: queries in a block; the last of I = ⌈T / query_block⌉ blocks
            may have fewer.
          key_block: the same for the J = ⌈S / key_block⌉ blocks of keys.

        Returns:
          `some` and `every`, [B|1 N|1 I J]: where `some` is False no query of the
          block sees a key of it; where `every` is True each query sees each key. B
          and N are the sizes of the mask's arrays, 1 where nothing depends on them.
          NumPy arrays, under jit too, if the mask is made of Python numbers alone.

        Raises:
          ValueError: if a block has less than one position.
        """
        for name, size in (("query_block", query_block), ("key_block", key_block)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        spans = block_maps.Spans.cut(T, S, query_block=query_block, key_block=key_block)
        return spans.spread(self._blocks(spans))

    def valid_keys(self, S: int) -> Bool[Array, "#B S"] | None:
        """False for keys that nobody sees, where that is known of them."""
        return self._valid(S, of_queries=False)

    def valid_queries(self, T: int) -> Bool[Array, "#B T"] | None:
        """False for queries that see nothing, where that is known of them."""
        return self._valid(T, of_queries=True)

    def _visible(self, places: Places) -> Visible:
        raise NotImplementedError

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        raise NotImplementedError

    def _valid(self, length: int, *, of_queries: bool) -> Valid:
        del length, of_queries
        return None

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _operand(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _operand(other))

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with & | ~")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Visible where both masks show it."""

    left: Mask
    right: Mask

    def _visible(self, places: Places) -> Visible:
        return self.left._visible(places) & self.right._visible(places)

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        return self.left._blocks(spans) & self.right._blocks(spans)

    def _valid(self, length: int, *, of_queries: bool) -> Valid:
        a = self.left._valid(length, of_queries=of_queries)
        b = self.right._valid(length, of_queries=of_queries)
        return b if a is None else a if b is None else a & b


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """Visible where one of the masks shows it."""

    left: Mask
    right: Mask

    def _visible(self, places: Places) -> Visible:
        return self.left._visible(places) | self.right._visible(places)

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        return self.left._blocks(spans) | self.right._blocks(spans)

    def _valid(self, length: int, *, of_queries: bool) -> Valid:
        a = self.left._valid(length, of_queries=of_queries)
        b = self.right._valid(length, of_queries=of_queries)
        return None if a is None or b is None else a | b


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """Visible where the mask hides it."""

    mask: Mask

    def _visible(self, places: Places) -> Visible:
        return ~self.mask._visible(places)

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        return ~self.mask._blocks(spans)


def integers(x: Any, *, ranks: tuple[int, ...], name: str) -> Integer[Array, "..."]:
    """The argument as an array of integers, or an error that names it."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    if x.ndim not in ranks:
        raise ValueError(
            f"{name} must have {' or '.join(map(str, ranks))} dimensions, "
            f"got shape {list(x.shape)}"
        )
    return x


def _positions(name: str, positions: Any) -> Int[Array, "#B L"]:
    positions = integers(positions, ranks=(1, 2), name=name).astype(jnp.int32)
    return jnp.atleast_2d(positions)


def boolean(x: Any, complaint: str) -> Bool[Array, "..."]:
    """The argument as a boolean array, or the complaint and what came instead."""
    x = jnp.asarray(x)
    if x.dtype != bool:
        raise TypeError(f"{complaint}, got {x.dtype}")
    return x


def _operand(other: Any) -> Mask:
    if not isinstance(other, Mask):
        raise TypeError(
            f"a mask composes with masks, got {type(other).__name__}; "
            "wrap boolean arrays in masks.dense"
        )
    return other
