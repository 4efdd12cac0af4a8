"""The verifier tells planted leaks from honest models, and needs every probe for it."""

from tests import leak_matrix
from tests.specimens import honest, leaks


def test_leaks(subtests):
    """One test, since examining all of them is what takes the time."""
    leak_kinds = leak_matrix.examine_all(leaks.LEAKS)
    seen = {name: leak_matrix.seen_by(kinds) for name, kinds in leak_kinds.items()}

    with subtests.test("every leak is seen"):
        assert not [name for name, by in seen.items() if not by]

    for probe in leak_matrix.PROBES:
        with subtests.test("without this probe a leak is lost", probe=probe):
            alone = [name for name, by in seen.items() if by == {probe}]
            assert [name for name in alone if not leaks.LEAKS[name].needs]

    text = leak_matrix.DOCUMENT.read_text(encoding="utf-8")
    rows = text.splitlines()
    for name in leaks.LEAKS:
        with subtests.test("the document is current", leak=name):
            same = [row for row in rows if row.startswith(f"| {name} |")]
            assert len(same) == 1
            if name in leak_kinds:
                assert same == [leak_matrix.leak_row(name, leak_kinds[name])]
    if leak_kinds.keys() == leaks.LEAKS.keys():
        assert leak_matrix.page(leak_kinds) == text


def test_honest_models(subtests):
    honest_kinds = leak_matrix.examine_all(honest.HONEST)

    for name, kinds in honest_kinds.items():
        with subtests.test("accused of nothing but what is declared", model=name):
            shown = set(kinds.values()) - {"clear", "not applicable"}
            refused = {"refused"} if name == "fixed length" else set()
            assert shown <= {*honest.HONEST[name].shows} | refused

    for name in ("padded FFT filter", "total minus suffix"):
        with subtests.test("sums in another order are rounding", model=name):
            assert honest_kinds[name]["edits"] == "rounding"
            assert honest_kinds[name]["non-finite"] == "nan-unsafe"

    # So that a probe which accuses everything would be noticed.
    for probe in leak_matrix.PROBES:
        with subtests.test("it can be made of an honest model", probe=probe):
            assert any(kinds[probe] == "clear" for kinds in honest_kinds.values())


def test_there_are_enough_of_each():
    names = ("CausalLM",)
    assert len(leaks.LEAKS) >= 25
    assert len(honest.HONEST) >= 15
    assert len(honest.HONEST.keys() - set(names)) >= 6
