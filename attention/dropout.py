"""Dropout of attention weights, as a pure function of their indices.

Whether the weight of (batch b, head n, query i, key j) is kept is decided by a
counter-based generator at exactly that index:

    u(b, n, i, j) = threefry2x32(key = bits(rng ⊕ b ⊕ n), counter = (i, j))
    kept  iff  u ≥ rate · 2³²

so the mask does not depend on block sizes, on the implementation, on the number of
devices or on how much of the score matrix is looked at: any part of it can be
recomputed anywhere. Srivastava et al., 2014 (dropout); Salmon et al., 2011,
"Parallel random numbers: as easy as 1, 2, 3" (the generator).
"""

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def of_head(rng: Array, batch: Int[Array, ""], head: Int[Array, ""]) -> Array:
    """The key of one head of one row.

    Args:
      rng: one key for all rows and heads.
      batch: index of the row.
      head: index of the query head.

    Returns:
      A key that depends on all three.
    """
    return jax.random.fold_in(jax.random.fold_in(rng, batch), head)


@jax.named_scope("dropout")
def apply(
    weights: Float[Array, "T S"],
    rng: Array,
    *,
    rate: float,
    start: tuple[int | Int[Array, ""], int | Int[Array, ""]] = (0, 0),
) -> Float[Array, "T S"]:
    """Drops weights of one head; those that are kept grow by 1/(1 - rate).

    Args:
      weights: of the queries and keys from `start` on.
      rng: the key of this head, `of_head`.
      rate: the probability of dropping a weight, 0 ≤ rate < 1.
      start: index of the first query, and of the first key.

    Returns:
      Weights whose expectation over keys is `weights`.
    """
    query_index = start[0] + lax.broadcasted_iota(jnp.int32, (weights.shape[0], 1), 0)
    key_index = start[1] + lax.broadcasted_iota(jnp.int32, (1, weights.shape[1]), 1)
    keep = kept(rng, query_index, key_index, rate=rate)
    return jnp.where(keep, weights / (1 - rate), 0)


def kept(
    rng: Array,
    query_index: Int[Array, "T 1"],
    key_index: Int[Array, "1 S"],
    *,
    rate: float,
) -> Bool[Array, "T S"]:
    """Says which weights of one head survive.

    Args:
      rng: the key of one head of one row.
      query_index: positions i of the rows.
      key_index: positions j of the columns.
      rate: the probability of dropping a weight, 0 ≤ rate < 1.

    Returns:
      True with probability 1 - rate, independently for every (i, j).
    """
    rows, columns = jnp.broadcast_arrays(query_index, key_index)
    counters = jnp.stack([rows, columns]).astype(jnp.uint32)
    seed = jax.random.bits(rng, (2,), jnp.uint32)
    bits = jex.random.threefry_2x32(seed, counters)[0]
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
