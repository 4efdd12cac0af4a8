"""attention.search: the smallest input that shows a leak."""

import numpy as np
import pytest

from attention import leaks, probes, search
from tests import probed


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
    smallest = search.shrink(fn, finding, tolerance=leaks.ROUNDING)
    assert smallest.inputs.shape == shape
    again = leaks.compare(
        probe, fn, smallest.inputs, smallest.edited, tolerance=leaks.ROUNDING
    )
    assert again.kind == "leak"
    assert (again.source, again.target) == (smallest.source, smallest.target)


def test_a_leak_that_needs_its_positions_keeps_them():
    def fn(x):
        out = x.copy()
        out[:, 7:9] += x[:, 8:10][:, : out[:, 7:9].shape[1]]
        return out

    finding = probes.run("edits", probed.subject(fn)).finding
    smallest = search.shrink(fn, finding, tolerance=leaks.ROUNDING)
    assert smallest.inputs.shape == (1, 9, probed.E)
    assert (smallest.source, smallest.target) == (8, 7)


def test_equal_inputs_show_nothing():
    x = np.zeros((1, 2, 3), np.float32)
    with pytest.raises(ValueError, match="equal"):
        leaks.compare("edits", np.sin, x, x, tolerance=0.0)
