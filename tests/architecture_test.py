"""The house: who may import whom, how long a file is, what an `__init__` holds."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Each package may import itself and those after it.
ARROW = ("configs", "train", "models", "attention")
FILES = sorted(path for name in ARROW for path in (ROOT / name).rglob("*.py"))
FOLDERS = {path.parent.relative_to(ROOT) for path in FILES}
PACKAGES = sorted(str(folder).replace("/", ".") for folder in FOLDERS)
# Beyond the arrow and the standard library; absent: anything installed.
THIRD_PARTY = {
    "configs": {"ml_collections"},
    "attention": {"jax", "jaxtyping", "numpy"},
}


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """All top-level names imported anywhere in the file, in functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative import"
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", ARROW)
def test_imports_follow_the_arrow(package):
    allowed = set(ARROW[ARROW.index(package) :])
    if package == "configs":
        allowed = {"configs"}
    paths = [path for path in FILES if path.relative_to(ROOT).parts[0] == package]
    assert paths
    for path in paths:
        names = set(imports(path)) - sys.stdlib_module_names
        assert names & set(ARROW) <= allowed, path
        if package in THIRD_PARTY:
            assert names - set(ARROW) <= THIRD_PARTY[package], path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_two_rooms(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350


@pytest.mark.parametrize("package", PACKAGES)
def test_inits_are_explicit_lists(package):
    """A docstring, imports, and `__all__` with exactly what they bring."""
    docstring, *rest = tree(ROOT / package.replace(".", "/") / "__init__.py").body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    names: list[str] = []
    listed: list[str] = []
    for node in rest:
        if isinstance(node, ast.Assign):
            assert [ast.unparse(target) for target in node.targets] == ["__all__"]
            listed = ast.literal_eval(node.value)
        else:
            assert isinstance(node, ast.ImportFrom)
            names.extend(alias.asname or alias.name for alias in node.names)
    assert sorted(names) == sorted(listed)


def test_packages_are_listed_and_typed():
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    packages = setup.partition("packages =\n")[2].partition("python_requires")[0]
    assert set(packages.split()) == set(PACKAGES)
    assert all((ROOT / name / "py.typed").exists() for name in ARROW)
