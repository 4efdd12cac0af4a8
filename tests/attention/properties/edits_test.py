"""attention.properties.edits and probes: what is tried."""

import dataclasses

import chex
import numpy as np

from attention.properties import edits, probes, subjects
from tests.support import probed


def calls_of(probe, made):
    """The inputs of all calls, the first of them unedited."""
    calls = []

    def fn(x):
        calls.append(x)
        return np.ones((*x.shape[:2], 1), np.float32)

    outcome = probes.run(probe, dataclasses.replace(made, fn=fn))
    return calls, outcome


def test_every_token_takes_every_position():
    """One position at a time, in all rows; together every other id."""
    made = probed.tokens(np.sin)
    (row,) = subjects.random_rows(made, 1, probed.T)
    base, edited = edits.in_all_rows(
        made, row[None], edits.ordinary_replacements(made, probed.V - 1)
    )
    seen = set()
    for position, rows, call, since in edited:
        assert rows.all() and since == position
        elsewhere = np.arange(probed.T) != position
        np.testing.assert_array_equal(call[:, elsewhere], base[:, elsewhere])
        assert np.all(call[:, position] != row[position])
        seen |= {(position, int(token)) for token in call[:, position]}
    assert len(seen) == probed.T * (probed.V - 1)


def test_every_token_comes_first():
    base, edited = edits.behind_each_first_token(
        np.arange(probed.T) % probed.V, probed.V - 1, vocab_size=probed.V
    )
    assert len(set(base[:, 0].tolist())) == probed.V - 1
    assert [edit.position for edit in edited] == [1, probed.T // 2, probed.T - 1]


def test_the_budget_is_kept_but_for_one_edit_per_position():
    _, outcome = calls_of("edits", probed.tokens(None, token_edit_budget=3 * probed.T))
    assert outcome.tried.startswith(
        f"1 x {probed.T} positions, 3 replacements each of 10"
    )
    assert "nothing moved" in outcome.tried
    _, outcome = calls_of("edits", probed.tokens(None, token_edit_budget=1))
    assert f"{probed.T} positions, 1 replacements each" in outcome.tried


def test_a_cap_of_outputs_is_said():
    """A million ids: the logits of 10,000 edits would take an hour."""
    made = probed.tokens(None, vocab_size=2**20)
    _, outcome = calls_of("edits", made)
    assert outcome.tried.startswith(f"1 x {probed.T} positions, 28 replacements each")
    assert "for more would compare over 4e+09 numbers of output" in outcome.tried
    for fewer in ({"token_edit_budget": 28 * probed.T}, {"vocab_size": 11}):
        _, outcome = calls_of("edits", dataclasses.replace(made, **fewer))
        assert "for more" not in outcome.tried


def test_calls_are_bounded_and_all_of_one_shape():
    """Many ids: several calls per position, the last filled up."""
    made = probed.tokens(np.sin, vocab_size=2000, length=20)
    rows = subjects.random_rows(made, 1, 20)
    base, edited = edits.in_all_rows(
        made, rows, edits.ordinary_replacements(made, 1999)
    )
    edited = list(edited)
    chex.assert_equal_shape([base, *(edit.inputs for edit in edited)])
    assert base.size <= 2**13
    ids = {int(i) for edit in edited if edit.position == 3 for i in edit.inputs[:, 3]}
    assert len(ids) == 1999


def test_rows_of_tokens_hold_many_ids_or_repeat_few():
    rows = subjects.random_rows(probed.tokens(None), 4, probed.V)
    assert [len(set(row.tolist())) for row in rows[::2]] == [probed.V, probed.V]
    assert all(len(set(row.tolist())) <= 4 for row in rows[1::2])


def test_lengths_and_batch_sizes():
    calls, outcome = calls_of("lengths", probed.subject(None))
    assert {call.shape[1] for call in calls} == {1, 9, 11, 33}
    assert outcome.tried == "1, 9, 11, 33"
    calls, _ = calls_of("batch sizes", probed.subject(None))
    assert {len(call) for call in calls} == {1, 2, 3, 8}
    assert probes.other_lengths(64) == [1, 33, 61, 129]
    assert probes.other_lengths(2) == [1, 5]


def test_one_row_is_edited_at_a_time():
    calls, _ = calls_of("batch", probed.subject(None))
    base = next(call for call in calls if np.any(call[0] != call[1]))
    changed = [np.argwhere((call != base).any(-1)).tolist() for call in calls]
    single = [rows for rows in changed if len(rows) == 1]
    assert [[[t % 4, t]] for t in range(probed.T)] == single


def test_a_batch_size_that_is_refused():
    """All copies at once, two of each, or the rows as they are."""
    for most, size in ((99, 10), (5, 2), (1, 1)):

        def fn(x, most=most):
            if len(x) > most:
                raise IndexError("too many rows")
            return x

        made = probed.tokens(fn)
        rows = subjects.random_rows(made, 1, probed.T)
        inputs, _ = edits.in_all_rows(
            made, rows, edits.ordinary_replacements(made, probed.V - 1)
        )
        assert len(inputs) == size


def test_values_that_are_tried():
    (base, *edited), _ = calls_of("huge", probed.subject(None))
    largest = max(np.abs(call).max() for call in edited)
    assert 1e6 < largest < 1e7
    (_, *edited), _ = calls_of("non-finite", probed.subject(None))
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert any(test(call).all(-1).any() for call in edited)
    assert any((np.isnan(call).sum(-1) == 1).any() for call in edited)
    (base, *edited), _ = calls_of("tiny", probed.subject(None))
    assert any((call == 0).all(-1).any() for call in edited)
    changed = [np.abs(call - base)[call != base] for call in edited]
    smallest = min(change.min() for change in changed if len(change))
    assert smallest < 1e-4


def test_rows_of_the_callers_own():
    rows = probed.RNG.normal(size=(3, probed.T, probed.E)).astype(np.float32)
    (base, *_), _ = calls_of("edits", probed.subject(None, rows=rows))
    np.testing.assert_array_equal(np.unique(base, axis=0), np.unique(rows, axis=0))


def test_edits_are_of_the_scale_of_the_inputs():
    """A thousand times the inputs, a thousand times the edits."""
    rows = probed.RNG.normal(size=(2, probed.T, probed.E)).astype(np.float32)
    largest = []
    for size in (1, 1000):
        made = probed.subject(np.sin, rows=size * rows)
        _, edited = edits.in_all_rows(
            made, made.rows, edits.ordinary_replacements(made, 4)
        )
        largest.append(max(np.abs(edit.inputs).max() for edit in edited))
    np.testing.assert_allclose(largest[1], 1000 * largest[0], rtol=1e-3)
