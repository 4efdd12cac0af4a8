"""The mask algebra against double loops in Python."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_equals_the_double_loop_at_static_and_traced_offsets(name: str) -> None:
    make, rule = LEAVES[name]
    traced = jax.jit(lambda o: make(o).materialize(T, S, batch_size=B, num_heads=N))
    for offset in (0, 2, -3):
        expected = in_order(rule, offset)
        eager = make(offset).materialize(T, S, batch_size=B, num_heads=N)
        assert_same(eager, expected)
        assert_same(traced(offset), expected)


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_at_scattered_positions(name: str) -> None:
    make, rule = LEAVES[name]
    batch, head = jnp.arange(B), jnp.arange(N)
    # A ring buffer that wrapped around in row 0 and has two empty slots in row 1.
    queries, keys = np.array([[5, 3], [0, 2]]), np.array([[4, 5, 2, 3], [0, 1, -1, -1]])
    for q, k in ((queries, keys), (queries[0], keys[0]), (queries[0], keys)):
        visible = make(jnp.int32(1)).at(q, k, batch=batch, head=head)
        expected = loop(rule, np.broadcast_to(q, (B, 2)), np.broadcast_to(k, (B, 4)), 1)
        assert visible.shape[2:] == (2, 4)
        assert_same(visible, expected)


def test_positions_outside_the_data_are_never_visible() -> None:
    for name in ("segments", "dense", "lengths", "segments_of_both"):
        mask = LEAVES[name][0](jnp.int32(0))
        assert not mask.at(np.array([-1, S, S + 5, 10**6]), np.array([0, 1])).any(), (
            name
        )
        assert not mask.at(np.array([0, 1]), np.array([-1, S, 10**6])).any(), name
    for mask in (masks.causal(), ~masks.causal(), masks.window(None, None)):
        assert not mask.at(np.array([3, -2]), np.array([-1, -7])).any()


def test_at_takes_rows_and_heads() -> None:
    expected = ARRAY[[1, 1, 0]][:, [2, 0]]
    batch, head = jnp.array([1, 1, 0]), jnp.array([2, 0])
    visible = masks.dense(ARRAY).at(np.arange(S), np.arange(S), batch=batch, head=head)
    np.testing.assert_array_equal(visible, expected)
    visible = masks.lengths(KEY_LENGTHS).at(
        np.array([0]), np.arange(S), batch=jnp.array([1])
    )
    np.testing.assert_array_equal(visible[0, 0, 0], np.arange(S) < KEY_LENGTHS[1])
    # Without them: every row of the arrays, and index 0 for a predicate.
    assert masks.dense(ARRAY).at(np.array([0, 1]), np.array([2])).shape == (B, N, 2, 1)
    rule = LEAVES["where"][1]
    visible = masks.where(by_head).at(np.arange(T), np.arange(S))
    np.testing.assert_array_equal(visible[0, 0], in_order(rule)[0, 0])


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> Expression:
    kind = draw(st.sampled_from(["leaf", "&", "|", "~"])) if depth else "leaf"
    if kind == "leaf":
        make, rule = LEAVES[draw(LEAF_NAMES)]
        offset = draw(st.sampled_from([0, 1, -2]))
        return make(offset), lambda p, j, b, n: rule(p + offset, j, b, n)
    left, a = draw(expressions(depth=depth - 1))
    if kind == "~":
        return ~left, lambda *places: not a(*places)
    right, c = draw(expressions(depth=depth - 1))
    if kind == "&":
        return left & right, lambda *places: a(*places) and c(*places)
    return left | right, lambda *places: a(*places) or c(*places)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(expressions())
def test_random_expressions_equal_the_double_loop(expression: Expression) -> None:
    mask, rule = expression
    expected = in_order(rule)
    assert_same(mask.materialize(T, S, batch_size=B, num_heads=N), expected)
    places = np.arange(T), np.arange(S)
    assert_same(mask.at(*places, batch=jnp.arange(B), head=jnp.arange(N)), expected)
    # What is said to be invalid is seen by nobody, and sees nobody.
    keys, queries = mask.valid_keys(S), mask.valid_queries(T)
    if keys is not None:
        unseen = np.broadcast_to(~keys[:, None, None], expected.shape)
        assert not expected[unseen].any()
    if queries is not None:
        blind = np.broadcast_to(~queries[:, None, :, None], expected.shape)
        assert not expected[blind].any()


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(expressions(depth=1), expressions(depth=1))
def test_laws_of_composition(first: Expression, second: Expression) -> None:
    a, b = first[0], second[0]
    for left, right in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & b, b & a),
        (a & (a | b), a),
    ):
        shape = (B, N, T, S)
        visible = left.materialize(T, S, batch_size=B, num_heads=N)
        expected = right.materialize(T, S, batch_size=B, num_heads=N)
        assert_same(visible, np.broadcast_to(expected, shape))


def test_valid_keys_and_queries() -> None:
    mask = masks.lengths(KEY_LENGTHS, QUERY_LENGTHS, offset=2)
    keys = np.arange(S) < KEY_LENGTHS[:, None]
    queries = np.arange(T) + 2 < QUERY_LENGTHS[:, None]
    np.testing.assert_array_equal(mask.valid_keys(S), keys)
    np.testing.assert_array_equal(mask.valid_queries(T), queries)
    early = masks.lengths(3, 2, offset=-1)
    np.testing.assert_array_equal(early.valid_queries(T), [[False, True, True, False]])
    np.testing.assert_array_equal((masks.causal() & mask).valid_keys(S), keys)
    np.testing.assert_array_equal((mask & masks.causal()).valid_queries(T), queries)
    both = masks.lengths(4) & mask
    np.testing.assert_array_equal(both.valid_keys(S), keys & (np.arange(S) < 4))
    either = masks.lengths(4) | mask
    np.testing.assert_array_equal(either.valid_keys(S), keys | (np.arange(S) < 4))
    assert either.valid_queries(T) is None
    for unknown in (
        masks.causal(),
        masks.causal() | mask,
        mask | masks.causal(),
        ~mask,
    ):
        assert unknown.valid_keys(S) is None
        assert unknown.valid_queries(T) is None


def test_nothing_is_expanded_that_nothing_depends_on() -> None:
    assert masks.causal().materialize(T, S, batch_size=B, num_heads=N).shape[:2] == (
        1,
        1,
    )
    mask = masks.causal() & masks.lengths(KEY_LENGTHS)
    assert mask.materialize(T, S, num_heads=N).shape == (B, 1, T, S)
    assert masks.lengths(KEY_LENGTHS).materialize(T, S).shape == (B, 1, T, S)
    rows, heads = jnp.arange(B), jnp.arange(N)
    shared = masks.dense(SHARED_ARRAY) & masks.lengths(4) & masks.segments(IDS[0])
    visible = shared.at(np.arange(T), np.arange(S), batch=rows, head=heads)
    assert visible.shape == (1, 1, T, S)
    padding = masks.dense(ARRAY[:, :1, :1])
    assert padding.materialize(T, S).shape == (B, 1, 1, S)
    assert (padding & masks.causal()).materialize(T, S).shape == (B, 1, T, S)


def test_dense_is_not_gathered_in_order() -> None:
    mask = masks.dense(ARRAY[:, :, :T])
    program = jax.make_jaxpr(lambda m: m.materialize(T, S, batch_size=B, num_heads=N))
    assert "gather" not in str(program(mask))
    assert "gather" in str(program(masks.dense(ARRAY, jnp.int32(1))))


def test_building_a_mask_computes_nothing() -> None:
    program = jax.make_jaxpr(lambda m, n: ~(masks.causal(n) & masks.lengths(m)))
    assert not program(jnp.array([1, 2]), jnp.int32(1)).eqns


def test_equal_masks_do_not_retrace() -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def causal(mask: masks.Mask) -> Array:
        return mask.materialize(T, S)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def shifted(mask: masks.Mask) -> Array:
        return mask.materialize(T, S)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def padded(mask: masks.Mask) -> Array:
        return mask.materialize(T, S)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def by_predicate(mask: masks.Mask) -> Array:
        return mask.materialize(T, S)

    for _ in range(2):
        causal(masks.causal())
        by_predicate(masks.where(by_head) | masks.chunked(2))
    for offset in (3, 4, jnp.int32(0), np.int32(5), jnp.array(2, jnp.int32)):
        np.testing.assert_array_equal(
            shifted(masks.causal(offset))[0, 0], np.tri(T, S, int(offset), bool)
        )
    narrow = jax.tree.leaves(masks.causal(np.int8(3)) & masks.lengths(np.uint8(3)))
    assert all(leaf.dtype == jnp.int32 for leaf in narrow)
    for lengths in ([1, 2], [3, 4], np.array([5, 6])):
        padded(masks.causal() & masks.lengths(jnp.array(lengths)))


def test_static_masks_are_values() -> None:
    for make in (
        masks.causal,
        lambda: masks.window(1, None, 3) & masks.prefix(2),
        lambda: ~masks.where(by_head),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
    assert masks.causal() != masks.causal(1)
    assert masks.window(1, 2) != masks.window(2, 1)
    structures: list[Any] = [jax.tree.structure(masks.chunked(n)) for n in (2, 2, 3)]
    assert structures[0] == structures[1] != structures[2]
    assert repr(masks.window(1, 0)) == "Window(offset=None, left=1, right=0)"


@pytest.mark.parametrize("name", LEAVES)
def test_pytree_round_trip(name: str) -> None:
    mask = LEAVES[name][0](1) & ~LEAVES[name][0](0)
    leaves, structure = jax.tree.flatten(mask)
    assert all(leaf.dtype in (np.bool_, np.int32, np.int64) for leaf in leaves)
    hash(structure)
    rebuilt = jax.tree.unflatten(structure, leaves)
    chex.assert_trees_all_equal_structs(mask, rebuilt)
    # Transformations rebuild masks around placeholders.
    jax.tree.map(lambda leaf: object(), mask)


def test_transformations_take_masks_as_arguments() -> None:
    mask = masks.causal(jnp.int32(1)) & masks.lengths(KEY_LENGTHS)
    expected = np.asarray(mask.materialize(T, S))

    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, mask)
    per_row = jax.vmap(lambda m: m.materialize(T, S)[0, 0], in_axes=(axes,))(mask)
    np.testing.assert_array_equal(per_row, expected[:, 0])

    def step(mask: masks.Mask, query: Array) -> tuple[masks.Mask, Array]:
        return mask, mask.at(query[None], jnp.arange(S))

    rows = jax.lax.scan(step, mask, jnp.arange(T))[1]
    np.testing.assert_array_equal(rows[:, :, 0, 0].swapaxes(0, 1), expected[:, 0])

    def total(x: Array, mask: masks.Mask) -> Array:
        return jnp.where(mask.materialize(T, S), x, 0.0).sum()

    gradient = jax.jit(jax.grad(jax.checkpoint(total)))(jnp.ones((B, 1, T, S)), mask)
    np.testing.assert_array_equal(gradient, expected)

    with jax.disable_jit():
        np.testing.assert_array_equal(mask.materialize(T, S), expected)


def test_offsets_align_causal_masks() -> None:
    """case B011, case B012: top-left by default, other corners by an offset."""
    assert means(masks.causal(), 1, 8) == [1.0]
    assert means(masks.causal(offset=7), 1, 8) == [4.5]
    assert means(masks.causal(), 2, 5) == [1, 1.5]
    assert means(masks.causal(), 5, 2) == [1, 1.5, 1.5, 1.5, 1.5]
    assert means(masks.causal(3), 2, 5) == [2.5, 3]
    assert means(masks.causal(-3), 5, 2) == [0, 0, 0, 1, 1.5]


def test_sliding_window_counts_the_query_itself() -> None:
    """case B018: size keys, the query's own among them; size < 1 is an error."""
    assert means(masks.sliding_window(3), 6, 6) == [1, 1.5, 2, 3, 4, 5]
    assert means(masks.window(2, 0), 6, 6) == [1, 1.5, 2, 3, 4, 5]
    assert means(masks.sliding_window(1), 6, 6) == [1, 2, 3, 4, 5, 6]
    for size in (6, 7, 2**31, 10**12):
        mask = masks.sliding_window(size)
        assert means(mask, 6, 6) == means(masks.causal(), 6, 6)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
            masks.sliding_window(size)


def test_sliding_window_at_the_position_of_the_query() -> None:
    """case B020: a window follows the query's absolute position."""
    assert means(masks.sliding_window(3, offset=9), 1, 10) == [9]
    assert means(masks.sliding_window(3, offset=6), 4, 10) == [6, 7, 8, 9]
    assert means(masks.causal(9) & masks.window(2, 2, 9), 1, 10) == [9]


def test_true_means_may_attend() -> None:
    """case B023: the lower triangle is causal, its complement is not."""
    lower, upper = np.tri(3, dtype=bool), np.triu(np.ones((3, 3), bool), 1)
    assert means(masks.dense(lower), 3, 3) == [1, 1.5, 2]
    assert means(masks.dense(upper), 3, 3) == [2.5, 3, 0]
    assert means(~masks.dense(upper), 3, 3) == [1, 1.5, 2]
    assert masks.causal().materialize(3, 3)[0, 0, 0].tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8", "bfloat16"])
def test_dense_takes_booleans_only(dtype: str) -> None:
    """case B024: nothing else than a boolean is a mask."""
    message = f"mask must be boolean; use bias= for additive, got {dtype}"
    with pytest.raises(TypeError, match=message):
        masks.dense(jnp.ones((3, 3), dtype))


def test_dense_broadcasts_from_the_right() -> None:
    """case B028: every rank is aligned with [B N T S] from the right."""
    content = ARRAY[0, 0, 0]
    for shape in ((S,), (T, S), (1, 1, S), (1, 1, T, S), (B, 1, 1, S), (B, N, T, S)):
        mask = masks.dense(np.broadcast_to(content, shape))
        visible = mask.materialize(T, S, batch_size=B, num_heads=N)
        assert_same(visible, np.broadcast_to(content, (B, N, T, S)))
    assert masks.dense(True).materialize(T, S).all()
    per_head = masks.dense(ARRAY[0, :, :T]).materialize(T, S, batch_size=B, num_heads=N)
    assert_same(per_head, np.broadcast_to(ARRAY[:1, :, :T], (B, N, T, S)))


@pytest.mark.parametrize(
    "shape, message",
    [
        ((S + 1,), rf"\[B N T S\] with T = {T} and S = {S}, got \[{S + 1}\]"),
        ((T + 1, S), rf"with T = {T} and S = {S}, got \[{T + 1}, {S}\]"),
        ((N + 1, T, S), f"N = {N} or 1, got N = {N + 1}"),
        ((B + 1, 1, T, S), f"B = {B} or 1, got B = {B + 1}"),
    ],
)
def test_misfits_are_named(shape: tuple[int, ...], message: str) -> None:
    """case B028: a dimension that is neither 1 nor its axis."""
    with pytest.raises(ValueError, match=message):
        masks.dense(np.ones(shape, bool)).materialize(T, S, batch_size=B, num_heads=N)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: masks.window(-1, 0), ValueError, "left must be at least 0, got -1"),
        (lambda: masks.window(0, -2), ValueError, "right must be at least 0, got -2"),
        (lambda: masks.chunked(0), ValueError, "size must be at least 1, got 0"),
        (lambda: masks.prefix(-1), ValueError, "length must be at least 0, got -1"),
        (lambda: masks.lengths(-1), ValueError, "key_lengths must be at least 0"),
        (lambda: masks.window(NUMBER, 0), TypeError, "float"),
        (lambda: masks.causal(1.0), TypeError, "offset must be integers, got float32"),
        (lambda: masks.causal(jnp.arange(2)), ValueError, r"offset .*got shape \[2\]"),
        (
            lambda: masks.lengths(np.array([1.0])),
            TypeError,
            "key_lengths .* got float32",
        ),
        (
            lambda: masks.lengths(np.array([[1]])),
            ValueError,
            r"0 or 1 dimensions, .* \[1, 1\]",
        ),
        (
            lambda: masks.lengths(1, np.array([1.0])),
            TypeError,
            "query_lengths must be integers",
        ),
        (
            lambda: masks.segments(np.array([1.0])),
            TypeError,
            "query_ids must be integers",
        ),
        (lambda: masks.segments(1), ValueError, "query_ids must have 1 or 2 dim"),
        (
            lambda: masks.segments(np.array([1]), np.array([[[1]]])),
            ValueError,
            "key_ids must have 1 or 2",
        ),
        (lambda: masks.dense(np.ones((1,) * 5, bool)), ValueError, "at most .B N T S"),
        (lambda: masks.causal() & NUMBER, TypeError, "composes with masks, got float"),
        (
            lambda: operator.or_(masks.causal(), ARRAY),
            TypeError,
            "wrap boolean arrays in masks.de",
        ),
        (lambda: masks.causal() and masks.chunked(2), TypeError, "no truth value"),
        (
            lambda: masks.causal().at(np.array([0.5]), np.array([0])),
            TypeError,
            "query_positions .* float",
        ),
        (
            lambda: masks.causal().at(np.array([0]), 0),
            ValueError,
            "key_positions must have 1 or",
        ),
        (
            lambda: masks.where(lambda q, k, *, batch, head: q - k).materialize(T, S),
            TypeError,
            "predicate must be boolean, got int32",
        ),
    ],
)
def test_errors_say_what_was_expected_and_what_came(
    make: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_empty_dimensions() -> None:
    for name, (make, _) in LEAVES.items():
        if name not in ("dense", "dense_keys"):
            assert make(0).materialize(0, S).shape[2:] == (0, S)
            assert make(0).materialize(T, 0).shape[2:] == (T, 0)
    empty = masks.segments(np.zeros((B, 0), int), np.zeros((B, S), int))
    assert not empty.at(np.array([0, 1]), np.arange(S)).any()
    assert masks.dense(np.ones((T, 0), bool)).materialize(T, 0).shape == (1, 1, T, 0)
