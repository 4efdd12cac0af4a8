"""attention.probes, edits and leaks: what is tried, and what it is called."""

import dataclasses

import numpy as np
import pytest

from attention import edits, leaks, probes, search

T, E, V = 12, 3, 11
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(V, E)).astype(np.float32)


def subject(fn, **changes):
    vectors = edits.Subject(
        fn=fn,
        length=T,
        vocab_size=None,
        width=E,
        training=None,
        gradient=None,
        seed=0,
        edits=10_000,
    )
    return dataclasses.replace(vectors, **changes)


def tokens(fn, **changes):
    return subject(fn, **({"vocab_size": V, "width": None} | changes))


def next_one(x):
    return np.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))


def kind(probe, fn, **changes):
    return probes.run(probe, subject(fn, **changes)).kind


# What is tried


def calls_of(probe, made):
    """The inputs of all calls, the first of them unedited."""
    calls = []

    def fn(x):
        calls.append(x)
        return np.ones((*x.shape[:2], 1), np.float32)

    outcome = probes.run(probe, dataclasses.replace(made, fn=fn))
    return calls, outcome


def test_every_token_takes_every_place():
    """One position at a time, in all rows; together every other id."""
    made = tokens(np.sin)
    (row,) = edits.draw(made, 1, T)
    base, edited = edits.together(made, row[None], edits.ordinary(made, V - 1))
    seen = set()
    for position, rows, call, since in edited:
        assert rows.all() and since == position
        others = np.arange(T) != position
        np.testing.assert_array_equal(call[:, others], base[:, others])
        assert np.all(call[:, position] != row[position])
        seen |= {(position, int(token)) for token in call[:, position]}
    assert len(seen) == T * (V - 1)


def test_every_token_comes_first():
    base, edited = edits.each_first(np.arange(T) % V, V - 1, vocab_size=V)
    assert len(set(base[:, 0].tolist())) == V - 1
    assert [edit.position for edit in edited] == [1, T // 2, T - 1]


def test_the_budget_is_kept():
    _, outcome = calls_of("edits", tokens(None, edits=3 * T))
    assert outcome.tried.startswith(f"1 x {T} positions, 3 replacements each of 10")
    assert "nothing moved" in outcome.tried


def test_calls_are_bounded_and_all_of_one_shape():
    """Many ids: several calls per position, the last filled up."""
    made = tokens(np.sin, vocab_size=2000, length=20)
    rows = edits.draw(made, 1, 20)
    base, edited = edits.together(made, rows, edits.ordinary(made, 1999))
    edited = list(edited)
    assert {edit.inputs.shape for edit in edited} == {base.shape}
    assert base.size <= 2**13
    ids = {int(i) for edit in edited if edit.position == 3 for i in edit.inputs[:, 3]}
    assert len(ids) == 1999


def test_rows_of_tokens_hold_many_ids_or_repeat_few():
    rows = edits.draw(tokens(None), 4, V)
    assert [len(set(row.tolist())) for row in rows[::2]] == [V, V]
    assert all(len(set(row.tolist())) <= 4 for row in rows[1::2])


def test_lengths_and_batch_sizes():
    calls, outcome = calls_of("lengths", subject(None))
    assert {call.shape[1] for call in calls} == {1, 9, 11, 33}
    assert outcome.tried == "1, 9, 11, 33"
    calls, _ = calls_of("batch sizes", subject(None))
    assert {len(call) for call in calls} == {1, 2, 3, 8}
    assert probes.other_lengths(64) == [1, 33, 61, 129]
    assert probes.other_lengths(2) == [1, 5]


def test_one_row_is_edited_at_a_time():
    calls, _ = calls_of("batch", subject(None))
    base = next(call for call in calls if np.any(call[0] != call[1]))
    places = [np.argwhere((call != base).any(-1)).tolist() for call in calls]
    assert [[[t % 4, t]] for t in range(T)] == [p for p in places if len(p) == 1]


def test_a_batch_size_that_is_refused():
    """All copies at once, two of each, or the rows as they are."""
    for most, size in ((99, 10), (5, 2), (1, 1)):

        def fn(x, most=most):
            if len(x) > most:
                raise IndexError("too many rows")
            return x

        made = tokens(fn)
        rows = edits.draw(made, 1, T)
        inputs, _ = edits.together(made, rows, edits.ordinary(made, V - 1))
        assert len(inputs) == size


def test_values_that_are_tried():
    (base, *edited), _ = calls_of("huge", subject(None))
    largest = max(np.abs(call).max() for call in edited)
    assert 1e6 < largest < 1e7
    (_, *edited), _ = calls_of("non-finite", subject(None))
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert any(test(call).all(-1).any() for call in edited)
    assert any((np.isnan(call).sum(-1) == 1).any() for call in edited)
    (base, *edited), _ = calls_of("tiny", subject(None))
    assert any((call == 0).all(-1).any() for call in edited)
    changed = [np.abs(call - base)[call != base] for call in edited]
    smallest = min(change.min() for change in changed if len(change))
    assert smallest < 1e-4


def test_rows_of_the_callers_own():
    rows = RNG.normal(size=(3, T, E)).astype(np.float32)
    (base, *_), _ = calls_of("edits", subject(None, rows=rows))
    np.testing.assert_array_equal(np.unique(base, axis=0), np.unique(rows, axis=0))


def test_edits_are_of_the_scale_of_the_inputs():
    """A thousand times the inputs, a thousand times the edits."""
    rows = RNG.normal(size=(2, T, E)).astype(np.float32)
    largest = []
    for size in (1, 1000):
        made = subject(np.sin, rows=size * rows)
        _, edited = edits.together(made, made.rows, edits.ordinary(made, 4))
        largest.append(max(np.abs(edit.inputs).max() for edit in edited))
    np.testing.assert_allclose(largest[1], 1000 * largest[0], rtol=1e-3)


# What it is called


def test_a_movement_is_a_leak_or_rounding_by_the_edits_size():
    assert kind("edits", lambda x: x + 1e-4 * next_one(x)) == "leak"
    assert kind("edits", lambda x: x + 1e-6 * next_one(x)) == "rounding"
    assert kind("edits", lambda x: x + 1e-6 * next_one(x), tolerance=0.0) == "leak"
    assert kind("edits", lambda x: x) == "clear"


def test_the_size_of_a_tokens_edit_is_what_it_moves():
    """The same function with all outputs a million times smaller leaks as much."""
    for size in (1, 1e-6):
        outcome = probes.run(
            "edits",
            tokens(lambda t, c=size: c * (TABLE[t] + 1e-4 * next_one(TABLE[t]))),
        )
        assert outcome.kind == "leak"


def test_nan_that_spreads_is_unsafe_and_what_it_does_to_numbers_a_leak():
    def mixed(x):
        return x + 0 * next_one(x)

    def guarded(x):
        return x if np.isfinite(x).all() else np.zeros_like(x)

    assert kind("non-finite", mixed) == "nan-unsafe"
    assert kind("edits", mixed) == "clear"
    assert kind("non-finite", guarded) == "leak"
    assert kind("non-finite", lambda x: x) == "clear"


def test_a_number_that_turns_others_into_nan_is_a_leak():
    def fn(x):
        return np.where(next_one(x) > 1, np.nan, x)

    outcome = probes.run("edits", subject(fn))
    assert outcome.kind == "leak"
    assert np.isnan(outcome.finding.movement)


def test_an_overflow_is_no_leak_but_a_stabilising_maximum_is():
    """Both give NaN under huge values; one moves numbers on the way there."""

    def overflowing(x):
        with np.errstate(over="ignore"):
            return x + 0 * np.exp(np.abs(next_one(x)), dtype=np.float32)

    def stabilised(x):
        scores = x @ x.swapaxes(1, 2) / E
        weights = np.exp(scores - scores.max(axis=(1, 2), keepdims=True))
        weights *= np.tri(x.shape[1], dtype=np.float32)
        return weights / weights.sum(-1, keepdims=True) @ x

    assert kind("huge", overflowing) == "nan-unsafe"
    assert kind("edits", stabilised) in ("rounding", "clear")
    assert kind("huge", stabilised) == "leak"


def test_refusals():
    def picky(x):
        if x.shape[1] > T:
            raise IndexError("no such position")
        return x

    outcome = probes.run("lengths", subject(picky))
    assert outcome.kind == "clear"
    assert outcome.tried == "1, 9, 11; refused: 33"

    def fixed(x):
        if x.shape[1] != T:
            raise IndexError("no such length")
        return x

    assert probes.run("lengths", subject(fixed)).kind == "refused"
    outcome = probes.run("edits", subject(lambda x: x[:, :-1]))
    assert outcome.kind == "refused"
    assert "expected outputs [2, 12]" in outcome.tried
    assert probes.run("tiny", tokens(lambda t: t)).kind == "not applicable"
    assert probes.run("gradients", subject(np.sin)).kind == "not applicable"
    assert probes.run("training", subject(np.sin)).kind == "not applicable"


def test_gradients():
    def of(matrix):
        return probes.run("gradients", subject(None, gradient=lambda _: matrix))

    honest = np.tri(T)
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
        return TABLE[t] + next_one(TABLE[t])

    outcome = probes.run("edits", tokens(fn, rows=np.full((1, T), 4, np.int32)))
    assert outcome.kind == "leak"
    assert "refused" in outcome.tried
    exits = probes.run("edits", tokens(lambda t: exit()))
    assert exits.kind == "refused"


def test_a_column_of_huge_numbers_hides_no_leak():
    """An id that is banned by -1e9, or by the least number there is."""
    for banned in (-1e9, np.finfo(np.float32).min):

        def fn(t, banned=banned):
            x = TABLE[t] + 1e-3 * next_one(TABLE[t])
            return np.append(x, np.full((*t.shape, 1), banned, np.float32), axis=-1)

        assert probes.run("edits", tokens(fn)).kind == "leak"


def test_rows_that_are_mixed_at_other_sizes_only():
    def fn(x, rows):
        return x + np.roll(x, 1, axis=0) if len(x) == rows else x

    for rows in (3, 8):
        assert kind("batch sizes", lambda x, n=rows: fn(x, n)) == "leak"
        assert kind("batch", lambda x, n=rows: fn(x, n)) == "clear"


def test_what_all_rows_hold_ends_with_one():
    """A batch that falls silent once every row has said an id."""

    def fn(t):
        done = np.logical_and.accumulate((t == t[:1]).all(0))
        return np.where(done[None, :, None], 1, TABLE[t])

    assert probes.run("batch", tokens(fn)).kind == "leak"


def test_a_model_that_treats_texts_by_their_first_token():
    def fn(t):
        x = TABLE[t]
        return np.where((t[:, :1] == 0)[..., None], x + next_one(x), x)

    outcome = probes.run("edits", tokens(fn, vocab_size=V, seed=1))
    assert outcome.kind == "leak"


def test_memory_and_chance_are_no_leaks():
    last = np.zeros((1, 1, E))

    def remembers(x):
        nonlocal last
        out = x + 0.1 * last.mean()
        last = x
        return out

    calls = iter(range(10**6))

    def flaky(x):
        return x + (next(calls) == 8)

    for fn in (remembers, flaky):
        with pytest.raises(leaks.NotDeterministic, match="not deterministic"):
            probes.run("edits", subject(fn))


def test_an_id_whose_vector_is_nan_is_unsafe():
    table = TABLE.copy()
    table[7] = np.nan

    def fn(t):
        return np.tri(t.shape[1]) @ table[t]

    assert probes.run("edits", tokens(fn, rows=np.full((1, T), 4))).kind == "nan-unsafe"


def test_a_function_of_nan_shows_nothing():
    outcome = probes.run("edits", subject(lambda x: np.full_like(x, np.nan)))
    assert (outcome.kind, outcome.tried) == ("refused", "returned no finite number")


def test_outputs_whose_dtype_depends_on_the_input():
    def fn(x):
        return x.astype(np.float64) if x[0, 0, 0] > 0 else x

    assert kind("edits", fn) in ("clear", "rounding")


def test_training_mode_is_looked_at_along_time_and_across_rows():
    for fn in (lambda x: x + next_one(x), lambda x: x + np.roll(x, 1, axis=0)):
        assert kind("training", lambda x: x, training=fn) == "leak"
        assert kind("training", fn, training=lambda x: x) == "clear"


def test_a_few_units_in_the_last_place_are_rounding():
    """A sum of all less the sum of the rest, far from zero."""

    def fn(x):
        x = x + np.float32(1000)
        return x.sum(1, keepdims=True) - (np.cumsum(x[:, ::-1], 1)[:, ::-1] - x)

    for probe in ("edits", "tiny", "huge"):
        assert kind(probe, fn) == "rounding"


# The smallest input


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x + next_one(x), (1, 2, E)),
        (lambda x: x + np.roll(x, 1, axis=0), (2, 1, E)),
        (lambda x: x - x.mean(1, keepdims=True), (1, 2, E)),
    ],
    ids=["next", "rows", "mean"],
)
def test_the_smallest_pair_that_shows_it(fn, shape):
    probe = "batch"
    finding = probes.run(probe, subject(fn)).finding
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

    finding = probes.run("edits", subject(fn)).finding
    smallest = search.shrink(fn, finding, tolerance=leaks.ROUNDING)
    assert smallest.inputs.shape == (1, 9, E)
    assert (smallest.source, smallest.target) == (8, 7)


def test_equal_inputs_show_nothing():
    x = np.zeros((1, 2, 3), np.float32)
    with pytest.raises(ValueError, match="equal"):
        leaks.compare("edits", np.sin, x, x, tolerance=0.0)
