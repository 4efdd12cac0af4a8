"""attention.properties.shrinking: the smallest input that shows a leak."""

import chex
import numpy as np
import pytest

from attention.properties import comparison, findings, probes, shrinking
from tests.support import probed


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x + probed.next_one(x), (1, 2, probed.E)),
        (lambda x: x + np.roll(x, 1, axis=0), (2, 1, probed.E)),
        (lambda x: x - x.mean(1, keepdims=True), (1, 2, probed.E)),
    ],
    ids=["next", "rows", "mean"],
)
def test_the_smallest_pair_that_shows_it(fn, shape):
    probe = "batch"
    finding = probes.run(probe, probed.subject(fn)).finding
    smallest = shrinking.shrink(fn, finding, tolerance=findings.ROUNDING)
    chex.assert_shape([smallest.inputs, smallest.edited], shape)
    again = comparison.compare(
        probe, fn, smallest.inputs, smallest.edited, tolerance=findings.ROUNDING
    )
    assert again.kind == "leak"
    assert (again.source, again.target) == (smallest.source, smallest.target)


def test_a_leak_that_needs_its_positions_keeps_them():
    def fn(x):
        out = x.copy()
        out[:, 7:9] += x[:, 8:10][:, : out[:, 7:9].shape[1]]
        return out

    finding = probes.run("edits", probed.subject(fn)).finding
    smallest = shrinking.shrink(fn, finding, tolerance=findings.ROUNDING)
    chex.assert_shape(smallest.inputs, (1, 9, probed.E))
    assert (smallest.source, smallest.target) == (8, 7)


@pytest.mark.parametrize("least", [8, 12])
def test_a_function_of_few_lengths_keeps_few_positions_after_the_edit(least):
    """A power of two where it takes that; all where it takes none."""

    def fn(x):
        if x.shape[1] < least:
            raise RuntimeError("too short")
        return x + probed.next_one(x)

    finding = probes.run("edits", probed.subject(fn)).finding
    smallest = shrinking.shrink(fn, finding, tolerance=findings.ROUNDING)
    chex.assert_shape(smallest.inputs, (1, least, probed.E))
    assert (smallest.source, smallest.target) == (1, 0)
