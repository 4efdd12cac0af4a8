"""attention.properties.examination: of many edits, the worst that they show."""

import weakref

import numpy as np
import pytest

from attention.properties import calls, edits, examination, probes
from tests.support import probed


def every_position(inputs, made):
    """One edit of every position; `made` holds a weak reference to each."""
    for position in range(inputs.shape[1]):
        edited = inputs.copy()
        edited[:, position] += 1 + position
        made.append(weakref.ref(edited))
        yield edits.Edit(position, np.ones(len(inputs), bool), edited, since=position)


def test_only_the_worst_finding_is_kept():
    """Each holds a whole batch; the first of equals is the one to name."""
    inputs, made = np.ones((1, 50, 3), np.float32), []
    seen = examination.examine(
        "edits",
        probed.subject(lambda x: x + probed.next_one(x)),
        edits.Series(inputs, every_position(inputs, made)),
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

    with pytest.raises(calls.Refused, match="only ones"):
        examination.examine(
            "edits",
            probed.subject(fn),
            edits.Series(inputs, every_position(inputs, made)),
        )
    assert len(made) <= 101
