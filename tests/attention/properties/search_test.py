"""attention.properties.search: the smallest input that shows a leak."""

import weakref

import numpy as np
import pytest

from attention.properties import findings, probes, search
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
    smallest = search.shrink(fn, finding, tolerance=findings.ROUNDING)
    assert smallest.inputs.shape == shape
    again = findings.compare(
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
    smallest = search.shrink(fn, finding, tolerance=findings.ROUNDING)
    assert smallest.inputs.shape == (1, 9, probed.E)
    assert (smallest.source, smallest.target) == (8, 7)


@pytest.mark.parametrize("least", [8, 12])
def test_a_function_of_few_lengths_keeps_few_positions_after_the_edit(least):
    """A power of two where it takes that; all where it takes none."""

    def fn(x):
        if x.shape[1] < least:
            raise RuntimeError("too short")
        return x + probed.next_one(x)

    finding = probes.run("edits", probed.subject(fn)).finding
    smallest = search.shrink(fn, finding, tolerance=findings.ROUNDING)
    assert smallest.inputs.shape == (1, least, probed.E)
    assert (smallest.source, smallest.target) == (1, 0)


def test_equal_inputs_show_nothing():
    x = np.zeros((1, 2, 3), np.float32)
    with pytest.raises(ValueError, match="equal"):
        findings.compare("edits", np.sin, x, x, tolerance=0.0)


def edits_of(inputs, made):
    """One edit of every position; `made` holds a weak reference to each."""
    for position in range(inputs.shape[1]):
        edited = inputs.copy()
        edited[:, position] += 1 + position
        made.append(weakref.ref(edited))
        yield findings.Edit(
            position, np.ones(len(inputs), bool), edited, since=position
        )


def test_only_the_worst_finding_is_kept():
    """Each holds a whole batch; the first of equals is the one to name."""
    inputs, made = np.ones((1, 50, 3), np.float32), []
    seen = search.examine(
        "edits",
        lambda x: x + probed.next_one(x),
        inputs,
        edits_of(inputs, made),
        tolerance=findings.ROUNDING,
    )
    assert (seen.finding.source, seen.finding.target) == (1, 0)
    assert [i for i, edited in enumerate(made) if edited() is not None] == [1]


def test_of_rounding_the_largest_share_is_kept():
    def fn(x):
        out = np.zeros_like(x)
        out[:, 0] = 1e-7 * x[:, 3]
        out[:, [1, 2]] = np.array([[1e-6], [4e-6]], np.float32) * x[:, 5:6]
        return out

    finding = probes.run("edits", probed.subject(fn)).finding
    assert (finding.kind, finding.source, finding.target) == ("rounding", 5, 2)
    assert finding.share == pytest.approx(4e-6, rel=1e-3)


def test_a_function_that_refuses_every_edit_is_soon_left_alone():
    inputs, made = np.ones((1, 10_000, 1), np.float32), []

    def fn(x):
        if np.any(x != 1):
            raise IndexError("only ones")
        return x

    with pytest.raises(findings.Refused, match="only ones"):
        search.examine("edits", fn, inputs, edits_of(inputs, made), tolerance=0.0)
    assert len(made) <= 101
