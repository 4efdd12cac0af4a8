"""The elementary masks, each a predicate on the positions of query and key.

The constructors in `attention.masks.constructors` document what each of them shows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer

from attention.masks import algebra, block_maps


@dataclasses.dataclass(frozen=True)
class Leaf(algebra.Mask):
    """Base class of elementary masks, which adds the offset to query positions.

    Attributes:
      offset: absolute position of query 0; None: 0.
    """

    offset: algebra.Offset | None = dataclasses.field(kw_only=True)

    def _visible(self, points: algebra.Points) -> algebra.Visible:
        query = points.query
        if self.offset is not None:
            query = query + self.offset
        return self._sees(query, points)

    def _sees(
        self, query: Int[Array, "#B 1 T 1"], points: algebra.Points
    ) -> algebra.Visible:
        """Evaluates the mask at absolute positions of the queries."""
        raise NotImplementedError

    def _blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        return self._sees_blocks(spans.shifted(self.offset))

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        """Computes the block map for absolute positions of the queries."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Causal(Leaf):
    """Keys at or before the query: j ≤ p."""

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        return points.key <= query

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        return block_maps.Blocks(
            some=spans.key_first <= spans.query_last,
            every=spans.key_last <= spans.query_first,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window(Leaf):
    """Keys within inclusive distances: p - left ≤ j ≤ p + right."""

    left: int | None = algebra.static()
    right: int | None = algebra.static()

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        visible = jnp.ones((1, 1, 1, 1), bool)
        if self.left is not None:
            visible &= points.key >= query - self.left
        if self.right is not None:
            visible &= points.key <= query + self.right
        return points.spread(visible)

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        blocks = block_maps.FULL
        if self.left is not None:
            blocks &= block_maps.Blocks(
                some=spans.key_last >= spans.query_first - self.left,
                every=spans.key_first >= spans.query_last - self.left,
            )
        if self.right is not None:
            blocks &= block_maps.Blocks(
                some=spans.key_first <= spans.query_last + self.right,
                every=spans.key_last <= spans.query_first + self.right,
            )
        return blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix(Leaf):
    """A prefix that every query sees, and causality: j ≤ p ∨ j < length."""

    length: algebra.Lengths

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        return (points.key <= query) | (points.key < _per_row(self.length, points))

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        length = self.length.reshape(-1, 1, 1, 1)
        return block_maps.Blocks(
            some=(spans.key_first <= spans.query_last) | (spans.key_first < length),
            every=(spans.key_last <= spans.query_first) | (spans.key_last < length),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunked(Leaf):
    """Queries and keys of the same chunk: ⌊p / size⌋ = ⌊j / size⌋."""

    size: int = algebra.static()

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        return query // self.size == points.key // self.size

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        # The chunk index increases with the position, so its extremes are at the ends.
        chunks = spans.of(self.size)
        return block_maps.equal(
            (chunks.query_first, chunks.query_last), (chunks.key_first, chunks.key_last)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments(Leaf):
    """Queries and keys of the same document: query_ids[p] = key_ids[j]."""

    query_ids: Integer[Array, "T"] | Integer[Array, "B T"]
    key_ids: Integer[Array, "S"] | Integer[Array, "B S"] | None

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        query_ids, key_ids = map(points.rows, self._ids())
        query_ids, has_query = _lookup(query_ids, query, axis=2)
        key_ids, has_key = _lookup(key_ids, points.key, axis=3)
        return has_query & has_key & (query_ids == key_ids)

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        query, key = spans.positions()
        query_ids, key_ids = self._ids()
        queries, has_query = _extremes(query_ids, query, spans.sizes[0], axis=2)
        keys, has_key = _extremes(key_ids, key, spans.sizes[1], axis=3)
        return block_maps.equal(queries, keys) & has_query & has_key

    def _ids(self) -> tuple[Integer[Array, "#B 1 T 1"], Integer[Array, "#B 1 1 S"]]:
        query_ids = jnp.atleast_2d(self.query_ids)
        key_ids = query_ids if self.key_ids is None else jnp.atleast_2d(self.key_ids)
        return query_ids[:, None, :, None], key_ids[:, None, None, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lengths(Leaf):
    """Real tokens of padded rows: 0 ≤ j < key_length ∧ 0 ≤ p < query_length."""

    key_lengths: algebra.Lengths | None
    query_lengths: algebra.Lengths | None

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        visible = jnp.ones((1, 1, 1, 1), bool)
        for position, length in (
            (points.key, self.key_lengths),
            (query, self.query_lengths),
        ):
            if length is not None:
                inside = position < _per_row(length, points)
                visible &= inside & (position >= 0)
        return points.spread(visible)

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        blocks = block_maps.FULL
        for first, last, lengths in (
            (spans.key_first, spans.key_last, self.key_lengths),
            (spans.query_first, spans.query_last, self.query_lengths),
        ):
            if lengths is not None:
                length = lengths.reshape(-1, 1, 1, 1)
                blocks &= block_maps.Blocks(
                    some=(first < length) & (last >= 0) & (length > 0),
                    every=(last < length) & (first >= 0),
                )
        return blocks

    def _valid(self, length: int, *, for_queries: bool) -> algebra.Valid:
        lengths = self.query_lengths if for_queries else self.key_lengths
        if lengths is None:
            return None
        position = jnp.arange(length, dtype=jnp.int32)[None]
        if for_queries and self.offset is not None:
            position = position + self.offset
        return (position >= 0) & (position < jnp.reshape(lengths, (-1, 1)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(Leaf):
    """A boolean array, indexed by absolute positions: array[p, j]."""

    array: Bool[Array, "..."]

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        shape = (1,) * (4 - self.array.ndim) + self.array.shape
        T, S = points.query.shape[2], points.key.shape[3]
        visible = points.heads(points.rows(self.array.reshape(shape)))
        if points.in_order and (
            shape[3] not in (1, S) or (self.offset is None and shape[2] not in (1, T))
        ):
            raise ValueError(
                "mask must broadcast from the right against [B N T S] with "
                f"T = {T} and S = {S}, got {list(self.array.shape)}"
            )
        # No gather is needed where the array already has the order of the points.
        if shape[2] > 1 and not (points.in_order and self.offset is None):
            visible, inside = _lookup(visible, query, axis=2)
            visible &= inside
        if shape[3] > 1 and not points.in_order:
            visible, inside = _lookup(visible, points.key, axis=3)
            visible &= inside
        return visible

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        shape = (1,) * (4 - self.array.ndim) + self.array.shape
        T, S = spans.lengths
        aligned = shape[2] == 1 or (shape[2] == T and self.offset is None)
        if not (aligned and shape[3] in (1, S)):
            return block_maps.PARTIAL
        some = every = self.array.reshape(shape)
        for axis, block in zip((2, 3), spans.sizes, strict=True):
            if shape[axis] != 1:
                some = block_maps.reduce(jnp.any, some, block, axis=axis, fill=False)
                every = block_maps.reduce(jnp.all, every, block, axis=axis, fill=True)
        return block_maps.Blocks(some, every)

    def _valid(self, length: int, *, for_queries: bool) -> algebra.Valid:
        shape = (1,) * (4 - self.array.ndim) + self.array.shape
        if for_queries:
            known = self.offset is None and shape[1:] == (1, length, 1)
        else:
            known = shape[1:] == (1, 1, length)
        return self.array.reshape(shape[0], length) if known else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Where(Leaf):
    """Any function of the positions, the batch row and the head."""

    predicate: algebra.Predicate = algebra.static()

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        zero = jnp.zeros(1, jnp.int32)
        batch = zero if points.batch is None else points.batch
        head = zero if points.head is None else points.head
        visible = self.predicate(
            query,
            points.key,
            batch=batch[:, None, None, None],
            head=head[None, :, None, None],
        )
        visible = algebra.boolean(
            visible, "the result of a mask's predicate must be boolean"
        )
        return points.spread(visible.reshape((1,) * (4 - visible.ndim) + visible.shape))

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        del spans
        return block_maps.PARTIAL


def _per_row(
    lengths: algebra.Lengths, points: algebra.Points
) -> Int[Array, "#B 1 1 1"]:
    return points.rows(jnp.asarray(lengths).reshape(-1, 1, 1, 1))


def _lookup(data: Array, positions: Array, *, axis: int) -> tuple[Array, Array]:
    """Entries of the data at the positions, and which positions are inside the data.

    Entries at positions outside the data are arbitrary.
    """
    inside = (positions >= 0) & (positions < data.shape[axis])
    return jnp.take_along_axis(data, positions, axis=axis, mode="fill"), inside


def _extremes(
    ids: Integer[Array, "#B 1 #T #S"],
    positions: Int[block_maps.Known, "1 1 I J"],
    block: int,
    *,
    axis: int,
) -> tuple[tuple[Array, Array], block_maps.Blocks]:
    """The least and the largest id of each block, and which blocks have any id."""
    ids, inside = _lookup(ids, jnp.asarray(positions), axis=axis)
    limits = jnp.iinfo(ids.dtype)

    def reduced(f: Callable[..., Array], data: Array, fill: Any) -> Array:
        return block_maps.reduce(f, data, block, axis=axis, fill=fill)

    least = reduced(jnp.min, jnp.where(inside, ids, limits.max), limits.max)
    most = reduced(jnp.max, jnp.where(inside, ids, limits.min), limits.min)
    some, every = reduced(jnp.any, inside, False), reduced(jnp.all, inside, True)
    return (least, most), block_maps.Blocks(some, every)
