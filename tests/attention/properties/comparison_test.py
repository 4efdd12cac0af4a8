"""attention.properties.comparison: what moved, and what that is called."""

import numpy as np
import pytest

from attention.properties import comparison, probes
from tests.support import probed


def test_a_movement_is_a_leak_or_rounding_by_the_edits_size():
    assert probed.kind("edits", lambda x: x + 1e-4 * probed.next_one(x)) == "leak"
    assert probed.kind("edits", lambda x: x + 1e-6 * probed.next_one(x)) == "rounding"
    assert (
        probed.kind("edits", lambda x: x + 1e-6 * probed.next_one(x), tolerance=0.0)
        == "leak"
    )
    assert probed.kind("edits", lambda x: x) == "clear"


def test_the_size_of_a_tokens_edit_is_what_it_moves():
    """The same function with all outputs a million times smaller leaks as much."""
    for size in (1, 1e-6):
        outcome = probes.run(
            "edits",
            probed.tokens(
                lambda t, c=size: (
                    c * (probed.TABLE[t] + 1e-4 * probed.next_one(probed.TABLE[t]))
                )
            ),
        )
        assert outcome.kind == "leak"


def test_nan_that_spreads_is_unsafe_and_what_it_does_to_numbers_a_leak():
    def mixed(x):
        return x + 0 * probed.next_one(x)

    def guarded(x):
        return x if np.isfinite(x).all() else np.zeros_like(x)

    assert probed.kind("non-finite", mixed) == "nan-unsafe"
    assert probed.kind("edits", mixed) == "clear"
    assert probed.kind("non-finite", guarded) == "leak"
    assert probed.kind("non-finite", lambda x: x) == "clear"


def test_a_number_that_turns_others_into_nan_is_a_leak():
    def fn(x):
        return np.where(probed.next_one(x) > 1, np.nan, x)

    outcome = probes.run("edits", probed.subject(fn))
    assert outcome.kind == "leak"
    assert np.isnan(outcome.finding.movement)


def test_a_column_of_huge_numbers_hides_no_leak():
    """An id that is banned by -1e9, or by the least number there is."""
    for banned in (-1e9, np.finfo(np.float32).min):

        def fn(t, banned=banned):
            x = probed.TABLE[t] + 1e-3 * probed.next_one(probed.TABLE[t])
            return np.append(x, np.full((*t.shape, 1), banned, np.float32), axis=-1)

        assert probes.run("edits", probed.tokens(fn)).kind == "leak"


def test_an_id_whose_vector_is_nan_is_unsafe():
    table = probed.TABLE.copy()
    table[7] = np.nan

    def fn(t):
        return np.tri(t.shape[1]) @ table[t]

    assert (
        probes.run("edits", probed.tokens(fn, rows=np.full((1, probed.T), 4))).kind
        == "nan-unsafe"
    )


def test_outputs_whose_dtype_depends_on_the_input():
    def fn(x):
        return x.astype(np.float64) if x[0, 0, 0] > 0 else x

    assert probed.kind("edits", fn) in ("clear", "rounding")


def test_a_few_units_in_the_last_place_are_rounding():
    """A sum of all less the sum of the rest, far from zero."""

    def fn(x):
        x = x + np.float32(1000)
        return x.sum(1, keepdims=True) - (np.cumsum(x[:, ::-1], 1)[:, ::-1] - x)

    for probe in ("edits", "tiny", "huge"):
        assert probed.kind(probe, fn) == "rounding"


def test_equal_inputs_show_nothing():
    x = np.zeros((1, 2, 3), np.float32)
    with pytest.raises(ValueError, match="equal"):
        comparison.compare("edits", np.sin, x, x, tolerance=0.0)
