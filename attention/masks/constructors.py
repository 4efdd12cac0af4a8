"""Masks as values: who may attend to whom, decided by position, composed with & | ~.

A mask is a predicate on absolute positions p of the query and j of the key; query
number i stands at p = i + offset, key number j at j:

    causal        j ≤ p
    window        p - left ≤ j ≤ p + right
    prefix        j ≤ p  ∨  j < length
    chunked       ⌊p / size⌋ = ⌊j / size⌋
    segments      query_ids[p] = key_ids[j]
    lengths       j < key_length  ∧  p < query_length
    dense         array[p, j]
    where         any function of p, j, the batch row and the head
    longformer    window  ∨  p ∈ globals  ∨  j ∈ globals
    bigbird       the same of blocks of positions  ∨  some blocks at random

True = may attend. Nothing of the size T x S exists until `materialize` is called;
`blocks` tells, by intervals, which blocks of T x S are empty and which are full. A mask
is a frozen pytree: arrays and offsets are leaves and may be traced; sizes and functions
are static, so that an equal mask never compiles anew. An offset of the Python number 0
is no leaf at all, every other one is an int32.

Prefix and segments: Raffel et al. 2019, arXiv:1910.10683. Windows: Child et al. 2019,
arXiv:1904.10509. Longformer: Beltagy et al. 2020, arXiv:2004.05150. BigBird: Zaheer et
al. 2020, arXiv:2007.14062.
"""

import operator
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Integer

from attention.masks import algebra, block_maps, leaves, sparse

Mask = algebra.Mask
Blocks = block_maps.Blocks
Predicate = algebra.Predicate


def causal(offset: Integer[ArrayLike, ""] = 0) -> Mask:
    """Keys at or before the query: j ≤ i + offset; offset 0 aligns top-left.

    Args:
      offset: position of query 0 among the keys; S - T aligns bottom-right.
    """
    return leaves.Causal(offset=_offset(offset))


def window(
    left: int | None, right: int | None, offset: Integer[ArrayLike, ""] = 0
) -> Mask:
    """Keys at most `left` before and `right` after the query, both inclusive.

    Args:
      left: largest distance into the past, in positions; None: no bound.
      right: largest distance into the future; None: no bound.
      offset: position of query 0 among the keys.

    Raises:
      ValueError: if a distance is negative.
    """
    left = None if left is None else _at_least(0, left, name="left")
    right = None if right is None else _at_least(0, right, name="right")
    return leaves.Window(left, right, offset=_offset(offset))


def sliding_window(size: int, offset: Integer[ArrayLike, ""] = 0) -> Mask:
    """The last `size` keys up to the query, counting its own position: causal.

    Raises:
      ValueError: if size < 1.
    """
    return window(_at_least(1, size, name="size") - 1, 0, offset)


def prefix(
    length: Integer[ArrayLike, ""] | Integer[ArrayLike, "B"],
    offset: Integer[ArrayLike, ""] = 0,
) -> Mask:
    """Prefix-LM: everybody sees the first `length` keys; behind them causal.

    Args:
      length: number of keys in the prefix, one for all or one per row.
      offset: position of query 0 among the keys.

    Raises:
      ValueError: if a static length is negative, or lengths have more than 1 dimension.
    """
    return leaves.Prefix(_row_lengths(length, name="length"), offset=_offset(offset))


def chunked(size: int, offset: Integer[ArrayLike, ""] = 0) -> Mask:
    """Queries and keys of the same chunk of `size` positions, in both directions.

    Raises:
      ValueError: if size < 1.
    """
    return leaves.Chunked(_at_least(1, size, name="size"), offset=_offset(offset))


def segments(
    query_ids: Integer[ArrayLike, "T"] | Integer[ArrayLike, "B T"],
    key_ids: Integer[ArrayLike, "S"] | Integer[ArrayLike, "B S"] | None = None,
    offset: Integer[ArrayLike, ""] = 0,
) -> Mask:
    """Queries and keys of equal ids: documents packed into one row.

    Args:
      query_ids: id at each absolute position of a query.
      key_ids: id at each position of a key; None: `query_ids`.
      offset: position of query 0 among the keys.

    Raises:
      TypeError: if ids are not integers.
      ValueError: if ids are neither [T] nor [B T].
    """
    query_ids = algebra.integers(query_ids, ranks=(1, 2), name="query_ids")
    if key_ids is not None:
        key_ids = algebra.integers(key_ids, ranks=(1, 2), name="key_ids")
    return leaves.Segments(query_ids, key_ids, offset=_offset(offset))


def lengths(
    key_lengths: Integer[ArrayLike, ""] | Integer[ArrayLike, "B"] | None,
    query_lengths: Integer[ArrayLike, ""] | Integer[ArrayLike, "B"] | None = None,
    offset: Integer[ArrayLike, ""] = 0,
) -> Mask:
    """The first keys and queries of each row; the rest is padding.

    Args:
      key_lengths: number of keys, one for all or one per row; None: all.
      query_lengths: the same for queries, counted in absolute positions.
      offset: position of query 0 among the keys.

    Raises:
      TypeError: if lengths are not integers.
      ValueError: if a static length is negative, or lengths have more than 1 dimension.
    """
    if key_lengths is not None:
        key_lengths = _row_lengths(key_lengths, name="key_lengths")
    if query_lengths is not None:
        query_lengths = _row_lengths(query_lengths, name="query_lengths")
    return leaves.Lengths(key_lengths, query_lengths, offset=_offset(offset))


def dense(array: Bool[ArrayLike, "..."], offset: Integer[ArrayLike, ""] = 0) -> Mask:
    """A given boolean array, indexed by absolute positions; nothing outside of it.

    Args:
      array: True = may attend; broadcasts from the right against [B N T S]. A
        dimension of 1 holds for all.
      offset: row of the array for query 0.

    Raises:
      TypeError: if the array is not boolean.
      ValueError: if it has more than 4 dimensions.
    """
    array = algebra.boolean(array, "mask must be boolean; use bias= for additive")
    if array.ndim > 4:
        raise ValueError(f"mask must be at most [B N T S], got {list(array.shape)}")
    return leaves.Dense(array, offset=_offset(offset))


def longformer(
    window: int,
    global_positions: Iterable[int],
    *,
    causal: bool = False,
    offset: Integer[ArrayLike, ""] = 0,
) -> Mask:
    """A window around each query, and positions that see all and are seen by all.

        |p - j| ≤ window  ∨  p ∈ global_positions  ∨  j ∈ global_positions

    Args:
      window: largest distance to each side, in positions.
      global_positions: of queries and keys alike; Python ints.
      causal: and j ≤ p besides.
      offset: position of query 0 among the keys.

    Raises:
      ValueError: if the window or a position is negative.
    """
    window = _at_least(0, window, name="window")
    positions = {
        _at_least(0, position, name="global_positions") for position in global_positions
    }
    shift = _offset(offset)
    near = leaves.Window(window, window, offset=shift)
    mask = near | sparse.Globals(tuple(sorted(positions)), offset=shift)
    return mask & leaves.Causal(offset=shift) if causal else mask


def bigbird(
    block: int,
    window: int,
    globals: int,
    random: int,
    seed: int,
    *,
    causal: bool = False,
    length: int | None = None,
    offset: Integer[ArrayLike, ""] = 0,
) -> Mask:
    """Blocks of a window, global blocks, and for each query block others at random.

    Which blocks are random is a pure function of the seed, the query block and the
    number of blocks there are to choose from: those neither global nor in the window,
    and if causal only those before it. Otherwise it depends on the number of key
    blocks in all, ⌈length / block⌉.

    Args:
      block: positions in a block.
      window: key blocks around the query's own, which counts; odd. If causal the last
        ones up to the query's own, any number.
      globals: so many blocks at the start see all and are seen by all.
      random: further key blocks of each query block; all if fewer are left.
      seed: of the random choice, less than 2³².
      causal: and j ≤ p besides, the random blocks all from the past.
      length: number of keys to choose from; None: as many as `materialize` and
        `blocks` are asked for, or `at` is told. The causal choice needs none.
      offset: position of query 0 among the keys.

    Raises:
      ValueError: if a number is out of range or the window is even, not being causal;
        from `at` if the choice needs a length and there is none.
    """
    width = _at_least(1, window, name="window")
    if not causal and window % 2 == 0:
        raise ValueError(f"window must be odd unless causal, got {window}")
    if not 0 <= operator.index(seed) < 2**32:
        raise ValueError(f"seed must be at least 0 and less than 2**32, got {seed}")
    mask = sparse.BigBird(
        block=_at_least(1, block, name="block"),
        window=width,
        globals=_at_least(0, globals, name="globals"),
        random=_at_least(0, random, name="random"),
        seed=operator.index(seed),
        causal=causal,
        length=None if length is None else _at_least(0, length, name="length"),
        offset=_offset(offset),
    )
    return mask & leaves.Causal(offset=mask.offset) if causal else mask


def where(predicate: Predicate, offset: Integer[ArrayLike, ""] = 0) -> Mask:
    """Any relation of positions, batch row and head.

    Args:
      predicate: `predicate(q_index, kv_index, *, batch, head) -> bool`, called with
        int32 arrays of 4 dimensions, [B|1 1 T 1], [B|1 1 1 S], [B 1 1 1] and
        [1 N 1 1]; its result broadcasts against [B N T S]. It is static: compiled
        code is reused for the same function object, not for an equal one.
      offset: position of query 0 among the keys.
    """
    return leaves.Where(predicate, offset=_offset(offset))


def _offset(offset: Integer[ArrayLike, ""]) -> algebra.Offset | None:
    if isinstance(offset, int):
        return np.int32(offset) if offset else None
    return algebra.integers(offset, ranks=(0,), name="offset").astype(jnp.int32)


def _row_lengths(lengths: Any, *, name: str) -> algebra.Lengths:
    if isinstance(lengths, int):
        _at_least(0, lengths, name=name)
        return np.int32(lengths)
    return algebra.integers(lengths, ranks=(0, 1), name=name).astype(jnp.int32)


def _at_least(least: int, value: int, *, name: str) -> int:
    """The value, or a distance longer than any sequence that int32 sums allow."""
    value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return min(value, 2**30)
