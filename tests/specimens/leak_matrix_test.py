"""The verifier tells planted leaks from honest models, and needs every probe for it."""

import pytest

from tests import leak_matrix
from tests.specimens import honest, leaks


@pytest.fixture(scope="module")
def leak_kinds():
    return leak_matrix.examine_all(leaks.LEAKS)


@pytest.fixture(scope="module")
def honest_kinds():
    return leak_matrix.examine_all(honest.HONEST)


def test_every_leak_is_seen(leak_kinds):
    unseen = [name for name in leak_kinds if not leak_matrix.seen_by(leak_kinds[name])]
    assert not unseen


def test_no_honest_model_is_accused_or_shows_more_than_it_declares(honest_kinds):
    for name, kinds in honest_kinds.items():
        shown = set(kinds.values()) - {"clear", "not applicable"}
        refused = {"refused"} if name == "fixed length" else set()
        assert shown <= {*honest.HONEST[name].shows} | refused, name


@pytest.mark.parametrize("name", ["padded FFT filter", "total minus suffix"])
def test_sums_in_another_order_are_seen_as_rounding(name, honest_kinds):
    assert honest_kinds[name]["edits"] == "rounding"
    assert honest_kinds[name]["non-finite"] == "nan-unsafe"


@pytest.mark.parametrize("probe", leak_matrix.PROBES)
def test_without_this_probe_a_leak_is_lost(probe, leak_kinds):
    alone = [
        name
        for name, kinds in leak_kinds.items()
        if leak_matrix.seen_by(kinds) == {probe} and not leaks.LEAKS[name].needs
    ]
    assert alone


def test_each_probe_can_be_made_of_an_honest_model(honest_kinds):
    """So that a probe which accuses everything would be noticed."""
    for probe in leak_matrix.PROBES:
        assert any(kinds[probe] == "clear" for kinds in honest_kinds.values()), probe


def test_the_document_is_current(leak_kinds):
    text = leak_matrix.DOCUMENT.read_text(encoding="utf-8")
    rows = text.splitlines()
    for name in leaks.LEAKS:
        same = [row for row in rows if row.startswith(f"| {name} |")]
        assert len(same) == 1, name
        if name in leak_kinds:
            assert same == [leak_matrix.leak_row(name, leak_kinds[name])]
    if leak_kinds.keys() == leaks.LEAKS.keys():
        assert leak_matrix.page(leak_kinds) == text


def test_there_are_enough_of_each():
    names = ("CausalLM",)
    assert len(leaks.LEAKS) >= 25
    assert len(honest.HONEST) >= 15
    assert len(honest.HONEST.keys() - set(names)) >= 6
