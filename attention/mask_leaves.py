"""The masks that are no composition, each decided by the positions of query and key.

Their meaning is told by the functions of `attention.masks` that make them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from attention import mask_algebra


@dataclasses.dataclass(frozen=True)
class _Leaf(mask_algebra.Mask):
    """A mask that is no composition: the one place where offsets are handled."""

    offset: Int[Array, ""] | None = dataclasses.field(kw_only=True)

    def _visible(self, places: mask_algebra.Places) -> mask_algebra.Visible:
        query = places.query
        if self.offset is not None:
            query = query + self.offset
        return self._sees(query, places)

    def _sees(
        self, query: Int[Array, "B|1 1 T 1"], places: mask_algebra.Places
    ) -> mask_algebra.Visible:
        """Evaluates at the absolute positions of the queries."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Causal(_Leaf):
    """See `causal`."""

    def _sees(self, query: Array, places: mask_algebra.Places) -> mask_algebra.Visible:
        return places.key <= query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window(_Leaf):
    """See `window`."""

    left: int | None = dataclasses.field(metadata={"static": True})
    right: int | None = dataclasses.field(metadata={"static": True})

    def _sees(self, query: Array, places: mask_algebra.Places) -> mask_algebra.Visible:
        visible = jnp.ones((1, 1, 1, 1), bool)
        if self.left is not None:
            visible &= places.key >= query - self.left
        if self.right is not None:
            visible &= places.key <= query + self.right
        return places.spread(visible)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix(_Leaf):
    """See `prefix`."""

    length: Int[Array, ""] | Int[Array, "B"]

    def _sees(self, query: Array, places: mask_algebra.Places) -> mask_algebra.Visible:
        return (places.key <= query) | (places.key < _per_row(self.length, places))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunked(_Leaf):
    """See `chunked`."""

    size: int = dataclasses.field(metadata={"static": True})

    def _sees(self, query: Array, places: mask_algebra.Places) -> mask_algebra.Visible:
        return query // self.size == places.key // self.size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments(_Leaf):
    """See `segments`."""

    query_ids: Int[Array, "T"] | Int[Array, "B T"]
    key_ids: Int[Array, "S"] | Int[Array, "B S"] | None

    def _sees(self, query: Array, places: mask_algebra.Places) -> mask_algebra.Visible:
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        query_ids = places.rows(jnp.atleast_2d(self.query_ids))[:, None, :, None]
        key_ids = places.rows(jnp.atleast_2d(key_ids))[:, None, None, :]
        query_ids, has_query = _lookup(query_ids, query, axis=2)
        key_ids, has_key = _lookup(key_ids, places.key, axis=3)
        return has_query & has_key & (query_ids == key_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lengths(_Leaf):
    """See `lengths`."""

    key_lengths: Int[Array, ""] | Int[Array, "B"] | None
    query_lengths: Int[Array, ""] | Int[Array, "B"] | None

    def _sees(self, query: Array, places: mask_algebra.Places) -> mask_algebra.Visible:
        visible = jnp.ones((1, 1, 1, 1), bool)
        for position, length in (
            (places.key, self.key_lengths),
            (query, self.query_lengths),
        ):
            if length is not None:
                inside = position < _per_row(length, places)
                visible &= inside & (position >= 0)
        return places.spread(visible)

    def _valid(self, length: int, *, of_queries: bool) -> mask_algebra.Valid:
        lengths = self.query_lengths if of_queries else self.key_lengths
        if lengths is None:
            return None
        position = jnp.arange(length, dtype=jnp.int32)[None]
        if of_queries and self.offset is not None:
            position = position + self.offset
        return (position >= 0) & (position < jnp.reshape(lengths, (-1, 1)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(_Leaf):
    """See `dense`."""

    array: Bool[Array, "..."]

    def _sees(self, query: Array, places: mask_algebra.Places) -> mask_algebra.Visible:
        shape = (1,) * (4 - self.array.ndim) + self.array.shape
        T, S = places.query.shape[2], places.key.shape[3]
        visible = places.heads(places.rows(self.array.reshape(shape)))
        if places.in_order and (
            shape[3] not in (1, S) or (self.offset is None and shape[2] not in (1, T))
        ):
            raise ValueError(
                "mask must broadcast from the right against [B N T S] with "
                f"T = {T} and S = {S}, got {list(self.array.shape)}"
            )
        # The gather is left out wherever the array stands in the order asked for.
        if shape[2] > 1 and not (places.in_order and self.offset is None):
            visible, inside = _lookup(visible, query, axis=2)
            visible &= inside
        if shape[3] > 1 and not places.in_order:
            visible, inside = _lookup(visible, places.key, axis=3)
            visible &= inside
        return visible


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Where(_Leaf):
    """See `where`."""

    predicate: mask_algebra.Predicate = dataclasses.field(metadata={"static": True})

    def _sees(self, query: Array, places: mask_algebra.Places) -> mask_algebra.Visible:
        zero = jnp.zeros(1, jnp.int32)
        batch = zero if places.batch is None else places.batch
        head = zero if places.head is None else places.head
        visible = self.predicate(
            query,
            places.key,
            batch=batch[:, None, None, None],
            head=head[None, :, None, None],
        )
        visible = mask_algebra.boolean(
            visible, "the result of a mask's predicate must be boolean"
        )
        return places.spread(visible.reshape((1,) * (4 - visible.ndim) + visible.shape))


def _per_row(lengths: Array, places: mask_algebra.Places) -> Int[Array, "B|1 1 1 1"]:
    return places.rows(jnp.reshape(lengths, (-1, 1, 1, 1)))


def _lookup(data: Array, positions: Array, *, axis: int) -> tuple[Array, Array]:
    """Entries of the data at the positions, and which positions lie inside of it."""
    inside = (positions >= 0) & (positions < data.shape[axis])
    index = jnp.where(inside, positions, 0)
    return jnp.take_along_axis(data, index, axis=axis, mode="fill"), inside
