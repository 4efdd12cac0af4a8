"""The verifier tells planted leaks from honest models, and needs every probe for it."""

import pytest

from tests import leak_matrix
from tests.specimens import honest, leaks


@pytest.fixture(scope="module")
def of_leaks():
    return leak_matrix.examine_all(leaks.LEAKS)


@pytest.fixture(scope="module")
def of_honest():
    return leak_matrix.examine_all(honest.HONEST)


def test_every_leak_is_seen(of_leaks):
    unseen = [name for name in of_leaks if not leak_matrix.seen_by(of_leaks[name])]
    assert not unseen


def test_no_honest_model_is_accused_or_shows_more_than_it_declares(of_honest):
    for name, kinds in of_honest.items():
        shown = set(kinds.values()) - {"clear", "not applicable"}
        refused = {"refused"} if name == "fixed length" else set()
        assert shown <= {*honest.HONEST[name].shows} | refused, name


@pytest.mark.parametrize("name", ["padded FFT filter", "total minus suffix"])
def test_sums_in_another_order_are_seen_as_rounding(name, of_honest):
    assert of_honest[name]["edits"] == "rounding"
    assert of_honest[name]["non-finite"] == "nan-unsafe"


@pytest.mark.parametrize("probe", leak_matrix.PROBES)
def test_without_this_probe_a_leak_is_lost(probe, of_leaks):
    alone = [
        name
        for name, kinds in of_leaks.items()
        if leak_matrix.seen_by(kinds) == {probe} and not leaks.LEAKS[name].needs
    ]
    assert alone


def test_each_probe_can_be_made_of_an_honest_model(of_honest):
    """So that a probe which accuses everything would be noticed."""
    for probe in leak_matrix.PROBES:
        assert any(kinds[probe] == "clear" for kinds in of_honest.values()), probe


def test_the_document_is_current(of_leaks):
    text = leak_matrix.DOCUMENT.read_text(encoding="utf-8")
    rows = text.splitlines()
    for name in leaks.LEAKS:
        same = [row for row in rows if row.startswith(f"| {name} |")]
        assert len(same) == 1, name
        if name in of_leaks:
            assert same == [leak_matrix.leak_row(name, of_leaks[name])]
    if of_leaks.keys() == leaks.LEAKS.keys():
        assert leak_matrix.page(of_leaks) == text


def test_there_are_enough_of_each():
    names = ("CausalLM",)
    assert len(leaks.LEAKS) >= 25
    assert len(honest.HONEST) >= 15
    assert len(honest.HONEST.keys() - set(names)) >= 6
