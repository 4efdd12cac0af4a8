"""The house: who may import whom, how long a file is, what an `__init__` holds.

    python -m tests.architecture_test [CHECKOUT]

counts the rooms of this or another checkout, the arrows between them (one room imports
another) and the floors (how many rooms the longest chain of arrows joins).
"""

import ast
import functools
import graphlib
import pathlib
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Each package may import itself and those after it.
ARROW = ("configs", "train", "models", "attention")
# In a package with folders, each folder and each file beside them is a room. A room may
# import the rooms of the lines above its own.
FLOORS = {
    "attention": (
        "numerics softmax heads dropout linear_sums properties",
        "masks positions score_mods",
        "checks",
        "dot_product additive linear recurrence",
        "lowrank random_features convolution mamba retention rwkv rwkv6",
    ),
    "train": (
        "text report foreign",
        "mechanisms config",
        "workdir cli lm",
        "proofs",
        "studies bench",
        "callables device experiment",
        "main audit benchmark study reach device_check",
    ),
}
# The verifier judges any function: no mechanism leans on it.
VERIFIER = "attention.properties"
FILES = sorted(path for name in ARROW for path in (ROOT / name).rglob("*.py"))
FOLDERS = {path.parent.relative_to(ROOT) for path in FILES}
PACKAGES = sorted(str(folder).replace("/", ".") for folder in FOLDERS)
# Beyond the arrow and the standard library; absent: anything installed.
THIRD_PARTY = {
    "configs": {"ml_collections"},
    "attention": {"jax", "jaxtyping", "numpy"},
}

# For each module, or each room, those that it imports.
Graph = dict[str, set[str]]


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Module and name of every import in the file, in functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def modules(root: pathlib.Path, *packages: str) -> Graph:
    """The imports among the modules of these packages."""
    paths = {}
    for path in (path for name in packages for path in (root / name).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    graph: Graph = {}
    for name, path in paths.items():
        taken = ((module, f"{module}.{inner}") for module, inner in imports(path))
        graph[name] = {x if x in paths else module for module, x in taken} & set(paths)
    return graph


def rooms(graph: Graph) -> Graph:
    """The imports among the rooms, for a graph of modules."""
    with_folders = {name.split(".")[0] for name in graph if name.count(".") > 1}

    def room(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[: 2 if parts[0] in with_folders else 1])

    between: Graph = {room(name): set() for name in graph}
    for name, imported in graph.items():
        between[room(name)] |= set(map(room, imported)) - {room(name)}
    return between


def floors(graph: Graph) -> int:
    """How many rooms the longest chain joins; raises CycleError for a circle."""
    height: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        height[name] = 1 + max((height[x] for x in graph[name]), default=0)
    return max(height.values())


@pytest.mark.parametrize("package", ARROW)
def test_imports_follow_the_arrow(package):
    allowed = set(ARROW[ARROW.index(package) :])
    if package == "configs":
        allowed = {"configs"}
    paths = [path for path in FILES if path.relative_to(ROOT).parts[0] == package]
    assert paths
    for path in paths:
        names = {module.split(".")[0] for module, _ in imports(path)}
        names -= sys.stdlib_module_names
        assert names & set(ARROW) <= allowed, path
        if package in THIRD_PARTY:
            assert names - set(ARROW) <= THIRD_PARTY[package], path


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_only_the_floors_below(package):
    floor = {
        f"{package}.{room}": number
        for number, line in enumerate(FLOORS[package])
        for room in line.split()
    }
    graph = rooms(modules(ROOT, package))
    door = graph.pop(package)  # its `__init__` hands on what any room has
    assert graph.keys() == floor.keys()
    assert door <= graph.keys()
    climbs = [
        f"{room} imports {other}"
        for room, imported in graph.items()
        for other in imported
        if other == package or floor[other] >= floor[room]
    ]
    assert not climbs


def test_no_mechanism_imports_the_verifier():
    graph = rooms(modules(ROOT, "attention"))
    assert [name for name in graph if VERIFIER in graph[name]] == ["attention"]


def test_no_circles_among_modules():
    graphlib.TopologicalSorter(modules(ROOT, *ARROW, "tests")).prepare()


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


def main() -> None:
    """Prints the counts of the checkout that the command line names."""
    root = pathlib.Path(*sys.argv[1:2]) if sys.argv[1:] else ROOT
    of_modules = modules(root, *ARROW)
    of_rooms = rooms(of_modules)
    for name, graph in (("rooms", of_rooms), ("files", of_modules)):
        arrows = sum(map(len, graph.values()))
        print(f"{len(graph)} {name}, {arrows} arrows, {floors(graph)} floors")


if __name__ == "__main__":
    main()
