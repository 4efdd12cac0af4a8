"""The table of mutations fits the code; the runner knows a kill from a survival."""

import asyncio
import json
import textwrap

import pytest

from tests import mutants
from tests.mutation import first_tests, mutations, runner


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


def test_every_file_that_imports_the_code_is_tried_but_not_what_trains():
    files = first_tests.files(mutants.ROOT)
    names = {path.removeprefix("tests/").removesuffix(".py") for path in files}
    assert {"attention/masks/sparse_test", "models/multihead_test"} <= names
    assert first_tests.CONTRACT in files
    slow = {"train/experiment_test", "train/lm/loop_test", "mutation/mutants_test"}
    assert names.isdisjoint(slow)


@pytest.mark.parametrize("file", sorted({row.file for row in mutations.MUTATIONS}))
def test_likely_killers_run_first(file):
    """Tests of the file's name, those beside it, the contract, then short ones."""
    suite = first_tests.files(mutants.ROOT)
    seconds = {path: float(number) for number, path in enumerate(suite)}
    likely = first_tests.first(mutants.ROOT, file)
    beside = first_tests.BESIDE.get(file, ())
    assert likely and likely[len(likely) - len(beside) :] == [
        f"tests/{name}.py" for name in beside
    ]
    batches = first_tests.batches(mutants.ROOT, file, seconds=seconds, killer="a::b")
    assert batches[0] == (("a::b",), "not x64")
    plain = [batch.tests for batch in batches[1:] if batch.marker == "not x64"]
    assert plain[0] == tuple(likely)
    contract = plain[1:-1]
    assert contract in ([], [(first_tests.CONTRACT,)])
    seen = {path for tests in plain[:-1] for path in tests}
    assert plain[-1] == tuple(path for path in suite if path not in seen)


def test_only_mutated_files_have_tests_beside_their_own():
    assert first_tests.BESIDE.keys() <= {row.file for row in mutations.MUTATIONS}
    for file, beside in first_tests.BESIDE.items():
        assert file.removesuffix(".py") + "_test" not in beside


def test_the_killer_of_the_last_run_is_known(tmp_path):
    path = tmp_path / "report.json"
    assert mutants.known_killers(path) == {}
    row = {"file": "a.py", "wrong": "sign", "killer": "tests/a_test.py::test_sign"}
    path.write_text(json.dumps([row, row | {"wrong": "loop", "killer": "timeout"}]))
    assert mutants.known_killers(path) == {"a.py: sign": "tests/a_test.py::test_sign"}


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


@pytest.fixture
def small_tree(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "small_test.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\nmarkers = x64\n")
    return tmp_path


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1e-3, None),
        (-1, "tests/small_test.py::test_value"),
        (0.2, "tests/small_test.py::test_wide"),
        (60, "timeout"),
    ],
)
def test_what_kills(small_tree, value, wanted, monkeypatch):
    (small_tree / "value").write_text(str(value))
    monkeypatch.setattr(runner, "LEAST_LIMIT", 3 if wanted == "timeout" else 60)
    batches = first_tests.by_marker(small_tree, ["tests/small_test.py"])
    killer = asyncio.run(runner.killer(small_tree, batches, seconds={}))
    assert killer == wanted


def test_the_control_says_how_long_each_file_takes(small_tree):
    (small_tree / "value").write_text("0.05")
    files = ["tests/small_test.py"]
    failed, seconds = asyncio.run(runner.control(small_tree, files, jobs=1))
    assert failed is None
    assert seconds.keys() == {"tests/small_test.py"}
    # It sleeps for 0.05 s, and the report rounds.
    assert 0.045 < seconds["tests/small_test.py"] < 5
    (small_tree / "value").write_text("-1")
    failed, _ = asyncio.run(runner.control(small_tree, files, jobs=1))
    assert failed == "tests/small_test.py::test_value"


def test_a_killer_that_is_gone_kills_nothing(small_tree):
    (small_tree / "value").write_text("0.001")
    gone = first_tests.Batch(("tests/small_test.py::test_gone",), "not x64")
    assert asyncio.run(runner.killer(small_tree, [gone], seconds={})) is None


def test_no_verdict_is_an_error(tmp_path):
    none = first_tests.Batch(("tests/none_test.py",), "not x64")
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        asyncio.run(runner.killer(tmp_path, [none], seconds={}))
