"""train.foreign: a callable is found by its name, and what goes wrong by its line."""

import os
import sys

import numpy as np
import pytest

from attention.properties import calls
from train import foreign

TOKENS = np.array([[1, 2, 3], [4, 5, 6]], np.int32)

MODULE = """
import functools
import numpy as np
from flax import linen

class Model:
    def __init__(self):
        self.table = np.eye(11)

    def logits(self, tokens):
        return self.table[np.asarray(tokens)]

def broken(tokens):
    rows = tokens
    return {}["missing"]

model = Model()
layer = linen.Dense(3)
number = 3
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder with modules of a stranger; it is where the program runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "theirs.py").write_text(MODULE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(MODULE)
    (tmp_path / "package" / "syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "package" / "raises.py").write_text("x = 1\n\nx / 0\n")
    (tmp_path / "package" / "exits.py").write_text("import sys\nsys.exit('bye')\n")
    (tmp_path / "package" / "needs.py").write_text("import nope.nope\n")
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("theirs", "package"):
            del sys.modules[name]


@pytest.mark.parametrize("module", ["theirs", "package.module"])
def test_load(stranger, module):
    logits = foreign.load(f"{module}:model.logits")(TOKENS)
    np.testing.assert_array_equal(logits, np.eye(11)[TOKENS])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("theirs", "expected package.module:callable, got 'theirs'"),
        (":model", "expected package.module:callable, got ':model'"),
        ("theirs:", "expected package.module:callable, got 'theirs:'"),
        ("nope:f", "no module 'nope' in '.*' or elsewhere on the path"),
        ("package.nope:f", "no module 'package.nope' in"),
        ("theirs.py:broken", "no module 'theirs.py' .*: is theirs:broken meant"),
        ("package/module.py:f", "no module .*: is package.module:f meant"),
        (
            "package.needs:f",
            r"ModuleNotFoundError: No module named 'nope' \(package/needs",
        ),
        ("package.syntax:f", r"importing 'package.syntax' .* \(syntax.py, line 2\)"),
        ("package.raises:f", r"ZeroDivisionError: .* \(package/raises.py, line 3\)"),
        ("package.exits:f", r"SystemExit: bye \(package/exits.py, line 2\)"),
        ("theirs:nope", "'theirs:nope' was not found: module 'theirs' has no attrib"),
        ("theirs:model.nope", "'Model' object has no attribute 'nope'"),
        ("theirs:Model", r"is a class: make an instance .* model = Model\(...\)"),
        ("theirs:number", "'theirs:number' is 'int', expected a callable"),
        ("theirs:layer", "flax module without its parameters"),
    ],
)
def test_load_refuses(stranger, name, message):
    with pytest.raises(ValueError, match=message):
        foreign.load(name)


def test_an_exception_names_the_line(stranger):
    broken = foreign.load("theirs:broken")
    message = r"^raised KeyError: 'missing' \(theirs.py, line 15\)$"
    with pytest.raises(calls.Refused, match=message), foreign.guarded():
        broken(TOKENS)


def test_a_file_beside_a_folder_of_ours_is_the_strangers():
    """Whose name only begins like the folder's."""
    path = os.path.dirname(foreign.__file__) + "ers.py"
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", path, "exec"))
    assert foreign.blame(caught.value).endswith("trainers.py, line 1)")


def test_an_exit_is_no_way_out():
    with (
        pytest.raises(calls.Refused, match="raised SystemExit: 0"),
        foreign.guarded(),
    ):
        sys.exit(0)


@pytest.mark.parametrize("name", ["attention", "train"])
def test_a_name_of_ours_is_taken(stranger, tmp_path, name):
    """What the stranger named so is not what is imported; the line says why."""
    (tmp_path / f"{name}.py").write_text("def f(tokens): ...\ng = f\n")
    message = rf"; {name}.py here has the name of a package of this program: rename it"
    with pytest.raises(ValueError, match=f"'{name}:g' was not found.*{message}"):
        foreign.load(f"{name}:g")
    # Another name that clashes, but is not to blame.
    (tmp_path / "models").mkdir()
    for text in (f"from {name} import g\n", f"import {name}\n{name}.g\n"):
        (tmp_path / "theirs.py").write_text(text)
        with pytest.raises(ValueError, match=rf"importing 'theirs' .*'g'.*{message}"):
            foreign.load("theirs:g")
    (tmp_path / "theirs.py").write_text("import nope\n")
    with pytest.raises(ValueError, match=r"named 'nope' \(theirs.py, line 1\)$"):
        foreign.load("theirs:g")
