"""masks.block_maps: the map of blocks against the mask itself, cut into blocks."""

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jaxtyping import Array

from attention import masks
from tests.attention.masks import algebra_test
from tests.support import mask_rules

B, N, T, S = mask_rules.B, mask_rules.N, mask_rules.T, mask_rules.S
# Of one, even, ragged, longer than the sequence.
SIZES = [(1, 1), (2, 3), (3, 4), (9, 8)]
# Those that say empty and full wherever it is true.
TIGHT = sorted(
    set(mask_rules.LEAVES)
    - {"dense", "segments_of_both", "where"}
    - {"longformer", "longformer_causal", "bigbird_causal"}
)
# Python numbers alone.
STATIC: dict[str, Callable[[Any], masks.Mask]] = {
    name: mask_rules.LEAVES[name][0]
    for name in sorted(mask_rules.LEAVES)
    if name.split("_")[0] not in ("dense", "key", "query", "lengths", "segments")
    and name != "prefix_rows"
}
STATIC["lengths"] = lambda offset: masks.lengths(4, 2, offset)


def cut(visible: np.ndarray, sizes: tuple[int, int]) -> masks.Blocks:
    """The truth about [B N T S]: any and all of each block."""
    rows = range(0, visible.shape[2], sizes[0]), range(0, visible.shape[3], sizes[1])
    some, every = (np.zeros((*visible.shape[:2], *map(len, rows)), bool) for _ in "se")
    for (i, t), (j, s) in itertools.product(*map(enumerate, rows)):
        block = visible[:, :, t : t + sizes[0], s : s + sizes[1]]
        some[:, :, i, j], every[:, :, i, j] = block.any((2, 3)), block.all((2, 3))
    return masks.Blocks(some, every)


def assert_true(
    blocks: masks.Blocks, visible: np.ndarray, sizes: tuple[int, int], *, tight: bool
) -> None:
    """Empty and full are never wrong, and with `tight` never missed."""
    truth = cut(visible, sizes)
    for x, y in zip(blocks, truth, strict=True):
        assert x.dtype == bool and x.shape[2:] == y.shape[2:]
        assert x.shape[0] in (1, B) and x.shape[1] in (1, N)
    some, every = (np.broadcast_to(x, truth.some.shape) for x in blocks)
    np.testing.assert_array_equal(some | truth.some, some)
    np.testing.assert_array_equal(every & truth.every, every)
    if tight:
        np.testing.assert_array_equal(some, truth.some)
        np.testing.assert_array_equal(every, truth.every)


def of(mask: masks.Mask, sizes: tuple[int, int]) -> masks.Blocks:
    return mask.blocks(T, S, query_block=sizes[0], key_block=sizes[1])


@pytest.mark.parametrize("bits", [32, pytest.param(64, marks=pytest.mark.x64)])
@pytest.mark.parametrize("name", mask_rules.LEAVES)
def test_leaf_at_static_and_traced_offsets(name: str, bits: int) -> None:
    assert jnp.arange(1).dtype.itemsize * 8 == bits
    make, rule = mask_rules.LEAVES[name]
    traced = jax.jit(lambda offset: [of(make(offset), sizes) for sizes in SIZES])
    with jax.numpy_dtype_promotion("strict"):
        for offset in (0, 2, -3):
            visible = mask_rules.in_order(rule, offset)
            shifted = traced(jnp.int32(offset))
            for sizes, blocks in zip(SIZES, shifted, strict=True):
                tight = name in TIGHT
                assert_true(of(make(offset), sizes), visible, sizes, tight=tight)
                assert_true(blocks, visible, sizes, tight=tight)


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(algebra_test.expressions(), st.sampled_from(SIZES))
def test_random_expressions(
    expression: mask_rules.Expression, sizes: tuple[int, int]
) -> None:
    mask, rule = expression
    visible = mask_rules.in_order(rule)
    assert_true(of(mask, sizes), visible, sizes, tight=False)


LONG = (13, 17)
NUMBERS = st.integers(0, 9)


@st.composite
def intervals(draw: st.DrawFn) -> masks.Mask:
    offset = draw(st.integers(-20, 20))
    return draw(
        st.one_of(
            st.builds(masks.causal, st.just(offset)),
            st.builds(
                masks.window, st.none() | NUMBERS, st.none() | NUMBERS, st.just(offset)
            ),
            st.builds(masks.prefix, NUMBERS, st.just(offset)),
            st.builds(masks.chunked, st.integers(1, 9), st.just(offset)),
            st.builds(masks.lengths, NUMBERS, NUMBERS, st.just(offset)),
            st.builds(
                masks.longformer, NUMBERS, st.sets(NUMBERS), offset=st.just(offset)
            ),
        )
    )


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(intervals(), st.integers(1, 14), st.integers(1, 18))
def test_intervals_are_tight(mask: masks.Mask, rows: int, columns: int) -> None:
    visible = np.asarray(mask.materialize(*LONG))
    for m, shown in ((mask, visible), (~mask, ~visible)):
        blocks = m.blocks(*LONG, query_block=rows, key_block=columns)
        # The union of window and globals alone may miss what is full.
        tight = not isinstance(mask, type(masks.causal() | masks.causal()))
        assert_true(blocks, shown, (rows, columns), tight=tight)


def test_composition_keeps_what_each_part_knows() -> None:
    sizes = (2, 2)
    causal, ahead = masks.causal(), masks.window(None, 3)
    some, every = of(causal & masks.window(0, None), sizes)
    np.testing.assert_array_equal(some[0, 0], [[1, 0, 0], [0, 1, 0]])
    assert not every.any()
    some, every = of(causal | ahead, sizes)
    np.testing.assert_array_equal(some[0, 0], [[1, 1, 1], [1, 1, 1]])
    np.testing.assert_array_equal(every[0, 0], [[1, 1, 0], [1, 1, 1]])
    some, every = of(~causal, sizes)
    np.testing.assert_array_equal(some[0, 0], [[1, 1, 1], [0, 1, 1]])
    np.testing.assert_array_equal(every[0, 0], [[0, 1, 1], [0, 0, 1]])
    # Where nothing is known of one part, the other still hides.
    some, _ = of(causal & masks.where(mask_rules.by_head), sizes)
    np.testing.assert_array_equal(some[0, 0], [[1, 0, 0], [1, 1, 0]])


@pytest.mark.parametrize("name", STATIC)
def test_python_numbers_are_decided_while_tracing(name: str) -> None:
    make = STATIC[name]

    @jax.jit
    def program(x: Array) -> Array:
        for inside in (make(0), make(2), mask):
            other = masks.window(3, 1, -1)
            for m in (inside, ~inside, inside & other, other | inside):
                blocks = of(m, (2, 4))
                assert isinstance(blocks.some, np.ndarray)
                assert isinstance(blocks.every, np.ndarray)
        return x

    mask = make(-1)
    program(jnp.zeros(()))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: masks.causal(x),
        lambda x: masks.bigbird(2, 1, 1, 1, 0, length=S, offset=x),
        lambda x: masks.longformer(1, [2], offset=x),
        lambda x: masks.prefix(x),
        lambda x: masks.lengths(x),
        lambda x: masks.segments(x[None]),
        lambda x: masks.dense(x > 0),
    ],
)
def test_arrays_are_decided_in_the_program(make: Callable[[Array], masks.Mask]) -> None:
    @jax.jit
    def program(x: Array) -> masks.Blocks:
        blocks = of(make(x) & masks.window(4, 4), (2, 4))
        assert isinstance(blocks.some, jax.Array)
        assert isinstance(blocks.every, jax.Array)
        return blocks

    program(jnp.int32(3))


def test_rows_and_heads_only_where_something_depends_on_them() -> None:
    for mask, shape in (
        (masks.causal(), (1, 1)),
        (masks.causal() & masks.lengths(mask_rules.KEY_LENGTHS), (B, 1)),
        (masks.prefix(jnp.array([1, 2])), (B, 1)),
        (masks.segments(mask_rules.IDS[0]), (1, 1)),
        (masks.segments(mask_rules.IDS[0], mask_rules.IDS), (B, 1)),
        (masks.dense(mask_rules.ARRAY[:1, :, :T]), (1, N)),
        (masks.dense(mask_rules.ARRAY[:, :1, :1]), (B, 1)),
        (masks.where(mask_rules.by_head), (1, 1)),
    ):
        for x in of(mask, (2, 2)):
            assert x.shape == (*shape, 2, 3)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_documents_in_a_row_are_tight(dtype: type) -> None:
    mask = masks.segments(np.repeat(np.arange(4), [3, 8, 1, 5]).astype(dtype))
    for m, tight in ((mask, True), (mask & masks.causal(), False)):
        visible = np.asarray(m.materialize(17, 17))
        for size in (2, 5):
            blocks = m.blocks(17, 17, query_block=size, key_block=size)
            assert_true(blocks, visible, (size, size), tight=tight)


def test_what_a_dense_array_does_not_tell_is_partial() -> None:
    array = np.zeros((T, S), bool)
    unknown = [
        masks.dense(array, 1),
        masks.dense(array, jnp.int32(0)),
        masks.dense(array[:, :-1]),
        masks.dense(array[:-1]),
    ]
    for mask in unknown:
        some, every = of(mask, (2, 3))
        assert some.all() and not every.any()
    for known in (array, array[:1], array[:, :1], array[0]):
        for sizes in ((2, 3), (3, 4)):
            assert not of(masks.dense(known), sizes).some.any()
            assert of(masks.dense(~known), sizes).every.all()
    # One row holds for all, at any offset.
    assert not of(masks.dense(array[:1], 5), (2, 3)).some.any()


@pytest.mark.parametrize("name", mask_rules.LEAVES)
def test_empty_dimensions(name: str) -> None:
    mask = mask_rules.LEAVES[name][0](1)
    for length, keys in ((0, S), (T, 0), (0, 0)):
        blocks = mask.blocks(length, keys, query_block=2, key_block=4)
        for x in blocks:
            assert x.shape[2:] == (-(-length // 2), -(-keys // 4))


def test_data_without_positions() -> None:
    ids = np.zeros((B, 0), int)
    assert not of(masks.segments(ids), (2, 2)).some.any()
    assert not of(masks.segments(mask_rules.IDS, offset=99), (2, 2)).some.any()
    assert not of(masks.lengths(0), (2, 2)).some.any()
    assert not of(masks.lengths(None, 3, offset=-T), (2, 2)).some.any()
    assert not of(masks.lengths(None, 0, offset=-1), (2, 2)).some.any()


def test_blocks_that_lie_partly_in_the_data() -> None:
    few, many = np.array([9, 1, 1]), np.ones(S, int)
    for mask in (
        masks.segments(few),
        masks.segments(few, many),
        masks.segments(many, few),
        masks.segments(many, offset=-1),
        masks.segments(many, offset=3),
        masks.segments(many[:5], offset=jnp.int32(2)),
    ):
        shown = np.asarray(mask.materialize(T, S))
        for sizes in ((1, 2), (2, 2), (3, 4)):
            assert_true(of(mask, sizes), shown, sizes, tight=True)


def sizes_in(jaxpr: Any) -> list[int]:
    """How many elements each intermediate has, those of inner programs too."""
    found = []
    for equation in jaxpr.eqns:
        found += [v.aval.size for v in equation.outvars]
        for inner in jex.core.jaxprs_in_params(equation.params):
            found += sizes_in(inner)
    return found


def test_nothing_is_as_large_as_queries_times_keys() -> None:
    length, block = 2**14, 2**7
    blocks = length // block
    numbers = jnp.array([5, length // 2])

    def program(offset: Array, ids: Array) -> masks.Blocks:
        mask = (
            masks.segments(ids, offset=offset) & masks.lengths(numbers, numbers, offset)
            | masks.prefix(numbers, offset) & ~masks.chunked(50, offset)
            | masks.longformer(9, [3, 70], offset=offset)
            | masks.bigbird(block, 3, 1, 3, 0, offset=offset)
            | masks.bigbird(64, 2, 1, 3, 0, causal=True, offset=offset)
        )
        return mask.blocks(length, length, query_block=block, key_block=block)

    jaxpr = jax.make_jaxpr(program)(jnp.int32(0), jnp.zeros((2, length), jnp.int32))
    found = sizes_in(jaxpr.jaxpr)
    assert 0 < max(found) <= 2 * max(length, blocks**2)


def test_long_sequences_stay_within_int32() -> None:
    length = 2**30
    for mask, some, every in (
        (masks.causal(), [[1, 0], [1, 1]], [[0, 0], [1, 0]]),
        (masks.window(2**40, 2**40), [[1, 1], [1, 1]], [[1, 1], [1, 1]]),
        (
            masks.bigbird(2**29, 2**40 + 1, 0, 3, 0),
            [[1, 1], [1, 1]],
            [[1, 1], [1, 1]],
        ),
        (masks.chunked(2**29), [[1, 0], [0, 1]], [[1, 0], [0, 1]]),
    ):
        blocks = mask.blocks(length, length, query_block=2**29, key_block=2**29)
        np.testing.assert_array_equal(blocks.some[0, 0], some)
        np.testing.assert_array_equal(blocks.every[0, 0], every)
    assert of(masks.causal(), (2**40, 2**40)).some.shape == (1, 1, 1, 1)


def test_blocks_have_positions() -> None:
    with pytest.raises(ValueError, match="query_block must be at least 1, got 0"):
        of(masks.causal(), (0, 1))
    with pytest.raises(ValueError, match="key_block must be at least 1, got -2"):
        of(masks.causal(), (1, -2))
