"""attention.properties.probes: which probe sees what."""

import numpy as np
import pytest

from attention.properties import findings, probes
from tests.support import probed


def test_an_overflow_is_no_leak_but_a_stabilising_maximum_is():
    """Both give NaN under huge values; one moves numbers on the way there."""

    def overflowing(x):
        with np.errstate(over="ignore"):
            return x + 0 * np.exp(np.abs(probed.next_one(x)), dtype=np.float32)

    def stabilised(x):
        scores = x @ x.swapaxes(1, 2) / probed.E
        weights = np.exp(scores - scores.max(axis=(1, 2), keepdims=True))
        weights *= np.tri(x.shape[1], dtype=np.float32)
        return weights / weights.sum(-1, keepdims=True) @ x

    assert probed.kind("huge", overflowing) == "nan-unsafe"
    assert probed.kind("edits", stabilised) in ("rounding", "clear")
    assert probed.kind("huge", stabilised) == "leak"


def test_refusals():
    def picky(x):
        if x.shape[1] > probed.T:
            raise IndexError("no such position")
        return x

    outcome = probes.run("lengths", probed.subject(picky))
    assert outcome.kind == "clear"
    assert outcome.tried == "1, 9, 11; refused: 33"

    def fixed(x):
        if x.shape[1] != probed.T:
            raise IndexError("no such length")
        return x

    assert probes.run("lengths", probed.subject(fixed)).kind == "refused"
    outcome = probes.run("edits", probed.subject(lambda x: x[:, :-1]))
    assert outcome.kind == "refused"
    assert "expected outputs [2, 12]" in outcome.tried
    assert probes.run("tiny", probed.tokens(lambda t: t)).kind == "not applicable"
    assert probes.run("gradients", probed.subject(np.sin)).kind == "not applicable"
    assert probes.run("training", probed.subject(np.sin)).kind == "not applicable"


def test_gradients():
    def of(matrix):
        return probes.run("gradients", probed.subject(None, gradient=lambda _: matrix))

    honest = np.tri(probed.T)
    assert of(honest).kind == "clear"
    for size, name in (
        (1e-3, "leak"),
        (1e-7, "rounding"),
        (np.nan, "nan-unsafe"),
        (np.inf, "nan-unsafe"),
    ):
        matrix = honest.copy()
        matrix[2, 5] = size
        outcome = of(matrix)
        assert outcome.kind == name
        assert (outcome.finding.source, outcome.finding.target) == (5, 2)


def test_some_refusals_hide_nothing():
    """What the other edits show is kept; that some were refused is said."""

    def fn(t):
        if np.any(t == 3):
            raise KeyError("not this id")
        return probed.TABLE[t] + probed.next_one(probed.TABLE[t])

    outcome = probes.run(
        "edits", probed.tokens(fn, rows=np.full((1, probed.T), 4, np.int32))
    )
    assert outcome.kind == "leak"
    assert "refused" in outcome.tried
    exits = probes.run("edits", probed.tokens(lambda t: exit()))
    assert exits.kind == "refused"


def test_rows_that_are_mixed_at_other_sizes_only():
    def fn(x, rows):
        return x + np.roll(x, 1, axis=0) if len(x) == rows else x

    for rows in (3, 8):
        assert probed.kind("batch sizes", lambda x, n=rows: fn(x, n)) == "leak"
        assert probed.kind("batch", lambda x, n=rows: fn(x, n)) == "clear"


def test_what_all_rows_hold_ends_with_one():
    """A batch that falls silent once every row has said an id."""

    def fn(t):
        done = np.logical_and.accumulate((t == t[:1]).all(0))
        return np.where(done[None, :, None], 1, probed.TABLE[t])

    assert probes.run("batch", probed.tokens(fn)).kind == "leak"


def test_a_model_that_treats_texts_by_their_first_token():
    def fn(t):
        x = probed.TABLE[t]
        return np.where((t[:, :1] == 0)[..., None], x + probed.next_one(x), x)

    outcome = probes.run("edits", probed.tokens(fn, vocab_size=probed.V, seed=1))
    assert outcome.kind == "leak"


def test_memory_and_chance_are_no_leaks():
    last = np.zeros((1, 1, probed.E))

    def remembers(x):
        nonlocal last
        out = x + 0.1 * last.mean()
        last = x
        return out

    calls = iter(range(10**6))

    def flaky(x):
        return x + (next(calls) == 8)

    for fn in (remembers, flaky):
        with pytest.raises(findings.NotDeterministic, match="not deterministic"):
            probes.run("edits", probed.subject(fn))


def test_a_function_of_nan_shows_nothing():
    outcome = probes.run("edits", probed.subject(lambda x: np.full_like(x, np.nan)))
    assert (outcome.kind, outcome.tried) == ("refused", "returned no finite number")


def test_training_mode_is_looked_at_along_time_and_across_rows():
    for fn in (lambda x: x + probed.next_one(x), lambda x: x + np.roll(x, 1, axis=0)):
        assert probed.kind("training", lambda x: x, training=fn) == "leak"
        assert probed.kind("training", fn, training=lambda x: x) == "clear"
