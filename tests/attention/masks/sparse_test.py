"""attention.masks.sparse: longformer and bigbird beside their papers' rules."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from attention import masks
from attention.masks import sparse
from tests.attention.masks import block_maps_test
from tests.support import mask_rules

SIZES = [(5, 7), (4, 4), (2, 4), (4, 1), (8, 12), (64, 64)]
BIGBIRDS: dict[str, dict[str, Any]] = {
    "centred": dict(block=4, window=3, globals=1, random=2, seed=0, length=37),
    "no random": dict(block=4, window=5, globals=2, random=0, seed=0, length=37),
    "all random": dict(block=4, window=1, globals=0, random=9, seed=3, length=17),
    "no globals": dict(
        block=3, window=1, globals=0, random=2, seed=2**32 - 1, length=9
    ),
    "window alone": dict(block=3, window=7, globals=0, random=1, seed=0, length=9),
    "globals alone": dict(block=4, window=1, globals=99, random=2, seed=1, length=37),
    "causal": dict(block=4, window=2, globals=1, random=2, seed=5, causal=True),
    "own block": dict(block=5, window=1, globals=0, random=1, seed=0, causal=True),
}
KEPT = [
    *([0, 1, 5], [0, 1, 5], [2, 4, 7], [3, 4, 8], [2, 4, 5]),
    *([0, 4, 5], [2, 4, 6], [3, 7, 8], [2, 5, 8], [0, 7, 9]),
]


def visible(mask: masks.Mask, T: int, S: int) -> np.ndarray:
    # One program compiles faster than each of its operations alone.
    return np.asarray(jax.jit(lambda: mask.materialize(T, S))())[0, 0]


def own_blocks(mask: masks.Mask, block: int, T: int, S: int) -> np.ndarray:
    """Which blocks of its own a bigbird sees, without a program."""
    some, _ = mask.blocks(T, S, query_block=block, key_block=block)
    assert isinstance(some, np.ndarray)
    return some[0, 0]


@pytest.mark.parametrize("name", BIGBIRDS)
def test_bigbird_equals_the_loop_of_its_paper(name: str) -> None:
    numbers = BIGBIRDS[name]
    T, S = 41, 37
    rule = mask_rules.bigbird(**numbers)
    traced = jax.jit(lambda o: masks.bigbird(**numbers, offset=o).materialize(T, S))
    for offset in (0, 6, -9):
        expected = np.array(
            [[rule(i + offset, j, 0, 0) for j in range(S)] for i in range(T)]
        )
        mask = masks.bigbird(**numbers, offset=offset)
        np.testing.assert_array_equal(visible(mask, T, S), expected)
        np.testing.assert_array_equal(traced(jnp.int32(offset))[0, 0], expected)


@pytest.mark.parametrize("name", BIGBIRDS)
def test_blocks_of_bigbird_are_exact_at_any_size_and_alignment(name: str) -> None:
    numbers = BIGBIRDS[name]
    T, S = 41, 37
    rows, columns = SIZES[0]

    @jax.jit
    def program(offset: Array) -> masks.Blocks:
        mask = masks.bigbird(**numbers, offset=offset)
        return mask.blocks(T, S, query_block=rows, key_block=columns)

    for offset in (0, 6, -9):
        mask = masks.bigbird(**numbers, offset=offset)
        shown = visible(mask, T, S)[None, None]
        maps = [mask.blocks(T, S, query_block=q, key_block=k) for q, k in SIZES]
        for sizes, blocks in zip(SIZES, maps, strict=True):
            tight = not numbers.get("causal", False)
            block_maps_test.assert_true(blocks, shown, sizes, tight=tight)
        # NumPy and jax draw the same blocks.
        for x, y in zip(maps[0], program(jnp.int32(offset)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_number_of_blocks_that_a_query_sees() -> None:
    block, total = 4, 16
    mask = masks.bigbird(block, 3, 2, 3, 11)
    seen = own_blocks(mask, block, block * total, block * total)
    assert seen[:2].all() and seen[:, :2].all()
    middle = np.arange(2, total)
    assert seen[middle, middle].all() and seen[middle[1:], middle[:-1]].all()
    # Global, window, random; the windows of blocks 2 and 15 overlap others or end.
    assert seen[3:-1].sum(1).tolist() == [8] * (total - 4)
    assert seen[[2, -1]].sum(1).tolist() == [7, 7]
    causal = masks.bigbird(block, 3, 2, 3, 11, causal=True)
    seen = own_blocks(causal, block, block * total, block * total)
    assert seen.sum(1).tolist() == [min(q + 1, 8) for q in range(total)]


def test_every_admissible_block_is_drawn() -> None:
    """case B098: all of them, from one end to the other, and none of the future."""
    length, block = 64, 4
    for causal in (False, True):
        drawn = np.zeros((16, 16), int)
        for seed in range(500):
            numbers = dict(block=block, window=1, globals=1, seed=seed, causal=causal)
            every = masks.bigbird(**numbers, random=2)
            drawn += own_blocks(every, block, length, length)
        admissible = np.ones((16, 16), bool)
        if causal:
            admissible &= np.tri(16, dtype=bool)
            admissible[0] = np.arange(16) == 0
        else:
            admissible[0] = True
        np.testing.assert_array_equal(drawn > 0, admissible)
        # Two draws of 14 blocks: about 71 of 500 each, whichever it is.
        row = drawn[-1, 1:-1]
        assert row.min() > 40 and row.max() < 110


def test_the_draw_is_kept() -> None:
    """A run that is taken up again, with a newer version, sees the same blocks."""
    seen = own_blocks(masks.bigbird(4, 1, 0, 2, 0), 4, 40, 40)
    assert [np.flatnonzero(row).tolist() for row in seen] == KEPT


def test_seeds_and_blocks_draw_independently() -> None:
    draws = [
        own_blocks(masks.bigbird(4, 1, 0, 2, seed), 4, 256, 256) for seed in (0, 1)
    ]
    assert (draws[0] != draws[1]).sum() > 64
    # No row of one seed is the row of another query block shifted or copied.
    rows = {row.tobytes() for draw in draws for row in draw}
    assert len(rows) > 120


def test_causal_forms_never_see_the_future() -> None:
    future = ~np.tri(40, 40, 3, dtype=bool)
    for mask in (
        masks.longformer(5, [0, 7, 39], causal=True, offset=3),
        masks.bigbird(4, 2, 3, 2, 0, causal=True, offset=3),
        masks.bigbird(7, 1, 1, 9, 1, causal=True, offset=3),
    ):
        assert not visible(mask, 40, 40)[future].any()


def test_a_causal_draw_needs_no_length() -> None:
    mask = masks.bigbird(4, 2, 1, 2, 3, causal=True)
    whole = visible(mask, 40, 40)
    for T, S in ((13, 13), (40, 11), (7, 40)):
        np.testing.assert_array_equal(visible(mask, T, S), whole[:T, :S])
    at = mask.at(np.arange(40), np.arange(40))
    np.testing.assert_array_equal(at[0, 0], whole)


def test_positions_see_what_they_see_in_the_whole() -> None:
    for mask in (
        masks.bigbird(4, 3, 1, 2, 3, length=40),
        masks.bigbird(4, 2, 1, 2, 3, causal=True),
        masks.longformer(2, [3, 30]),
    ):
        whole = visible(mask, 40, 40)
        queries, keys = np.array([39, 4, 17]), np.array([[0, 9, 38, 12, -1]])
        at = np.asarray(mask.at(queries, keys))[0, 0]
        np.testing.assert_array_equal(at[:, :4], whole[queries[:, None], keys[:, :4]])
        assert not at[:, 4].any()


def test_length_is_that_of_the_keys_unless_given() -> None:
    numbers = dict(block=4, window=1, globals=0, random=2, seed=1)
    mask, fixed = masks.bigbird(**numbers), masks.bigbird(**numbers, length=40)
    np.testing.assert_array_equal(visible(mask, 24, 40), visible(fixed, 24, 40))
    np.testing.assert_array_equal(
        visible(fixed, 24, 16), visible(fixed, 24, 40)[:, :16]
    )
    np.testing.assert_array_equal(
        own_blocks(mask, 4, 24, 40), own_blocks(fixed, 4, 24, 40)
    )
    assert (visible(mask, 24, 40)[:, :16] != visible(mask, 24, 16)).any()
    places = np.arange(24), np.arange(16)
    both = mask & ~masks.causal()
    np.testing.assert_array_equal(
        both.at(*places, length=40)[0, 0],
        visible(fixed & ~masks.causal(), 24, 40)[:, :16],
    )
    with pytest.raises(ValueError, match="pass length= to bigbird or to at"):
        both.at(*places)
    # Where nothing is drawn there is nothing to ask for.
    assert masks.bigbird(4, 1, 1, 0, 0).at(*places).any()


def test_strata_of_many_blocks_stay_within_int32() -> None:
    for admissible, random in itertools.product((0, 5, 2**30 - 1), (1, 7, 40_000)):
        mask = masks.bigbird(1, 1, 0, random, 0)
        assert isinstance(mask, sparse.BigBird)
        for stratum in (0, 1, random // 2, random):
            cut = mask._stratum(np.full(1, admissible, np.int32), stratum)
            assert cut.tolist() == [admissible * stratum // random]


def test_far_positions() -> None:
    length, block, query = 2**20, 64, 2**14 - 9
    mask = masks.bigbird(block, 3, 1, 3, 9, length=length)
    near = range(query - 1, query + 2)
    drawn = mask_rules.random_blocks(query, near, 1, 3, 9, length // block)
    seen = mask.at(np.array([query * block + 5]), np.arange(0, length, block))
    assert np.flatnonzero(seen).tolist() == sorted([0, *near, *drawn])


def test_global_positions_are_a_set() -> None:
    # Sets of these two keep the order in which they came.
    mask = masks.longformer(2, [8, 0, 8])
    assert mask == masks.longformer(2, (0, 8))
    assert hash(mask) == hash(masks.longformer(2, {0, 8}))
    assert mask != masks.longformer(2, [1])
    np.testing.assert_array_equal(
        visible(masks.longformer(2, []), 9, 9), visible(masks.window(2, 2), 9, 9)
    )
    # A position past the end is nobody's.
    np.testing.assert_array_equal(
        visible(masks.longformer(2, [9, 10**6]), 9, 9),
        visible(masks.window(2, 2), 9, 9),
    )


def test_numbers_are_static() -> None:
    for make in (
        lambda: masks.bigbird(4, 3, 1, 2, 0, length=64),
        lambda: masks.bigbird(4, 2, 1, 2, 0, causal=True),
        lambda: masks.longformer(3, [1, 2], causal=True),
    ):
        assert make() == make() and hash(make()) == hash(make())
        assert not jax.tree.leaves(make())
    leaves = jax.tree.leaves(masks.bigbird(4, 2, 1, 2, 0, causal=True, offset=3))
    assert leaves == [3, 3]
    assert masks.bigbird(4, 3, 1, 2, 0) != masks.bigbird(4, 3, 1, 2, 1)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: masks.longformer(-1, []), ValueError, "window must be at least 0"),
        (
            lambda: masks.longformer(1, [2, -3]),
            ValueError,
            "global_positions must be at least 0, got -3",
        ),
        (lambda: masks.longformer(1, [mask_rules.NUMBER]), TypeError, "float"),
        (
            lambda: masks.bigbird(0, 1, 0, 0, 0),
            ValueError,
            "block must be at least 1, got 0",
        ),
        (
            lambda: masks.bigbird(1, 0, 0, 0, 0, causal=True),
            ValueError,
            "window must be at least 1, got 0",
        ),
        (
            lambda: masks.bigbird(1, 2, 0, 0, 0),
            ValueError,
            "window must be odd unless causal, got 2",
        ),
        (lambda: masks.bigbird(1, 1, -1, 0, 0), ValueError, "globals must be at least"),
        (lambda: masks.bigbird(1, 1, 0, -1, 0), ValueError, "random must be at least"),
        (
            lambda: masks.bigbird(1, 1, 0, 0, -1),
            ValueError,
            r"seed must be at least 0 and less than 2\*\*32, got -1",
        ),
        (lambda: masks.bigbird(1, 1, 0, 0, 2**32), ValueError, "got 4294967296"),
        (
            lambda: masks.bigbird(1, 1, 0, 0, 0, length=-1),
            ValueError,
            "length must be at least 0, got -1",
        ),
    ],
)
def test_errors_say_what_was_expected_and_what_came(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
