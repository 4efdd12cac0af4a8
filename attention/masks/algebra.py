"""The base of all masks: how a mask is evaluated, and how masks compose.

    (m ∧ n)[i, j] = m[i, j] ∧ n[i, j],   (m ∨ n)[i, j],   (¬m)[i, j]

Every mask is a frozen dataclass registered as a pytree: arrays and offsets are leaves,
sizes and functions static. The classes do not validate their fields, since JAX
transformations rebuild them around tracers and placeholders; the constructors in
`attention.masks` do.
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
    """Declares a dataclass field that is static structure, not a leaf of the pytree."""
    return dataclasses.field(metadata={"static": True})


Visible = Bool[Array, "#B #N #T #S"]
Valid = Bool[Array, "#B L"] | None
Predicate = Callable[..., Any]
# A NumPy number is a constant of the compiled program, as are block maps made of it.
Offset = Int[Array, ""] | np.int32
Lengths = Int[Array, ""] | Int[Array, "B"] | np.int32


@dataclasses.dataclass(frozen=True)
class Points:
    """The points at which a mask is evaluated: all pairs of these queries and keys.

    Attributes:
      query: positions of the queries, before a mask adds its offset.
      key: positions of the keys.
      batch: indices of the batch rows; None: all rows of the mask's arrays.
      head: indices of the heads; None: all heads of the mask's arrays.
      in_order: whether the points count 0, 1, 2 … in every dimension, so that the
        mask's arrays can be used without a gather.
      length: number of keys of the whole sequence, of which these may be a part; None:
        unknown.
    """

    query: Int[Array, "#B 1 T 1"]
    key: Int[Array, "#B 1 1 S"]
    batch: Int[Array, "B"] | None
    head: Int[Array, "N"] | None
    in_order: bool
    length: int | None

    def spread(self, visible: Visible) -> Bool[Array, "#B #N T S"]:
        """Broadcasts over all queries and keys."""
        full = (self.query.shape[2], self.key.shape[3])
        return jnp.broadcast_to(visible, (*visible.shape[:2], *full))

    def rows(self, data: Array) -> Array:
        """Selects the batch rows from the first dimension of the data."""
        return self._take(data, self.batch, axis=0)

    def heads(self, data: Array) -> Array:
        """Selects the heads from the second dimension of the data."""
        return self._take(data, self.head, axis=1)

    def _take(self, data: Array, index: Array | None, *, axis: int) -> Array:
        if self.in_order or index is None or data.shape[axis] == 1:
            return data
        return jnp.take(data, index, axis=axis, mode="clip")


class Mask:
    """Base class of all masks, which the functions of `attention.masks` construct."""

    def at(
        self,
        query_positions: Integer[ArrayLike, "T"] | Integer[ArrayLike, "B T"],
        key_positions: Integer[ArrayLike, "S"] | Integer[ArrayLike, "B S"],
        *,
        batch: Int[Array, "B"] | None = None,
        head: Int[Array, "N"] | None = None,
        length: int | None = None,
    ) -> Bool[Array, "#B #N T S"]:
        """Evaluates the mask for all pairs of a query position and a key position.

        Args:
          query_positions: positions of the queries in any order, to which the mask
            adds its offset.
          key_positions: positions of the keys in any order. A negative position marks
            an empty slot (of a ring buffer, for example), which no query may attend
            to; `~` does not change that.
          batch: indices of the batch rows to select from the mask's arrays, and to pass
            to a predicate; None: all rows, and row 0 for a predicate.
          head: indices of the heads to select from the mask's arrays, and to pass to a
            predicate; None: all heads, and head 0 for a predicate.
          length: number of keys of the whole sequence, of which these positions may
            be a part; only `bigbird` without causality uses it.

        Returns:
          True = may attend. B and N are 1 where nothing depends on them.

        Raises:
          TypeError: if positions are not integers.
          ValueError: if positions have neither 1 nor 2 dimensions, or a mask needs
            the length and none was passed.
        """
        query = _positions("query_positions", query_positions)[:, None, :, None]
        key = _positions("key_positions", key_positions)[:, None, None, :]
        points = Points(query, key, batch, head, in_order=False, length=length)
        return points.spread(self._visible(points) & (key >= 0))

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
          ValueError: if the mask's arrays do not broadcast to these sizes.
        """
        points = Points(
            jnp.arange(T, dtype=jnp.int32)[None, None, :, None],
            jnp.arange(S, dtype=jnp.int32)[None, None, None, :],
            jnp.arange(1 if batch_size is None else batch_size, dtype=jnp.int32),
            jnp.arange(1 if num_heads is None else num_heads, dtype=jnp.int32),
            in_order=True,
            length=S,
        )
        visible = self._visible(points)
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
          query_block: number of queries in a block; the last of the
            I = ⌈T / query_block⌉ blocks may have fewer.
          key_block: number of keys in a block; the last of the J = ⌈S / key_block⌉
            blocks may have fewer.

        Returns:
          `some` and `every`, [B|1 N|1 I J]: where `some` is False, no query of the
          block sees a key of the block; where `every` is True, each query sees each
          key. B and N are the sizes of the mask's arrays, 1 where nothing depends on
          them. They are NumPy arrays, also under jit, if the mask consists of Python
          numbers only.

        Raises:
          ValueError: if a block has less than one position.
        """
        for name, size in (("query_block", query_block), ("key_block", key_block)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        spans = block_maps.Spans.cut(T, S, query_block=query_block, key_block=key_block)
        return spans.spread(self._blocks(spans))

    def valid_keys(self, S: int) -> Bool[Array, "#B S"] | None:
        """False at keys that certainly no query sees; None if none is known."""
        return self._valid(S, for_queries=False)

    def valid_queries(self, T: int) -> Bool[Array, "#B T"] | None:
        """False at queries that certainly see no key; None if none is known."""
        return self._valid(T, for_queries=True)

    def _visible(self, points: Points) -> Visible:
        raise NotImplementedError

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        raise NotImplementedError

    def _valid(self, length: int, *, for_queries: bool) -> Valid:
        del length, for_queries
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
    """Visible where both masks are: m ∧ n."""

    left: Mask
    right: Mask

    def _visible(self, points: Points) -> Visible:
        return self.left._visible(points) & self.right._visible(points)

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        return self.left._blocks(spans) & self.right._blocks(spans)

    def _valid(self, length: int, *, for_queries: bool) -> Valid:
        a = self.left._valid(length, for_queries=for_queries)
        b = self.right._valid(length, for_queries=for_queries)
        return b if a is None else a if b is None else a & b


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """Visible where at least one of the masks is: m ∨ n."""

    left: Mask
    right: Mask

    def _visible(self, points: Points) -> Visible:
        return self.left._visible(points) | self.right._visible(points)

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        return self.left._blocks(spans) | self.right._blocks(spans)

    def _valid(self, length: int, *, for_queries: bool) -> Valid:
        a = self.left._valid(length, for_queries=for_queries)
        b = self.right._valid(length, for_queries=for_queries)
        return None if a is None or b is None else a | b


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """Visible where the mask is not: ¬m."""

    mask: Mask

    def _visible(self, points: Points) -> Visible:
        return ~self.mask._visible(points)

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        return ~self.mask._blocks(spans)


def integers(x: Any, *, ranks: tuple[int, ...], name: str) -> Integer[Array, "..."]:
    """Converts an argument to an array of integers.

    Raises:
      TypeError: if the argument is not of integers.
      ValueError: if its number of dimensions is not one of `ranks`.
    """
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
    """Converts an argument to a boolean array.

    Raises:
      TypeError: with the complaint and the dtype, if the argument is not boolean.
    """
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
