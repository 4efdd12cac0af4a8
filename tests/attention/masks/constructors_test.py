"""attention.masks: each kind against double loops in Python."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import masks
from tests.support import mask_rules


@pytest.mark.parametrize("name", mask_rules.LEAVES)
def test_leaf_equals_the_double_loop_at_static_and_traced_offsets(name: str) -> None:
    make, rule = mask_rules.LEAVES[name]
    traced = jax.jit(
        lambda o: make(o).materialize(
            mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
        )
    )
    for offset in (0, 2, -3):
        expected = mask_rules.in_order(rule, offset)
        eager = make(offset).materialize(
            mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
        )
        mask_rules.assert_same(eager, expected)
        mask_rules.assert_same(traced(offset), expected)


@pytest.mark.parametrize("name", mask_rules.LEAVES)
def test_leaf_at_scattered_positions(name: str) -> None:
    make, rule = mask_rules.LEAVES[name]
    batch, head = jnp.arange(mask_rules.B), jnp.arange(mask_rules.N)
    # A ring buffer that wrapped around in row 0 and has two empty slots in row 1.
    queries, keys = np.array([[5, 3], [0, 2]]), np.array([[4, 5, 2, 3], [0, 1, -1, -1]])
    for q, k in ((queries, keys), (queries[0], keys[0]), (queries[0], keys)):
        visible = make(jnp.int32(1)).at(q, k, batch=batch, head=head)
        expected = mask_rules.loop(
            rule,
            np.broadcast_to(q, (mask_rules.B, 2)),
            np.broadcast_to(k, (mask_rules.B, 4)),
            1,
        )
        assert visible.shape[2:] == (2, 4)
        mask_rules.assert_same(visible, expected)


def test_positions_outside_the_data_are_never_visible() -> None:
    for name in ("segments", "dense", "lengths", "segments_of_both"):
        mask = mask_rules.LEAVES[name][0](jnp.int32(0))
        assert not mask.at(
            np.array([-1, mask_rules.S, mask_rules.S + 5, 10**6]), np.array([0, 1])
        ).any(), name
        assert not mask.at(
            np.array([0, 1]), np.array([-1, mask_rules.S, 10**6])
        ).any(), name
    for mask in (masks.causal(), ~masks.causal(), masks.window(None, None)):
        assert not mask.at(np.array([3, -2]), np.array([-1, -7])).any()


def test_at_takes_rows_and_heads() -> None:
    expected = mask_rules.ARRAY[[1, 1, 0]][:, [2, 0]]
    batch, head = jnp.array([1, 1, 0]), jnp.array([2, 0])
    visible = masks.dense(mask_rules.ARRAY).at(
        np.arange(mask_rules.S), np.arange(mask_rules.S), batch=batch, head=head
    )
    np.testing.assert_array_equal(visible, expected)
    visible = masks.lengths(mask_rules.KEY_LENGTHS).at(
        np.array([0]), np.arange(mask_rules.S), batch=jnp.array([1])
    )
    np.testing.assert_array_equal(
        visible[0, 0, 0], np.arange(mask_rules.S) < mask_rules.KEY_LENGTHS[1]
    )
    # Without them: every row of the arrays, and index 0 for a predicate.
    assert masks.dense(mask_rules.ARRAY).at(np.array([0, 1]), np.array([2])).shape == (
        mask_rules.B,
        mask_rules.N,
        2,
        1,
    )
    rule = mask_rules.LEAVES["where"][1]
    visible = masks.where(mask_rules.by_head).at(
        np.arange(mask_rules.T), np.arange(mask_rules.S)
    )
    np.testing.assert_array_equal(visible[0, 0], mask_rules.in_order(rule)[0, 0])


def test_offsets_align_causal_masks() -> None:
    """case B011, case B012: top-left by default, other corners by an offset."""
    assert mask_rules.means(masks.causal(), 1, 8) == [1.0]
    assert mask_rules.means(masks.causal(offset=7), 1, 8) == [4.5]
    assert mask_rules.means(masks.causal(), 2, 5) == [1, 1.5]
    assert mask_rules.means(masks.causal(), 5, 2) == [1, 1.5, 1.5, 1.5, 1.5]
    assert mask_rules.means(masks.causal(3), 2, 5) == [2.5, 3]
    assert mask_rules.means(masks.causal(-3), 5, 2) == [0, 0, 0, 1, 1.5]


def test_sliding_window_counts_the_query_itself() -> None:
    """case B018: size keys, the query's own among them; size < 1 is an error."""
    assert mask_rules.means(masks.sliding_window(3), 6, 6) == [1, 1.5, 2, 3, 4, 5]
    assert mask_rules.means(masks.window(2, 0), 6, 6) == [1, 1.5, 2, 3, 4, 5]
    assert mask_rules.means(masks.sliding_window(1), 6, 6) == [1, 2, 3, 4, 5, 6]
    for size in (6, 7, 2**31, 10**12):
        mask = masks.sliding_window(size)
        assert mask_rules.means(mask, 6, 6) == mask_rules.means(masks.causal(), 6, 6)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
            masks.sliding_window(size)


def test_sliding_window_at_the_position_of_the_query() -> None:
    """case B020: a window follows the query's absolute position."""
    assert mask_rules.means(masks.sliding_window(3, offset=9), 1, 10) == [9]
    assert mask_rules.means(masks.sliding_window(3, offset=6), 4, 10) == [6, 7, 8, 9]
    assert mask_rules.means(masks.causal(9) & masks.window(2, 2, 9), 1, 10) == [9]


def test_true_means_may_attend() -> None:
    """case B023: the lower triangle is causal, its complement is not."""
    lower, upper = np.tri(3, dtype=bool), np.triu(np.ones((3, 3), bool), 1)
    assert mask_rules.means(masks.dense(lower), 3, 3) == [1, 1.5, 2]
    assert mask_rules.means(masks.dense(upper), 3, 3) == [2.5, 3, 0]
    assert mask_rules.means(~masks.dense(upper), 3, 3) == [1, 1.5, 2]
    assert masks.causal().materialize(3, 3)[0, 0, 0].tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8", "bfloat16"])
def test_dense_takes_booleans_only(dtype: str) -> None:
    """case B024: nothing else than a boolean is a mask."""
    message = f"mask must be boolean; use bias= for additive, got {dtype}"
    with pytest.raises(TypeError, match=message):
        masks.dense(jnp.ones((3, 3), dtype))


def test_dense_broadcasts_from_the_right() -> None:
    """case B028: every rank is aligned with [B N T S] from the right."""
    content = mask_rules.ARRAY[0, 0, 0]
    for shape in (
        (mask_rules.S,),
        (mask_rules.T, mask_rules.S),
        (1, 1, mask_rules.S),
        (1, 1, mask_rules.T, mask_rules.S),
        (mask_rules.B, 1, 1, mask_rules.S),
        (mask_rules.B, mask_rules.N, mask_rules.T, mask_rules.S),
    ):
        mask = masks.dense(np.broadcast_to(content, shape))
        visible = mask.materialize(
            mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
        )
        mask_rules.assert_same(
            visible,
            np.broadcast_to(
                content, (mask_rules.B, mask_rules.N, mask_rules.T, mask_rules.S)
            ),
        )
    assert masks.dense(True).materialize(mask_rules.T, mask_rules.S).all()
    per_head = masks.dense(mask_rules.ARRAY[0, :, : mask_rules.T]).materialize(
        mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
    )
    mask_rules.assert_same(
        per_head,
        np.broadcast_to(
            mask_rules.ARRAY[:1, :, : mask_rules.T],
            (mask_rules.B, mask_rules.N, mask_rules.T, mask_rules.S),
        ),
    )


@pytest.mark.parametrize(
    "shape, message",
    [
        (
            (mask_rules.S + 1,),
            r"\[B N T S\] with T = 4 and S = 6, got \[7\]",
        ),
        (
            (mask_rules.T + 1, mask_rules.S),
            r"with T = 4 and S = 6, got \[5, 6\]",
        ),
        (
            (mask_rules.N + 1, mask_rules.T, mask_rules.S),
            f"N = {mask_rules.N} or 1, got N = {mask_rules.N + 1}",
        ),
        (
            (mask_rules.B + 1, 1, mask_rules.T, mask_rules.S),
            f"B = {mask_rules.B} or 1, got B = {mask_rules.B + 1}",
        ),
    ],
)
def test_misfits_are_named(shape: tuple[int, ...], message: str) -> None:
    """case B028: a dimension that is neither 1 nor its axis."""
    with pytest.raises(ValueError, match=message):
        masks.dense(np.ones(shape, bool)).materialize(
            mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
        )


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: masks.window(-1, 0), ValueError, "left must be at least 0, got -1"),
        (lambda: masks.window(0, -2), ValueError, "right must be at least 0, got -2"),
        (lambda: masks.chunked(0), ValueError, "size must be at least 1, got 0"),
        (lambda: masks.prefix(-1), ValueError, "length must be at least 0, got -1"),
        (lambda: masks.lengths(-1), ValueError, "key_lengths must be at least 0"),
        (lambda: masks.window(mask_rules.NUMBER, 0), TypeError, "float"),
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
        (
            lambda: masks.dense(mask_rules.ARRAY).materialize(
                mask_rules.S, mask_rules.S, batch_size=mask_rules.B + 1
            ),
            ValueError,
            "mask must have B = 3 or 1, got B = 2",
        ),
        (
            lambda: masks.dense(mask_rules.ARRAY).materialize(
                mask_rules.S, mask_rules.S, num_heads=mask_rules.N + 1
            ),
            ValueError,
            "mask must have N = 4 or 1, got N = 3",
        ),
        (
            lambda: masks.causal() & mask_rules.NUMBER,
            TypeError,
            "composes with masks, got float",
        ),
        (
            lambda: operator.or_(masks.causal(), mask_rules.ARRAY),
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
            lambda: masks.where(lambda q, k, *, batch, head: q - k).materialize(
                mask_rules.T, mask_rules.S
            ),
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
    for name, (make, _) in mask_rules.LEAVES.items():
        if name not in ("dense", "dense_keys"):
            assert make(0).materialize(0, mask_rules.S).shape[2:] == (0, mask_rules.S)
            assert make(0).materialize(mask_rules.T, 0).shape[2:] == (mask_rules.T, 0)
    empty = masks.segments(
        np.zeros((mask_rules.B, 0), int), np.zeros((mask_rules.B, mask_rules.S), int)
    )
    assert not empty.at(np.array([0, 1]), np.arange(mask_rules.S)).any()
    assert masks.dense(np.ones((mask_rules.T, 0), bool)).materialize(
        mask_rules.T, 0
    ).shape == (1, 1, mask_rules.T, 0)


def test_an_array_of_keys_or_queries_says_who_is_seen_by_nobody():
    """So that NaN in padding, on any side, reaches nothing."""
    keys = np.array([[True, False, True], [False, True, True]])
    by_key = masks.causal() & masks.dense(keys[:, None, None, :])
    np.testing.assert_array_equal(by_key.valid_keys(3), keys)
    assert by_key.valid_queries(3) is None
    by_query = masks.dense(keys[:, None, :, None])
    np.testing.assert_array_equal(by_query.valid_queries(3), keys)
    assert by_query.valid_keys(3) is None
    assert masks.dense(np.ones((2, 1, 3, 3), bool)).valid_keys(3) is None
    assert masks.dense(keys[:, None, :, None], offset=1).valid_queries(3) is None
