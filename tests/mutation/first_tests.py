"""Which tests run for a mutant, and in which order: likely and fast killers first.

The tests of attention/x/y.py stand in tests/attention/x/y_test.py: they run first, and
`BESIDE` says which others then do. The contract suite comes next for the files that it
is about. The rest of the suite follows, short files first.
"""

import pathlib
import re
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CONTRACT = "tests/contract/contract_test.py"
# What the contract suite is about, from the root of the repository.
UNDER_CONTRACT = (
    "attention/dot_product/",
    "attention/dropout.py",
    "attention/heads.py",
    "attention/masks/",
    "attention/softmax.py",
    "models/multihead.py",
    "models/positional.py",
)
# file -> tests that run first beside those that have its name
BESIDE: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "attention/dot_product/api.py": ("attention/dot_product/cases_test",),
        "attention/checks.py": ("attention/dot_product/shapes_test",),
        "attention/dot_product/arguments.py": ("attention/dot_product/shapes_test",),
        "attention/dot_product/block_lists.py": (
            "attention/dot_product/flash_test",
            "attention/dot_product/blockwise_test",
        ),
        "attention/dot_product/blockwise.py": ("attention/dot_product/flash_test",),
        "attention/dot_product/flash.py": (
            "attention/dot_product/closures_test",
            "attention/dot_product/blockwise_test",
        ),
        "attention/dot_product/jax_nn.py": (
            "attention/dot_product/cases_test",
            "attention/dot_product/api_test",
        ),
        "attention/dot_product/reference.py": (
            "attention/dot_product/cases_test",
            "attention/dropout_test",
        ),
        "attention/heads.py": (
            "attention/dot_product/shapes_test",
            "attention/dot_product/blockwise_test",
        ),
        "attention/linear.py": ("attention/linear_state_test",),
        "attention/linear_sums.py": ("attention/linear_test",),
        "attention/masks/algebra.py": ("attention/masks/constructors_test",),
        "attention/masks/block_maps.py": ("attention/dot_product/flash_test",),
        "attention/masks/leaves.py": (
            "attention/masks/constructors_test",
            "attention/masks/block_maps_test",
        ),
        "attention/masks/sparse.py": ("attention/masks/block_maps_test",),
        "attention/numerics.py": ("attention/positions_test",),
        "attention/properties/comparison.py": ("attention/properties/assertions_test",),
        "attention/properties/edits.py": (
            "attention/properties/probes_test",
            "attention/properties/shrinking_test",
        ),
        "attention/properties/examination.py": ("attention/properties/probes_test",),
        "attention/properties/probes.py": ("attention/properties/edits_test",),
        "attention/properties/value_probes.py": ("attention/properties/probes_test",),
        "attention/recurrence.py": ("attention/rwkv6_test", "attention/mamba_test"),
        "attention/softmax.py": (
            "attention/dot_product/cases_test",
            "attention/textbook_test",
        ),
        "models/linear.py": (
            "attention/linear_state_test",
            "train/mechanisms/mechanisms_test",
        ),
        "models/mamba.py": ("models/pretrained_test",),
        "models/multihead.py": ("attention/dot_product/arguments_test",),
        "models/positional.py": ("models/multihead_test", "models/transformer_test"),
        "models/retention.py": (
            "attention/retention_test",
            "train/mechanisms/mechanisms_test",
        ),
        "models/rwkv.py": ("models/pretrained_test",),
    }
)


class Batch(NamedTuple):
    """The tests of one process.

    Attributes:
      tests: files, or single tests, in the order in which they run.
      marker: 'x64' for those of their tests that need float64, or 'not x64'.
    """

    tests: tuple[str, ...]
    marker: str


def files(tree: pathlib.Path) -> list[str]:
    """The test files that a mutant may fail, from the root of the tree.

    Those that import attention or models, but not train: what trains is slow, and has
    tests of its own.
    """
    return [
        str(path.relative_to(tree))
        for path in sorted((tree / "tests").rglob("*_test.py"))
        if _imports("attention|models", path.read_text())
        and not _imports("train", path.read_text())
    ]


def first(tree: pathlib.Path, edited: str) -> list[str]:
    """The test files that run first when a file was edited."""
    names = [edited.removesuffix(".py") + "_test", *BESIDE.get(edited, ())]
    paths = [f"tests/{name}.py" for name in names]
    return [path for path in paths if (tree / path).exists()]


def batches(
    tree: pathlib.Path, edited: str, *, seconds: Mapping[str, float], killer: str | None
) -> list[Batch]:
    """The processes that run, one after another, until a test fails.

    Args:
      tree: a copy of the repository.
      edited: the file of the mutation.
      seconds: time that each test file takes.
      killer: the test that failed when the mutation was last made; None if unknown.
    """
    likely = first(tree, edited)
    contract = [CONTRACT] if edited.startswith(UNDER_CONTRACT) else []
    rest = [file for file in files(tree) if file not in (*likely, *contract)]
    rest.sort(key=lambda file: seconds.get(file, 0.0))
    in_order = [Batch((killer,), "not x64")] if killer else []
    for group in (likely, contract, rest):
        in_order += by_marker(tree, group)
    return in_order


def by_marker(tree: pathlib.Path, group: Sequence[str]) -> list[Batch]:
    """The tests of some files, those that need float64 last."""
    wide = [file for file in group if "x64" in (tree / file).read_text()]
    pairs = ((group, "not x64"), (wide, "x64"))
    return [Batch(tuple(tests), marker) for tests, marker in pairs if tests]


def _imports(packages: str, text: str) -> bool:
    return bool(re.search(rf"^ *(?:import|from) (?:{packages})\b", text, re.MULTILINE))
