"""attention.masks.algebra: composition, and masks as values of jax."""

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
from tests.support import mask_rules


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> mask_rules.Expression:
    kind = draw(st.sampled_from(["leaf", "&", "|", "~"])) if depth else "leaf"
    if kind == "leaf":
        make, rule = mask_rules.LEAVES[draw(mask_rules.LEAF_NAMES)]
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
def test_random_expressions_equal_the_double_loop(
    expression: mask_rules.Expression,
) -> None:
    mask, rule = expression
    expected = mask_rules.in_order(rule)
    mask_rules.assert_same(
        mask.materialize(
            mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
        ),
        expected,
    )
    places = np.arange(mask_rules.T), np.arange(mask_rules.S)
    mask_rules.assert_same(
        mask.at(*places, batch=jnp.arange(mask_rules.B), head=jnp.arange(mask_rules.N)),
        expected,
    )
    # What is said to be invalid is seen by nobody, and sees nobody.
    keys, queries = mask.valid_keys(mask_rules.S), mask.valid_queries(mask_rules.T)
    if keys is not None:
        unseen = np.broadcast_to(~keys[:, None, None], expected.shape)
        assert not expected[unseen].any()
    if queries is not None:
        blind = np.broadcast_to(~queries[:, None, :, None], expected.shape)
        assert not expected[blind].any()


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(expressions(depth=1), expressions(depth=1))
def test_laws_of_composition(
    first: mask_rules.Expression, second: mask_rules.Expression
) -> None:
    a, b = first[0], second[0]
    for left, right in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & b, b & a),
        (a & (a | b), a),
    ):
        shape = (mask_rules.B, mask_rules.N, mask_rules.T, mask_rules.S)
        visible = left.materialize(
            mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
        )
        expected = right.materialize(
            mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
        )
        mask_rules.assert_same(visible, np.broadcast_to(expected, shape))


def test_valid_keys_and_queries() -> None:
    mask = masks.lengths(mask_rules.KEY_LENGTHS, mask_rules.QUERY_LENGTHS, offset=2)
    keys = np.arange(mask_rules.S) < mask_rules.KEY_LENGTHS[:, None]
    queries = np.arange(mask_rules.T) + 2 < mask_rules.QUERY_LENGTHS[:, None]
    np.testing.assert_array_equal(mask.valid_keys(mask_rules.S), keys)
    np.testing.assert_array_equal(mask.valid_queries(mask_rules.T), queries)
    early = masks.lengths(3, 2, offset=-1)
    np.testing.assert_array_equal(
        early.valid_queries(mask_rules.T), [[False, True, True, False]]
    )
    np.testing.assert_array_equal(
        (masks.causal() & mask).valid_keys(mask_rules.S), keys
    )
    np.testing.assert_array_equal(
        (mask & masks.causal()).valid_queries(mask_rules.T), queries
    )
    both = masks.lengths(4) & mask
    np.testing.assert_array_equal(
        both.valid_keys(mask_rules.S), keys & (np.arange(mask_rules.S) < 4)
    )
    either = masks.lengths(4) | mask
    np.testing.assert_array_equal(
        either.valid_keys(mask_rules.S), keys | (np.arange(mask_rules.S) < 4)
    )
    assert either.valid_queries(mask_rules.T) is None
    for unknown in (
        masks.causal(),
        masks.causal() | mask,
        mask | masks.causal(),
        ~mask,
    ):
        assert unknown.valid_keys(mask_rules.S) is None
        assert unknown.valid_queries(mask_rules.T) is None


def test_nothing_is_expanded_that_nothing_depends_on() -> None:
    assert masks.causal().materialize(
        mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
    ).shape[:2] == (
        1,
        1,
    )
    mask = masks.causal() & masks.lengths(mask_rules.KEY_LENGTHS)
    assert mask.materialize(
        mask_rules.T, mask_rules.S, num_heads=mask_rules.N
    ).shape == (mask_rules.B, 1, mask_rules.T, mask_rules.S)
    assert masks.lengths(mask_rules.KEY_LENGTHS).materialize(
        mask_rules.T, mask_rules.S
    ).shape == (mask_rules.B, 1, mask_rules.T, mask_rules.S)
    rows, heads = jnp.arange(mask_rules.B), jnp.arange(mask_rules.N)
    shared = (
        masks.dense(mask_rules.SHARED_ARRAY)
        & masks.lengths(4)
        & masks.segments(mask_rules.IDS[0])
    )
    visible = shared.at(
        np.arange(mask_rules.T), np.arange(mask_rules.S), batch=rows, head=heads
    )
    assert visible.shape == (1, 1, mask_rules.T, mask_rules.S)
    padding = masks.dense(mask_rules.ARRAY[:, :1, :1])
    assert padding.materialize(mask_rules.T, mask_rules.S).shape == (
        mask_rules.B,
        1,
        1,
        mask_rules.S,
    )
    assert (padding & masks.causal()).materialize(mask_rules.T, mask_rules.S).shape == (
        mask_rules.B,
        1,
        mask_rules.T,
        mask_rules.S,
    )


def test_dense_is_not_gathered_in_order() -> None:
    mask = masks.dense(mask_rules.ARRAY[:, :, : mask_rules.T])
    program = jax.make_jaxpr(
        lambda m: m.materialize(
            mask_rules.T, mask_rules.S, batch_size=mask_rules.B, num_heads=mask_rules.N
        )
    )
    assert "gather" not in str(program(mask))
    assert "gather" in str(program(masks.dense(mask_rules.ARRAY, jnp.int32(1))))


def test_building_a_mask_computes_nothing() -> None:
    program = jax.make_jaxpr(lambda m, n: ~(masks.causal(n) & masks.lengths(m)))
    assert not program(jnp.array([1, 2]), jnp.int32(1)).eqns


def test_equal_masks_do_not_retrace() -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def causal(mask: masks.Mask) -> Array:
        return mask.materialize(mask_rules.T, mask_rules.S)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def shifted(mask: masks.Mask) -> Array:
        return mask.materialize(mask_rules.T, mask_rules.S)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def padded(mask: masks.Mask) -> Array:
        return mask.materialize(mask_rules.T, mask_rules.S)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def by_predicate(mask: masks.Mask) -> Array:
        return mask.materialize(mask_rules.T, mask_rules.S)

    for _ in range(2):
        causal(masks.causal())
        by_predicate(masks.where(mask_rules.by_head) | masks.chunked(2))
    for offset in (3, 4, jnp.int32(0), np.int32(5), jnp.array(2, jnp.int32)):
        np.testing.assert_array_equal(
            shifted(masks.causal(offset))[0, 0],
            np.tri(mask_rules.T, mask_rules.S, int(offset), bool),
        )
    narrow = jax.tree.leaves(masks.causal(np.int8(3)) & masks.lengths(np.uint8(3)))
    assert all(leaf.dtype == jnp.int32 for leaf in narrow)
    for lengths in ([1, 2], [3, 4], np.array([5, 6])):
        padded(masks.causal() & masks.lengths(jnp.array(lengths)))


def test_static_masks_are_values() -> None:
    for make in (
        masks.causal,
        lambda: masks.window(1, None, 3) & masks.prefix(2),
        lambda: ~masks.where(mask_rules.by_head),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
    assert masks.causal() != masks.causal(1)
    assert masks.window(1, 2) != masks.window(2, 1)
    structures: list[Any] = [jax.tree.structure(masks.chunked(n)) for n in (2, 2, 3)]
    assert structures[0] == structures[1] != structures[2]
    assert repr(masks.window(1, 0)) == "Window(offset=None, left=1, right=0)"


@pytest.mark.parametrize("name", mask_rules.LEAVES)
def test_pytree_round_trip(name: str) -> None:
    mask = mask_rules.LEAVES[name][0](1) & ~mask_rules.LEAVES[name][0](0)
    leaves, structure = jax.tree.flatten(mask)
    assert all(leaf.dtype in (np.bool_, np.int32, np.int64) for leaf in leaves)
    hash(structure)
    rebuilt = jax.tree.unflatten(structure, leaves)
    chex.assert_trees_all_equal_structs(mask, rebuilt)
    # Transformations rebuild masks around placeholders.
    jax.tree.map(lambda leaf: object(), mask)


def test_transformations_take_masks_as_arguments() -> None:
    mask = masks.causal(jnp.int32(1)) & masks.lengths(mask_rules.KEY_LENGTHS)
    expected = np.asarray(mask.materialize(mask_rules.T, mask_rules.S))

    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, mask)
    per_row = jax.vmap(
        lambda m: m.materialize(mask_rules.T, mask_rules.S)[0, 0], in_axes=(axes,)
    )(mask)
    np.testing.assert_array_equal(per_row, expected[:, 0])

    def step(mask: masks.Mask, query: Array) -> tuple[masks.Mask, Array]:
        return mask, mask.at(query[None], jnp.arange(mask_rules.S))

    rows = jax.lax.scan(step, mask, jnp.arange(mask_rules.T))[1]
    np.testing.assert_array_equal(rows[:, :, 0, 0].swapaxes(0, 1), expected[:, 0])

    def total(x: Array, mask: masks.Mask) -> Array:
        return jnp.where(mask.materialize(mask_rules.T, mask_rules.S), x, 0.0).sum()

    gradient = jax.jit(jax.grad(jax.checkpoint(total)))(
        jnp.ones((mask_rules.B, 1, mask_rules.T, mask_rules.S)), mask
    )
    np.testing.assert_array_equal(gradient, expected)

    with jax.disable_jit():
        np.testing.assert_array_equal(
            mask.materialize(mask_rules.T, mask_rules.S), expected
        )
