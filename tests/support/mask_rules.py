"""Every kind of mask beside its rule in Python, for the tests of masks."""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jaxtyping import Array

from attention import masks

T, S, B, N = 4, 6, 2, 3
Rule = Callable[[int, int, int, int], Any]
Expression = tuple[masks.Mask, Rule]
NUMBER: Any = 1.5
RANDOM = np.random.default_rng(0)
IDS = np.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])
KEY_IDS = np.array([[1, 0, 0, 2, 1, 1]])
KEY_LENGTHS, QUERY_LENGTHS = np.array([2, 5]), np.array([4, 1])
ARRAY = RANDOM.random((B, N, S, S)) < 0.5
SHARED_ARRAY = ARRAY[:1, :1, :1]


def inside(p: int, end: int) -> bool:
    return 0 <= p < end


def by_head(q_index: Array, kv_index: Array, *, batch: Array, head: Array) -> Array:
    return (q_index + 2 * kv_index + batch) % 3 == head % 3


def mixed(x: int) -> int:
    """Chris Wellons's lowbias32, in Python's integers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def random_blocks(
    q: int, window: range, globals: int, random: int, seed: int, total: int
) -> list[int]:
    """One of each stratum of the blocks that are neither global nor in the window."""
    admissible = [k for k in range(globals, total) if k not in window]
    cuts = [len(admissible) * s // max(random, 1) for s in range(random + 1)]
    state = mixed((mixed((mixed(seed) + q) % 2**32) + len(admissible)) % 2**32)
    strata = [admissible[a:b] for a, b in itertools.pairwise(cuts)]
    return [
        stratum[mixed((state + s) % 2**32) % len(stratum)]
        for s, stratum in enumerate(strata)
        if stratum
    ]


def bigbird(
    block: int,
    window: int,
    globals: int,
    random: int,
    seed: int,
    *,
    causal: bool = False,
    length: int = 0,
) -> Rule:
    def rule(p: int, j: int, b: int, n: int) -> bool:
        q, k = int(p) // block, int(j) // block
        side = window // 2
        near = range(
            q - window + 1 if causal else q - side, q + 1 + side * (not causal)
        )
        total = q + 1 if causal else -(-length // block)
        sees = inside(q, globals) or k < globals or k in near
        sees = sees or k in random_blocks(q, near, globals, random, seed, total)
        return sees and (j <= p or not causal)

    return rule


def longformer(
    window: int, global_positions: tuple[int, ...], *, causal: bool = False
) -> Rule:
    def rule(p: int, j: int, b: int, n: int) -> bool:
        sees = abs(p - j) <= window or p in global_positions or j in global_positions
        return sees and (j <= p or not causal)

    return rule


# name: (constructor of the offset, rule of query position, key, batch row, head)
LEAVES: dict[str, tuple[Callable[[Any], masks.Mask], Rule]] = {
    "causal": (lambda o: masks.causal(o), lambda p, j, b, n: j <= p),
    "window": (lambda o: masks.window(1, 2, o), lambda p, j, b, n: -1 <= j - p <= 2),
    "left": (lambda o: masks.window(2, None, o), lambda p, j, b, n: j - p >= -2),
    "right": (lambda o: masks.window(None, 1, o), lambda p, j, b, n: j - p <= 1),
    "all": (lambda o: masks.window(None, None, o), lambda p, j, b, n: True),
    "sliding": (
        lambda o: masks.sliding_window(3, o),
        lambda p, j, b, n: j in (p, p - 1, p - 2),
    ),
    "prefix": (lambda o: masks.prefix(2, o), lambda p, j, b, n: j < 2 or j <= p),
    "prefix_rows": (
        lambda o: masks.prefix(jnp.array([1, 3]), o),
        lambda p, j, b, n: j < [1, 3][b] or j <= p,
    ),
    "chunked": (lambda o: masks.chunked(2, o), lambda p, j, b, n: p // 2 == j // 2),
    "segments": (
        lambda o: masks.segments(IDS, offset=o),
        lambda p, j, b, n: inside(p, S) and inside(j, S) and IDS[b, p] == IDS[b, j],
    ),
    "segments_of_both": (
        lambda o: masks.segments(IDS[0, :5], KEY_IDS, o),
        lambda p, j, b, n: inside(p, 5) and inside(j, S) and IDS[0, p] == KEY_IDS[0, j],
    ),
    "key_lengths": (
        lambda o: masks.lengths(KEY_LENGTHS, offset=o),
        lambda p, j, b, n: inside(j, KEY_LENGTHS[b]),
    ),
    "query_lengths": (
        lambda o: masks.lengths(None, QUERY_LENGTHS, o),
        lambda p, j, b, n: inside(p, QUERY_LENGTHS[b]),
    ),
    "lengths": (
        lambda o: masks.lengths(4, QUERY_LENGTHS, o),
        lambda p, j, b, n: inside(j, 4) and inside(p, QUERY_LENGTHS[b]),
    ),
    "dense": (
        lambda o: masks.dense(
            ARRAY[:, :, : T if isinstance(o, int) and o == 0 else S], o
        ),
        lambda p, j, b, n: inside(p, S) and inside(j, S) and ARRAY[b, n, p, j],
    ),
    "dense_keys": (
        lambda o: masks.dense(SHARED_ARRAY[0, 0, 0], o),
        lambda p, j, b, n: inside(j, S) and SHARED_ARRAY[0, 0, 0, j],
    ),
    "longformer": (
        lambda o: masks.longformer(1, (3, 0), offset=o),
        longformer(1, (3, 0)),
    ),
    "longformer_causal": (
        lambda o: masks.longformer(0, (2,), causal=True, offset=o),
        longformer(0, (2,), causal=True),
    ),
    "bigbird": (
        lambda o: masks.bigbird(1, 1, 1, 2, 7, length=S, offset=o),
        bigbird(1, 1, 1, 2, 7, length=S),
    ),
    "bigbird_pairs": (
        lambda o: masks.bigbird(2, 1, 0, 1, 0, length=S, offset=o),
        bigbird(2, 1, 0, 1, 0, length=S),
    ),
    "bigbird_causal": (
        lambda o: masks.bigbird(1, 2, 1, 1, 2, causal=True, offset=o),
        bigbird(1, 2, 1, 1, 2, causal=True),
    ),
    "where": (
        lambda o: masks.where(by_head, o),
        lambda p, j, b, n: (p + 2 * j + b) % 3 == n,
    ),
}
LEAF_NAMES = st.sampled_from(sorted(LEAVES))


def loop(rule: Rule, queries: Any, keys: Any, offset: int = 0) -> np.ndarray:
    """[B N T S] by definition; positions are [B T] and [B S]."""
    visible = np.zeros((B, N, len(queries[0]), len(keys[0])), bool)
    for b, n, t, s in itertools.product(*map(range, visible.shape)):
        p, j = queries[b][t] + offset, keys[b][s]
        visible[b, n, t, s] = j >= 0 and rule(p, j, b, n)
    return visible


def in_order(rule: Rule, offset: int = 0) -> np.ndarray:
    return loop(rule, [range(T)] * B, [range(S)] * B, offset)


def assert_same(visible: Array, expected: np.ndarray) -> None:
    assert visible.dtype == bool and visible.ndim == 4
    np.testing.assert_array_equal(np.broadcast_to(visible, expected.shape), expected)


def means(mask: masks.Mask, queries: int, keys: int) -> list[float]:
    """What a uniform mean of the values 1, 2, ... gives: the cases' PROBE."""
    visible = np.asarray(mask.materialize(queries, keys))[0, 0]
    values = np.arange(1, keys + 1)
    return (visible @ values / np.maximum(visible.sum(1), 1)).tolist()
