"""Score modifiers: the papers' rules, and each through the implementations."""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import attention
from attention import masks, score_mods
from tests.support import oracle

RANDOM = np.random.default_rng(0)
IMPLEMENTATIONS = ("reference", "flash")


@pytest.mark.parametrize(
    "num_heads, expected",
    [
        (1, [0.00390625]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-i for i in range(1, 9)]),
        (
            12,
            [2.0**-i for i in range(1, 9)] + [0.707107, 0.353553, 0.176777, 0.088388],
        ),
    ],
)
def test_alibi_slopes(num_heads: int, expected: list[float]) -> None:
    """case B089: powers of two, and numbers between them."""
    slopes = score_mods.alibi_slopes(num_heads)
    assert slopes.dtype == np.float32
    np.testing.assert_allclose(slopes, expected, atol=5e-7)


def test_alibi_measures_from_absolute_positions() -> None:
    """case B090: a decoding step's query stands at 5, not at its row's index 0."""
    slopes = score_mods.alibi_slopes(8)
    assert slopes[0] == 0.5 and slopes[7] == 0.00390625
    q_index, kv_index = jnp.array([[0]]), jnp.arange(6)[None]
    score_mod = score_mods.alibi(slopes, query_positions=jnp.array([5]))
    bias = score_mod(jnp.zeros((1, 6)), q_index, kv_index, batch=0, head=0)
    np.testing.assert_array_equal(bias[0], -0.5 * np.array([5, 4, 3, 2, 1, 0]))
    # Without positions the indices are the positions; of the distance the absolute.
    bias = score_mods.alibi(slopes)(
        jnp.full((1, 6), 2.0), q_index + 2, kv_index, batch=0, head=1
    )
    np.testing.assert_array_equal(bias[0], 2 - 0.25 * np.array([2, 1, 0, 1, 2, 3]))


def test_alibi_on_all_rows_and_heads_at_once_equals_one_score_at_a_time() -> None:
    slopes = score_mods.alibi_slopes(3)
    queries, keys = np.array([[4, 9], [1, 0]]), np.array([[3, 4, 9], [0, 1, 2]])
    score_mod = score_mods.alibi(slopes, jnp.asarray(queries), jnp.asarray(keys))
    scores = RANDOM.normal(size=(2, 3, 2, 3)).astype(np.float32)
    t, s = jnp.arange(2)[None, None, :, None], jnp.arange(3)[None, None, None]
    b, n = jnp.arange(2)[:, None, None, None], jnp.arange(3)[None, :, None, None]
    together = score_mod(scores, t, s, batch=b, head=n)
    for index in np.ndindex(*scores.shape):
        row, head, i, j = index
        distance = abs(int(queries[row, i]) - int(keys[row, j]))
        expected = scores[index] - slopes[head] * distance
        assert abs(together[index] - expected) < 1e-6
        if sum(index) % 3 == 0:
            alone = score_mod(jnp.asarray(scores[index]), i, j, batch=row, head=head)
            assert abs(alone - expected) < 1e-6
    shifted = score_mods.alibi(slopes, queries + 70, keys + 70)
    np.testing.assert_array_equal(shifted(scores, t, s, batch=b, head=n), together)


def test_alibi_passes_through_jit_and_gradients_reach_the_slopes() -> None:
    def total(score_mod: Callable[..., Array]) -> Array:
        t, s = jnp.arange(3)[:, None], jnp.arange(3)[None]
        return score_mod(jnp.zeros((3, 3)), t, s, batch=0, head=1).sum()

    once = jax.jit(chex.assert_max_traces(total, n=1))
    slopes = jnp.array([1.0, 2.0])
    assert once(score_mods.alibi(slopes)) == -2 * 8
    assert once(score_mods.alibi(slopes + 1)) == -3 * 8
    gradient = jax.grad(lambda slopes: total(score_mods.alibi(slopes)))(slopes)
    np.testing.assert_array_equal(gradient, [0, -8])


def bucket_loop(
    relative_position: int, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> int:
    """The paper's rule for one number, with exact integers at the borders."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        if relative_position > 0:
            first = num_buckets
        distance = abs(relative_position)
    else:
        distance = max(-relative_position, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    # The last k with (distance / exact) ** steps >= (max_distance / exact) ** k.
    steps, k = num_buckets - exact, 0
    while k + 1 < steps and (
        distance**steps * exact ** (k + 1) >= max_distance ** (k + 1) * exact**steps
    ):
        k += 1
    return first + exact + k


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    "num_buckets, max_distance", [(32, 128), (20, 160), (10, 1000)]
)
def test_relative_buckets_are_the_papers_rule(
    num_buckets: int, max_distance: int, bidirectional: bool
) -> None:
    options: dict[str, Any] = dict(
        num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional
    )
    relative = np.concatenate(
        [np.arange(-1100, 1101), [-(2**31) + 1, 2**31 - 1, -5000]]
    ).reshape(2, -1)
    buckets = score_mods.relative_buckets(relative, **options)
    assert buckets.dtype == jnp.int32 and buckets.shape == relative.shape
    expected = [bucket_loop(r, **options) for r in relative.ravel().tolist()]
    np.testing.assert_array_equal(buckets.ravel(), expected)
    unused = {num_buckets // 2} if bidirectional else set()
    assert set(expected) == set(range(num_buckets)) - unused


def test_relative_buckets_known_values() -> None:
    both = score_mods.relative_buckets(
        np.array([0, -1, 1, -7, -8, -16, -32, -64, -127, -128, 8, 128, 10**6]),
        bidirectional=True,
    )
    assert both.tolist() == [0, 1, 17, 7, 8, 10, 12, 14, 15, 15, 24, 31, 31]
    past = score_mods.relative_buckets(
        np.array([0, 5, -1, -15, -16, -32, -127, -128, -500]), bidirectional=False
    )
    assert past.tolist() == [0, 0, 1, 15, 16, 21, 31, 31, 31]


LENGTH, HEADS = 12, 2
IDS = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2], np.int32)
OPTIONS: dict[str, Any] = dict(max_distance=9, bidirectional=True)


def bias_of_bucket(table, s, n, i, j):
    return s + table[bucket_loop(j - i, num_buckets=8, **OPTIONS), n]


# How it is made of its parameters; these; and the rule for one score s of head n.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Callable[..., float]]] = {
    "alibi": (
        score_mods.alibi,
        ([0.5, 2.0],),
        lambda slopes, s, n, i, j: s - slopes[n] * abs(i - j),
    ),
    "relative_bias": (
        lambda table: score_mods.relative_bias(table, **OPTIONS),
        (RANDOM.normal(size=(8, HEADS)),),
        bias_of_bucket,
    ),
    "kerple": (
        score_mods.kerple,
        ([0.5, 2.0], [0.1, 3.0]),
        lambda a, r, s, n, i, j: s - a[n] * math.log(1 + r[n] * abs(i - j)),
    ),
    "soft_cap": (
        score_mods.soft_cap,
        (1.5,),
        lambda cap, s, n, i, j: cap * math.tanh(s / cap),
    ),
    "documents": (
        lambda: score_mods.documents(IDS),
        (),
        lambda s, n, i, j: s if IDS[i] == IDS[j] else -math.inf,
    ),
}


def slope(f: Callable[[float], float], at: float, step: float = 1e-5) -> float:
    """A derivative by differences; 0 where a pair is hidden."""
    above, below = f(at + step), f(at - step)
    return (above - below) / (2 * step) if math.isfinite(above) else 0.0


def rule_at(rule, parameters, which, entry, s, n, i, j, value):
    """The rule with one entry of one parameter changed."""
    changed = [x.copy() for x in parameters]
    changed[which][entry] = value
    return rule(*changed, s, n, i, j)


@pytest.mark.parametrize("name", CASES)
def test_every_implementation_computes_the_rule_and_its_gradients(name: str) -> None:
    make, parameters, rule = CASES[name]
    parameters = tuple(np.asarray(x, np.float64) for x in parameters)
    shape = (1, LENGTH, HEADS, 4)
    q, k, v, do = (RANDOM.normal(size=shape).astype(np.float32) for _ in range(4))

    def score_mod(s, i, j, b, n):
        at = functools.partial(rule, *parameters)
        return at(s, n, i, j), slope(lambda s: at(s, n, i, j), s)

    visible = np.broadcast_to(np.tri(LENGTH, dtype=bool), (1, HEADS, LENGTH, LENGTH))
    expected = oracle.attention(
        q, k, v, visible=visible, score_mod=score_mod, output_gradient=do
    )
    by_parameter = [np.zeros_like(x) for x in parameters]
    for n, i, j in zip(*np.nonzero(visible[0]), strict=True):
        s = float(q[0, i, n].astype(np.float64) @ k[0, j, n]) / 2
        for which, total in enumerate(by_parameter):
            for entry in np.ndindex(total.shape):
                f = functools.partial(
                    rule_at, rule, parameters, which, entry, s, n, i, j
                )
                by_score = slope(f, float(parameters[which][entry]))
                total[entry] += expected["dbias"][0, n, i, j] * by_score

    narrow = tuple(np.float32(x) for x in parameters)
    for implementation in IMPLEMENTATIONS:

        def loss(parameters, q, implementation=implementation):
            y = attention.dot_product_attention(
                q,
                k,
                v,
                mask=masks.causal(),
                score_mod=make(*parameters),
                implementation=implementation,
            )
            return jnp.sum(y * do), y

        gradients, y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(narrow, q)
        np.testing.assert_allclose(y, expected["out"], rtol=0, atol=2e-6)
        np.testing.assert_allclose(gradients[1], expected["dq"], rtol=0, atol=1e-5)
        chex.assert_trees_all_close(
            gradients[0], tuple(by_parameter), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: score_mods.alibi_slopes(0), ValueError, "at least 1, got 0"),
        (
            lambda: score_mods.relative_buckets(1, num_buckets=9, bidirectional=True),
            ValueError,
            "must be even, got 9",
        ),
        (
            lambda: score_mods.relative_buckets(
                1, num_buckets=32, max_distance=8, bidirectional=True
            ),
            ValueError,
            "num_buckets=32, max_distance=8",
        ),
        (
            lambda: score_mods.relative_buckets(0.5, bidirectional=True),
            TypeError,
            "relative_position must be integers, got float32",
        ),
    ],
)
def test_errors_say_what_was_expected_and_what_came(
    make: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
