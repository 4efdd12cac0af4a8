"""The table of mutations fits the code; the runner knows a kill from a survival."""

import asyncio
import textwrap

import pytest

from tests import mutants
from tests.mutation import mutations, runner


def test_every_mutation_fits_its_file_and_is_python():
    """Each old text occurs once, and no two edits are the same."""
    mutated = set()
    for mutation in mutations.MUTATIONS:
        original = (mutants.ROOT / mutation.file).read_text()
        text = mutation.apply(original)
        assert text != original, mutation.name
        compile(text, mutation.file, "exec")
        mutated.add((mutation.file, text))
    assert len(mutated) == len(mutations.MUTATIONS) >= 60
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names)


def test_an_edit_that_does_not_fit_is_refused():
    mutation = mutations.Mutation("a.py", "x", "y", "wrong")
    assert mutation.apply("x = 1") == "y = 1"
    for text, count in (("", 0), ("x = x", 2)):
        with pytest.raises(ValueError, match=f"wrong: .*occurs {count} times"):
            mutation.apply(text)


def test_likely_killers_run_first_and_what_trains_does_not():
    suite = runner.suite(mutants.ROOT)
    names = {path.removeprefix("tests/").removesuffix(".py") for path in suite}
    assert {"attention/masks/sparse_test", "models/multihead_test"} <= names
    assert runner.CONTRACT in names
    slow = {"train/experiment_test", "train/lm/loop_test", "mutation/mutants_test"}
    assert names.isdisjoint(slow)
    edited = {mutation.file for mutation in mutations.MUTATIONS}
    assert edited == set(runner.FIRST)
    for file, first in runner.FIRST.items():
        wanted = [f"tests/{name}.py" for name in (*first, runner.CONTRACT)]
        found = runner.suite(mutants.ROOT, file)
        assert found[: len(wanted)] == wanted
        assert set(found) >= {f"tests/{name}.py" for name in names}


TESTS = """
    import pathlib, time
    import pytest

    def test_value():
        assert float(pathlib.Path("value").read_text()) > 0

    def test_time():
        time.sleep(float(pathlib.Path("value").read_text()))

    @pytest.mark.x64
    def test_wide():
        assert float(pathlib.Path("value").read_text()) < 0.1
    """


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1e-3, None),
        (-1, "tests/small_test.py::test_value"),
        (0.2, "tests/small_test.py::test_wide"),
        (60, "timeout"),
    ],
)
def test_what_kills(tmp_path, value, wanted):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "small_test.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\nmarkers = x64\n")
    (tmp_path / "value").write_text(str(value))
    limit = 2 if wanted == "timeout" else 60
    found = asyncio.run(runner.killer(tmp_path, ["tests/small_test.py"], limit=limit))
    assert found == wanted


def test_no_verdict_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        asyncio.run(runner.killer(tmp_path, ["tests/none_test.py"], limit=None))
