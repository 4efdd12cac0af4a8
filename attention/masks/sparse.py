"""Sparse patterns with global positions: the leaves of `longformer` and `bigbird`.

BigBird is defined on blocks of positions. Query block q sees key block k if

    q < g  ∨  k < g  ∨  k ∈ window(q)  ∨  k ∈ random(q)

where window(q) are the w blocks around q, or in a causal mask the last w blocks up to
q. The A blocks that are neither global nor in the window (in a causal mask, those
before the window) are numbered 0 … A - 1 and divided into r strata, of which stratum s
is ⌊A·s/r⌋ … ⌊A·(s + 1)/r⌋ - 1. A hash of (seed, q, A, s) picks one block from each
stratum: r different blocks, or all of them if A ≤ r. The choice for one q depends on no
other q and on no state.

All numbers are int32 or uint32. The code uses only operators and methods that NumPy
and jax arrays share, so that NumPy computes what is known while tracing, with the same
bits as jax.
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
    """Global positions see all and are seen by all: p ∈ positions ∨ j ∈ positions.

    Attributes:
      positions: absolute positions, without duplicates.
    """

    positions: tuple[int, ...] = algebra.static()

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        positions = np.array(self.positions, np.int32)
        return jnp.isin(query, positions) | jnp.isin(points.key, positions)

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        queries = self._within(spans.query_first, spans.query_last)
        keys = self._within(spans.key_first, spans.key_last)
        return block_maps.Blocks(
            some=(queries > 0) | (keys > 0),
            every=(queries > spans.query_last - spans.query_first)
            | (keys > spans.key_last - spans.key_first),
        )

    def _within(self, first: Known, last: Known) -> Int[Known, "1 1 #I #J"]:
        """How many of the global positions each block contains."""
        positions = np.array(self.positions, np.int32)[None, None, None, None, :]
        inside = (first[..., None] <= positions) & (positions <= last[..., None])
        return inside.sum(-1, dtype=np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BigBird(leaves.Leaf):
    """The pattern of `bigbird`, without the condition j ≤ p of its causal form.

    Attributes:
      block: number of positions in a block.
      window: number w of key blocks in the window of a query block.
      globals: number g of global blocks at the start.
      random: number r of random key blocks of each query block.
      seed: seed of the random choice.
      causal: whether windows end with the query block and random blocks precede them.
      length: number of keys of the whole sequence; None: asked of the call.
    """

    block: int = algebra.static()
    window: int = algebra.static()
    globals: int = algebra.static()
    random: int = algebra.static()
    seed: int = algebra.static()
    causal: bool = algebra.static()
    length: int | None = algebra.static()

    def _sees(self, query: Array, points: algebra.Points) -> algebra.Visible:
        query, key = query // self.block, points.key // self.block
        return jnp.asarray(self._sees_keys(query, key, key, points.length).some)

    def _sees_blocks(self, spans: block_maps.Spans) -> block_maps.Blocks:
        blocks = spans.of(self.block)
        # The largest number of BigBird's blocks that a span of queries can overlap.
        overlap = 1 + -(-(spans.sizes[0] - 1) // self.block)
        rows = [
            self._sees_keys(
                (blocks.query_first + n).clip(None, blocks.query_last),
                blocks.key_first,
                blocks.key_last,
                spans.lengths[1],
            )
            for n in range(overlap)
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
        """Whether a query block sees some, or every one, of the blocks first … last."""
        begin, end = self._window(query)
        stop = last + 1
        # Global, window and random blocks are disjoint, so their counts add up.
        seen = stop.clip(None, self.globals) - first.clip(None, self.globals)
        # `begin` and `end` call the methods: they may be traced, `first` and `stop` are
        # not.
        window = end.clip(None, stop) - begin.clip(self.globals).clip(first)
        seen = seen + window.clip(0)
        for pick, exists in self._picks(query, length):
            seen += (exists & (first <= pick) & (pick <= last)).astype(np.int32)
        is_global = (query >= 0) & (query < self.globals)
        return block_maps.Blocks(
            some=is_global | (seen > 0), every=is_global | (seen >= stop - first)
        )

    def _window(self, query: Int[Known, "#B 1 I 1"]) -> tuple[Known, Known]:
        """The first block of the window, and the first block after it."""
        if self.causal:
            return query - (self.window - 1), query + 1
        return query - self.window // 2, query + (self.window // 2 + 1)

    def _picks(
        self, query: Int[Known, "#B 1 I 1"], length: int | None
    ) -> Iterator[tuple[Known, Known]]:
        """Yields each random block, and whether its stratum has a block to pick."""
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
            # Candidates after the window are numbered without it: skip the window.
            skipped = (choice >= before).astype(np.int32) * (
                end - self.globals - before
            )
            yield self.globals + choice + skipped, size > 0

    def _stratum(self, admissible: Known, stratum: int) -> Known:
        """⌊A·s/r⌋, computed without a product that could overflow int32."""
        whole, rest = admissible // self.random, admissible % self.random
        return whole * stratum + rest * stratum // self.random

    def _total(self, length: int | None) -> int:
        length = length if self.length is None else self.length
        if length is None:
            raise ValueError(
                "bigbird chooses among all key blocks: pass length= to bigbird or to at"
            )
        return -(-length // self.block)


def _mixed(x: UInt32[Known, "..."]) -> UInt32[Known, "..."]:
    """Hashes 32 bits by a permutation, Wellons's lowbias32."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
