"""Masks as values: which query may attend to which key, composed with & | ~.

A mask is a predicate on the absolute position p of a query and j of a key. Query number
i has the position p = i + offset, key number j the position j. Visible are:

    causal        j ≤ p
    window        p - left ≤ j ≤ p + right
    prefix        j ≤ p  ∨  j < length
    chunked       ⌊p / size⌋ = ⌊j / size⌋
    segments      query_ids[p] = key_ids[j]
    lengths       j < key_length  ∧  p < query_length
    dense         array[p, j]
    where         any function of p, j, the batch row and the head
    longformer    window  ∨  p ∈ globals  ∨  j ∈ globals
    bigbird       longformer on blocks of positions  ∨  some random blocks

True = may attend. No array of size T x S is formed until `materialize` is called;
`blocks` computes, by intervals, which blocks of T x S are empty and which are full. A
mask is a frozen pytree: arrays and offsets are leaves and may be traced; sizes and
functions are static, so that an equal mask does not compile again. Offsets are int32
leaves, except for the Python number 0, which is stored as None. Every function of this
module returns a mask.

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
    """Keys at or before the query: j ≤ i + offset.

    Args:
      offset: absolute position of query 0; 0 aligns top-left, S - T bottom-right.

    Raises:
      TypeError: if the offset is not an integer.
    """
    return leaves.Causal(offset=_offset(offset))


def window(
    left: int | None, right: int | None, offset: Integer[ArrayLike, ""] = 0
) -> Mask:
    """Keys within inclusive distances: p - left ≤ j ≤ p + right.

    Args:
      left: largest distance into the past, in positions; None: no bound.
      right: largest distance into the future, in positions; None: no bound.
      offset: absolute position of query 0.

    Raises:
      TypeError: if a distance or the offset is not an integer.
      ValueError: if a distance is negative.

    Reference: Child et al., 2019, arXiv:1904.10509.
    """
    left = None if left is None else _at_least(0, left, name="left")
    right = None if right is None else _at_least(0, right, name="right")
    return leaves.Window(left, right, offset=_offset(offset))


def sliding_window(size: int, offset: Integer[ArrayLike, ""] = 0) -> Mask:
    """Causal window of the last `size` keys: p - size < j ≤ p.

    Args:
      size: number of visible keys, including the one at the query's position.
      offset: absolute position of query 0.

    Raises:
      TypeError: if the size or the offset is not an integer.
      ValueError: if size < 1.

    Reference: Child et al., 2019, arXiv:1904.10509.
    """
    return window(_at_least(1, size, name="size") - 1, 0, offset)


def prefix(
    length: Integer[ArrayLike, ""] | Integer[ArrayLike, "B"],
    offset: Integer[ArrayLike, ""] = 0,
) -> Mask:
    """Prefix-LM: all see the prefix, the rest is causal: j ≤ p ∨ j < length.

    Args:
      length: number of keys in the prefix, one number for all rows or one per row.
      offset: absolute position of query 0.

    Raises:
      TypeError: if the length or the offset is not an integer.
      ValueError: if a static length is negative, or lengths have more than 1 dimension.

    Reference: Raffel et al., 2019, arXiv:1910.10683, section 3.2.1.
    """
    return leaves.Prefix(_row_lengths(length, name="length"), offset=_offset(offset))


def chunked(size: int, offset: Integer[ArrayLike, ""] = 0) -> Mask:
    """Queries and keys of the same chunk, in both directions: ⌊p / size⌋ = ⌊j / size⌋.

    Args:
      size: number of positions in a chunk.
      offset: absolute position of query 0.

    Raises:
      TypeError: if the size or the offset is not an integer.
      ValueError: if size < 1.
    """
    return leaves.Chunked(_at_least(1, size, name="size"), offset=_offset(offset))


def segments(
    query_ids: Integer[ArrayLike, "T"] | Integer[ArrayLike, "B T"],
    key_ids: Integer[ArrayLike, "S"] | Integer[ArrayLike, "B S"] | None = None,
    offset: Integer[ArrayLike, ""] = 0,
) -> Mask:
    """Queries and keys of the same document: query_ids[p] = key_ids[j].

    For several documents packed into one row.

    Args:
      query_ids: id of the document at every absolute query position; a query at a
        position outside the array sees nothing.
      key_ids: id of the document at every key position; None: `query_ids`. A key at a
        position outside the array is hidden.
      offset: absolute position of query 0.

    Raises:
      TypeError: if ids or the offset are not integers.
      ValueError: if ids are neither [T] nor [B T].

    Reference: Raffel et al., 2019, arXiv:1910.10683.
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
    """Rows with padding at the end: j < key_length ∧ p < query_length.

    Args:
      key_lengths: number of real keys, one number for all rows or one per row; None:
        all keys are real.
      query_lengths: the first absolute query position that is padding, one number for
        all rows or one per row; None: all queries are real.
      offset: absolute position of query 0.

    Raises:
      TypeError: if lengths or the offset are not integers.
      ValueError: if a static length is negative, or lengths have more than 1 dimension.
    """
    if key_lengths is not None:
        key_lengths = _row_lengths(key_lengths, name="key_lengths")
    if query_lengths is not None:
        query_lengths = _row_lengths(query_lengths, name="query_lengths")
    return leaves.Lengths(key_lengths, query_lengths, offset=_offset(offset))


def dense(array: Bool[ArrayLike, "..."], offset: Integer[ArrayLike, ""] = 0) -> Mask:
    """A boolean array as a mask: array[p, j]; positions outside of it see nothing.

    Args:
      array: True = may attend; broadcasts from the right against [B N T S].
      offset: absolute position of query 0, which is its row in the array.

    Raises:
      TypeError: if the array is not boolean, or the offset not an integer.
      ValueError: if the array has more than 4 dimensions.
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
      global_positions: absolute positions of the global tokens, as Python ints; they
        apply to queries and to keys.
      causal: additionally require j ≤ p.
      offset: absolute position of query 0.

    Raises:
      TypeError: if the window, a position or the offset is not an integer.
      ValueError: if the window or a position is negative.

    Reference: Beltagy et al., 2020, arXiv:2004.05150, section 3.1.
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
    """A window of blocks, global blocks, and random key blocks for each query block.

    Query block q sees key block k if

        q < globals  ∨  k < globals  ∨  k ∈ window(q)  ∨  k ∈ random(q)

    The random blocks are chosen among those that are neither global nor in the window,
    in a causal mask only among those before the window. The choice is a pure function
    of the seed, the query block and the number of candidates, which without causality
    depends on the number of all key blocks, ⌈length / block⌉.

    Args:
      block: number of positions in a block.
      window: number of key blocks in the window of a query block. It is odd and
        centred on the query block; in a causal mask it is any number and ends with the
        query block.
      globals: number of global blocks at the start, which see all and are seen by all.
      random: number of random key blocks of each query block; all candidates are taken
        if there are fewer.
      seed: seed of the random choice, less than 2³².
      causal: additionally require j ≤ p.
      length: number of keys S of the whole sequence, for the choice without causality;
        None: the S of `materialize` or `blocks`, or the length that is passed to `at`.
      offset: absolute position of query 0.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if a number is out of range, or the window is even without causality.
        `at` raises it if the choice needs a length and none was passed.

    Reference: Zaheer et al., 2020, arXiv:2007.14062, section 2.
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
    """Any function of the positions, the batch row and the head.

    Args:
      predicate: `predicate(q_index, kv_index, *, batch, head) -> bool`, called with
        int32 arrays of 4 dimensions, [B|1 1 T 1], [B|1 1 1 S], [B 1 1 1] and
        [1 N 1 1]; its result broadcasts against [B N T S]. The function is static:
        compiled code is reused for the same function object, not for an equal one.
      offset: absolute position of query 0.

    Returns:
      The mask, whose evaluation raises TypeError if the predicate's result is not
      boolean.

    Raises:
      TypeError: if the offset is not an integer.
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
    """Checks an integer, and limits it to 2³⁰ so that sums of positions fit int32."""
    value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return min(value, 2**30)
