"""Ready score modifiers: each changes a score by its head, query and key.

    ALiBi             s[i, j] - slopeₙ · |i - j|
    relative bias     s[i, j] + table[bucket(j - i), n]      (T5)
    Kerple            s[i, j] - scaleₙ · log(1 + rateₙ · |i - j|)
    soft cap          cap · tanh(s[i, j] / cap)
    documents         s[i, j] if idᵢ = idⱼ, else -∞

for head n, query i and key j. Each function here returns
`score_mod(score, q_index, kv_index, *, batch, head) -> score` as a
`jax.tree_util.Partial`: a pytree of the arrays that it was made of, so that it passes
through `jax.jit` as an argument, and gradients reach slopes and tables. Implementations
evaluate it where the scores are, so that no bias of size T x S is formed.

Press et al. 2021, arXiv:2108.12409 (ALiBi); Raffel et al. 2019, arXiv:1910.10683 (T5);
Chi et al. 2022, arXiv:2205.09921 (Kerple); Gemma 2, 2024, arXiv:2408.00118 (soft cap).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

ScoreMod = jax.tree_util.Partial
# Absolute positions of queries or keys; None: their indices.
Positions = Int[ArrayLike, "..."] | None
Index = Int[ArrayLike, "..."]
Score = Float[Array, "..."]


def alibi_slopes(num_heads: int) -> Float[np.ndarray, "N"]:
    """The slope of each head: 2^(-8/n), 2^(-16/n), ... for a power of two n.

    For other numbers those of the next lower power n, then every other one of 2n's,
    as in the authors' code.

    Args:
      num_heads: N.

    Returns:
      float32, positive.

    Raises:
      ValueError: if `num_heads` is less than 1.

    Reference: Press et al. 2021, arXiv:2108.12409.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    n = 1 << (num_heads.bit_length() - 1)
    lower = 2.0 ** (-8.0 / n * np.arange(1, n + 1))
    between = 2.0 ** (-4.0 / n * np.arange(1, 2 * n, 2))
    return np.concatenate([lower, between])[:num_heads].astype(np.float32)


def alibi(
    slopes: Float[ArrayLike, "N"],
    query_positions: Positions = None,
    key_positions: Positions = None,
) -> ScoreMod:
    """Attention with linear biases: s[i, j] - slopeₙ · |position i - position j|.

    The bias is never positive and the same to both sides; a causal mask shows only one
    of them.

    Args:
      slopes: [N], one for each query head; `alibi_slopes` has those of the paper.
      query_positions: [T] or [B T], absolute positions of the queries; None: query i
        is at position i. A decoding step has one query and must say where it is.
      key_positions: [S] or [B S], absolute positions of the keys; None: key j is at
        position j.

    Returns:
      A score modifier.

    Reference: Press et al. 2021, arXiv:2108.12409.
    """
    return ScoreMod(_alibi, (jnp.asarray(slopes),), query_positions, key_positions)


@jax.named_scope("relative_buckets")
def relative_buckets(
    relative_position: Int[ArrayLike, "..."],
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool,
) -> Int[Array, "..."]:
    """Numbers the buckets of T5's relative attention bias.

    With n buckets for distances d: d < n/2 has its own; beyond it
    n/2 + ⌊n/2 · log(d / (n/2)) / log(max_distance / (n/2))⌋, at most n - 1.

    Args:
      relative_position: position of the key minus position of the query.
      num_buckets: in all.
      max_distance: distances from here on share the last bucket.
      bidirectional: True: n = num_buckets / 2, and keys after the query use the
        upper half. False: n = num_buckets, and keys after the query count as
        distance 0.

    Returns:
      int32 in [0, num_buckets).

    Raises:
      TypeError: if positions are not integers.
      ValueError: if there are too few buckets, an odd number of them for two
        directions, or no distances beyond the exact ones.

    Reference: Raffel et al. 2019, arXiv:1910.10683, section 2.1.
    """
    relative_position = _int32(relative_position, name="relative_position")
    table = _bucket_table(num_buckets, max_distance, bidirectional=bidirectional)
    return _bucket(relative_position, jnp.asarray(table))


def relative_bias(
    table: Float[ArrayLike, "buckets N"],
    *,
    max_distance: int = 128,
    bidirectional: bool,
    query_positions: Positions = None,
    key_positions: Positions = None,
) -> ScoreMod:
    """T5's relative position bias: s[i, j] + table[bucket(j - i), n].

    Args:
      table: [buckets N], learned: one bias for each bucket of distances and each query
        head.
      max_distance: in positions; distances from here on share the last bucket.
      bidirectional: True: keys before and after the query have buckets apart. False:
        keys after the query count as distance 0, for causal attention.
      query_positions: [T] or [B T], absolute positions of the queries; None: query i
        is at position i.
      key_positions: [S] or [B S], absolute positions of the keys; None: key j is at
        position j.

    Returns:
      A score modifier.

    Raises:
      ValueError: the number of buckets and `max_distance` do not fit each other.

    Reference: Raffel et al. 2019, arXiv:1910.10683, section 2.1.
    """
    table = jnp.asarray(table)
    lookup = _bucket_table(len(table), max_distance, bidirectional=bidirectional)
    parameters = table, jnp.asarray(lookup)
    return ScoreMod(_relative_bias, parameters, query_positions, key_positions)


def kerple(
    scales: Float[ArrayLike, "N"],
    rates: Float[ArrayLike, "N"],
    query_positions: Positions = None,
    key_positions: Positions = None,
) -> ScoreMod:
    """A bias that falls with the logarithm of the distance d = |i - j|.

        s[i, j] - scaleₙ · log(1 + rateₙ · d)

    Args:
      scales: [N], positive, learned: how much a head forgets.
      rates: [N], positive, learned: from which distance on.
      query_positions: [T] or [B T], absolute positions of the queries; None: query i
        is at position i.
      key_positions: [S] or [B S], absolute positions of the keys; None: key j is at
        position j.

    Returns:
      A score modifier.

    Reference: Chi et al. 2022, arXiv:2205.09921, equation 3 (logarithmic variant).
    """
    parameters = jnp.asarray(scales), jnp.asarray(rates)
    return ScoreMod(_kerple, parameters, query_positions, key_positions)


def soft_cap(cap: Float[ArrayLike, ""]) -> ScoreMod:
    """Keeps scores between -cap and cap: cap · tanh(s / cap).

    The same as `softcap=` of `attention.dot_product_attention`, as a score modifier.

    Args:
      cap: positive.

    Returns:
      A score modifier.

    Reference: Gemma 2, 2024, arXiv:2408.00118, section 2.
    """
    return ScoreMod(_soft_cap, jnp.asarray(cap))


def documents(
    query_ids: Int[ArrayLike, "T"] | Int[ArrayLike, "B T"],
    key_ids: Int[ArrayLike, "S"] | Int[ArrayLike, "B S"] | None = None,
) -> ScoreMod:
    """Hides the keys of other documents: s[i, j] if idᵢ = idⱼ, else -∞.

    `masks.segments` hides the same pairs and also skips the blocks that it leaves
    empty; this is the form for code that composes score modifiers.

    Args:
      query_ids: [T] or [B T], the document of each query.
      key_ids: [S] or [B S], the document of each key; None: `query_ids`.

    Returns:
      A score modifier.
    """
    query_ids = jnp.asarray(query_ids)
    keys = query_ids if key_ids is None else jnp.asarray(key_ids)
    return ScoreMod(_documents, query_ids, keys)


def _bucket_table(
    num_buckets: int, max_distance: int, *, bidirectional: bool
) -> Int[np.ndarray, "M"]:
    """The bucket of each relative position from -max_distance to max_distance."""
    if bidirectional and num_buckets % 2:
        raise ValueError(f"num_buckets must be even, got {num_buckets}")
    n = num_buckets // 2 if bidirectional else num_buckets
    exact = n // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            "num_buckets must leave an exact bucket, and max_distance go beyond them; "
            f"got num_buckets={num_buckets}, max_distance={max_distance}"
        )
    # A table, since float32 logarithms differ between backends just at the borders.
    far = np.log(np.arange(exact, max_distance + 1) / exact)
    steps = np.floor(far / math.log(max_distance / exact) * (n - exact) + 1e-9)
    far_buckets = np.concatenate([np.arange(exact), exact + steps])
    past = np.minimum(far_buckets, n - 1).astype(np.int32)
    future = past[1:] + n if bidirectional else np.zeros(max_distance, np.int32)
    return np.concatenate([past[::-1], future])


def _bucket(
    relative_position: Int[Array, "..."], table: Int[Array, "M"]
) -> Int[Array, "..."]:
    """Looks up relative positions; those beyond the table take its ends."""
    farthest = len(table) // 2
    clipped = jnp.clip(relative_position, -farthest, farthest)
    return jnp.take(table, clipped + farthest, mode="clip")


def _relative(bias: Callable[..., Array]) -> Callable[..., Score]:
    """Adds a bias that depends on the position of the key minus that of the query."""

    def score_mod(
        parameters: tuple[Array, ...],
        query_positions: Positions,
        key_positions: Positions,
        score: Float[ArrayLike, "..."],
        q_index: Index,
        kv_index: Index,
        *,
        batch: Index,
        head: Index,
    ) -> Score:
        score = jnp.asarray(score)
        query = _position(query_positions, q_index, batch)
        key = _position(key_positions, kv_index, batch)
        return score + bias(key - query, head, *parameters, dtype=score.dtype)

    return score_mod


@_relative
def _alibi(relative: Array, head: Index, slopes: Array, *, dtype: DTypeLike) -> Array:
    return -slopes[head].astype(dtype) * jnp.abs(relative).astype(dtype)


@_relative
def _relative_bias(
    relative: Array, head: Index, table: Array, lookup: Array, *, dtype: DTypeLike
) -> Array:
    return table[_bucket(relative, lookup), head].astype(dtype)


@_relative
def _kerple(
    relative: Array, head: Index, scales: Array, rates: Array, *, dtype: DTypeLike
) -> Array:
    distance = jnp.abs(relative).astype(dtype)
    growth = jnp.log1p(rates[head].astype(dtype) * distance)
    return -scales[head].astype(dtype) * growth


def _soft_cap(
    cap: Float[Array, ""],
    score: Float[ArrayLike, "..."],
    q_index: Index,
    kv_index: Index,
    *,
    batch: Index,
    head: Index,
) -> Score:
    del q_index, kv_index, batch, head
    score = jnp.asarray(score)
    cap = cap.astype(score.dtype)
    return cap * jnp.tanh(score / cap)


def _documents(
    query_ids: Int[Array, "T"] | Int[Array, "B T"],
    key_ids: Int[Array, "S"] | Int[Array, "B S"],
    score: Float[ArrayLike, "..."],
    q_index: Index,
    kv_index: Index,
    *,
    batch: Index,
    head: Index,
) -> Score:
    del head
    query = _position(query_ids, q_index, batch)
    key = _position(key_ids, kv_index, batch)
    return jnp.where(query == key, score, -jnp.inf)


def _position(positions: Positions, index: Index, batch: Index) -> Int[Array, "..."]:
    if positions is None:
        return jnp.asarray(index)
    positions = _int32(positions, name="positions")
    return positions[index] if positions.ndim == 1 else positions[batch, index]


def _int32(x: ArrayLike, *, name: str) -> Int[Array, "..."]:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    return x.astype(jnp.int32)
