"""Sparse patterns around global positions: the leaves of `longformer` and `bigbird`.

BigBird decides by blocks of its own. Query block q sees key block k if

    q < g  ∨  k < g  ∨  k ∈ window(q)  ∨  k ∈ random(q)

with window(q) the w blocks around q, or the last w up to q if causal. The A blocks
that are neither among the first g nor in the window are numbered 0 … A - 1 and cut into
r strata, ⌊A·s/r⌋ … ⌊A·(s + 1)/r⌋ - 1. A hash of (seed, q, A, s) takes a block of each:
r different ones, or all if there are no more; at any q alone, without a state.

Numbers are int32 and uint32, and plain operators and methods let NumPy compute what is
known while tracing; jax gives the same bits.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from attention.masks import algebra, block_maps, leaves

Known = block_maps.Known


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Globals(leaves.Leaf):
    """Some positions see all and are seen by all: see `longformer`."""

    positions: tuple[int, ...] = algebra.static()  # each one once

    def _sees(self, query: Array, places: algebra.Places) -> algebra.Visible:
        positions = np.array(self.positions, np.int32)
        return jnp.isin(query, positions) | jnp.isin(places.key, positions)

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        queries = self._within(spans.query_first, spans.query_last)
        keys = self._within(spans.key_first, spans.key_last)
        return block_maps.Blocks(
            some=(queries > 0) | (keys > 0),
            every=(queries > spans.query_last - spans.query_first)
            | (keys > spans.key_last - spans.key_first),
        )

    def _within(self, first: Known, last: Known) -> Int[Known, "1 1 #I #J"]:
        """How many of the positions each span has."""
        positions = np.array(self.positions, np.int32)[None, None, None, None, :]
        inside = (first[..., None] <= positions) & (positions <= last[..., None])
        return inside.sum(-1, dtype=np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BigBird(leaves.Leaf):
    """See `bigbird`; hiding the future within a block is left to `causal`."""

    block: int = algebra.static()
    window: int = algebra.static()
    globals: int = algebra.static()
    random: int = algebra.static()
    seed: int = algebra.static()
    causal: bool = algebra.static()
    length: int | None = algebra.static()

    def _sees(self, query: Array, places: algebra.Places) -> algebra.Visible:
        query, key = query // self.block, places.key // self.block
        return jnp.asarray(self._sees_keys(query, key, key, places.length).some)

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        own = spans.of(self.block)
        # As many blocks of its own as a span may touch, however it lies.
        touched = 1 + -(-(spans.sizes[0] - 1) // self.block)
        rows = [
            self._sees_keys(
                (own.query_first + n).clip(None, own.query_last),
                own.key_first,
                own.key_last,
                spans.lengths[1],
            )
            for n in range(touched)
        ]
        return block_maps.Blocks(
            some=functools.reduce(operator.or_, (row.some for row in rows)),
            every=functools.reduce(operator.and_, (row.every for row in rows)),
        )

    def _sees_keys(
        self,
        query: Int[Known, "#B 1 I 1"],
        first: Int[Known, "#B 1 1 J"],
        last: Int[Known, "#B 1 1 J"],
        length: int | None,
    ) -> block_maps.Blocks:
        """Does a query block see some, or every one, of the key blocks first … last?"""
        begin, end = self._window(query)
        stop = last + 1
        # Globals, window and random blocks share none: their counts add up.
        seen = stop.clip(None, self.globals) - first.clip(None, self.globals)
        # Methods of the queries' numbers, as these may be traced and the keys' not.
        window = end.clip(None, stop) - begin.clip(self.globals).clip(first)
        seen = seen + window.clip(0)
        for pick, exists in self._picks(query, length):
            seen += (exists & (first <= pick) & (pick <= last)).astype(np.int32)
        is_global = (query >= 0) & (query < self.globals)
        return block_maps.Blocks(
            some=is_global | (seen > 0), every=is_global | (seen >= stop - first)
        )

    def _window(self, query: Int[Known, "#B 1 I 1"]) -> tuple[Known, Known]:
        """The first block of the window, and the first one behind it."""
        if self.causal:
            return query - (self.window - 1), query + 1
        return query - self.window // 2, query + (self.window // 2 + 1)

    def _picks(
        self, query: Int[Known, "#B 1 I 1"], length: int | None
    ) -> Iterator[tuple[Known, Known]]:
        """The random blocks one after another, and whether there is one to take."""
        if not self.random:
            return
        begin, end = (edge.clip(self.globals) for edge in self._window(query))
        total = end if self.causal else self._total(length)
        before = (begin.clip(None, total) - self.globals).clip(0)
        admissible = before + (total - end).clip(0)
        state = _mixed(np.full((1, 1, 1, 1), self.seed, np.uint32))
        state = _mixed(state + query.astype(np.uint32))
        state = _mixed(state + admissible.astype(np.uint32))
        for stratum in range(self.random):
            low = self._stratum(admissible, stratum)
            size = self._stratum(admissible, stratum + 1) - low
            number = _mixed(state + np.uint32(stratum))
            choice = low + (number % size.clip(1).astype(np.uint32)).astype(np.int32)
            # Counting on behind the window skips it.
            skipped = (choice >= before).astype(np.int32) * (
                end - self.globals - before
            )
            yield self.globals + choice + skipped, size > 0

    def _stratum(self, admissible: Known, stratum: int) -> Known:
        """⌊A·s/r⌋, without a product that leaves int32."""
        whole, rest = admissible // self.random, admissible % self.random
        return whole * stratum + rest * stratum // self.random

    def _total(self, length: int | None) -> int:
        length = length if self.length is None else self.length
        if length is None:
            raise ValueError(
                "bigbird chooses among all key blocks: give length= to it or to at"
            )
        return -(-length // self.block)


def _mixed(x: UInt32[Known, "..."]) -> UInt32[Known, "..."]:
    """A permutation of 32 bits that spreads each over all (Wellons's lowbias32)."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
