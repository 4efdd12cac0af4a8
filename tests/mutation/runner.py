"""Runs the tests of attention/ and models/ in copies of the tree, for `tests.mutants`.

A copy comes with the programs that were compiled in the tree it is made of, which saves
most of the time: jax looks programs up by their content, so those of a mutant are
compiled anew.
"""

import asyncio
import contextlib
import os
import pathlib
import re
import shutil
import signal
import sys
import types
from collections.abc import Mapping, Sequence

FOLDERS = ("attention", "configs", "models", "tests", "train")
COMPILED = "compiled"
MARKERS = ("not x64", "x64")

# The tests that run first when a file was edited; all others follow.
FIRST: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "attention/additive.py": ("attention/additive_test",),
        "attention/dot_product/arguments.py": (
            "attention/dot_product/arguments_test",
            "attention/dot_product/shapes_test",
        ),
        "attention/dot_product/blockwise.py": (
            "attention/dot_product/blockwise_test",
            "attention/dot_product/flash_test",
        ),
        "attention/dot_product/choice.py": ("attention/dot_product/choice_test",),
        "attention/dot_product/closures.py": ("attention/dot_product/closures_test",),
        "attention/convolution.py": ("attention/convolution_test",),
        "attention/dot_product/api.py": (
            "attention/dot_product/cases_test",
            "attention/dot_product/api_test",
        ),
        "attention/dropout.py": ("attention/dropout_test",),
        "attention/dot_product/flash.py": (
            "attention/dot_product/flash_test",
            "attention/dot_product/closures_test",
            "attention/dot_product/blockwise_test",
        ),
        "attention/heads.py": (
            "attention/dot_product/shapes_test",
            "attention/dot_product/blockwise_test",
        ),
        "attention/dot_product/jax_nn.py": (
            "attention/dot_product/cases_test",
            "attention/dot_product/api_test",
        ),
        "attention/linear.py": ("attention/linear_test", "attention/linear_state_test"),
        "attention/linear_sums.py": (
            "attention/linear_sums_test",
            "attention/linear_test",
        ),
        "attention/lowrank.py": ("attention/lowrank_test",),
        "attention/mamba.py": ("attention/mamba_test",),
        "attention/masks/algebra.py": (
            "attention/masks/algebra_test",
            "attention/masks/constructors_test",
        ),
        "attention/masks/block_maps.py": (
            "attention/masks/block_maps_test",
            "attention/dot_product/flash_test",
        ),
        "attention/masks/leaves.py": (
            "attention/masks/constructors_test",
            "attention/masks/block_maps_test",
        ),
        "attention/masks/sparse.py": (
            "attention/masks/sparse_test",
            "attention/masks/block_maps_test",
        ),
        "attention/masks/constructors.py": ("attention/masks/constructors_test",),
        "attention/numerics.py": ("attention/positions_test",),
        "attention/positions.py": ("attention/positions_test",),
        "attention/properties/assertions.py": ("attention/properties/assertions_test",),
        "attention/properties/comparison.py": (
            "attention/properties/comparison_test",
            "attention/properties/assertions_test",
        ),
        "attention/properties/edits.py": (
            "attention/properties/edits_test",
            "attention/properties/probes_test",
        ),
        "attention/properties/equivalence.py": (
            "attention/properties/equivalence_test",
        ),
        "attention/properties/examination.py": (
            "attention/properties/examination_test",
            "attention/properties/probes_test",
        ),
        "attention/properties/hull.py": ("attention/properties/hull_test",),
        "attention/properties/invariance.py": ("attention/properties/invariance_test",),
        "attention/properties/movements.py": ("attention/properties/movements_test",),
        "attention/properties/probes.py": (
            "attention/properties/probes_test",
            "attention/properties/edits_test",
        ),
        "attention/properties/shrinking.py": ("attention/properties/shrinking_test",),
        "attention/properties/value_probes.py": ("attention/properties/probes_test",),
        "attention/random_features.py": ("attention/random_features_test",),
        "attention/recurrence.py": (
            "attention/recurrence_test",
            "attention/rwkv6_test",
            "attention/mamba_test",
        ),
        "attention/dot_product/reference.py": (
            "attention/dot_product/cases_test",
            "attention/dropout_test",
        ),
        "attention/retention.py": ("attention/retention_test",),
        "attention/rwkv.py": ("attention/rwkv_test",),
        "attention/rwkv6.py": ("attention/rwkv6_test",),
        "attention/softmax.py": (
            "attention/dot_product/cases_test",
            "attention/textbook_test",
        ),
        "attention/dot_product/block_lists.py": (
            "attention/dot_product/flash_test",
            "attention/dot_product/blockwise_test",
        ),
        "models/linear.py": (
            "attention/linear_state_test",
            "train/mechanisms/mechanisms_test",
        ),
        "models/mamba.py": ("models/mamba_test", "models/pretrained_test"),
        "models/mixers.py": ("models/mixers_test",),
        "models/multihead.py": (
            "models/multihead_test",
            "attention/dot_product/arguments_test",
        ),
        "models/recurrent.py": ("models/recurrent_test",),
        "models/retention.py": (
            "attention/retention_test",
            "train/mechanisms/mechanisms_test",
        ),
        "models/rwkv.py": ("models/rwkv_test", "models/pretrained_test"),
    }
)
CONTRACT = "contract/contract_test"


def suite(tree: pathlib.Path, edited: str | None = None) -> list[str]:
    """The test files of a tree, likely killers of an edited file first.

    The suite is every test file that imports attention or models, but not train: what
    trains is slow, and has tests of its own.
    """
    first = [*FIRST.get(edited or "", ()), CONTRACT]
    tests = {
        str(path.relative_to(tree / "tests").with_suffix("")): path.read_text()
        for path in (tree / "tests").rglob("*_test.py")
    }
    names = [
        name
        for name, text in tests.items()
        if name in first
        or (_imports("attention|models", text) and not _imports("train", text))
    ]
    order = {name: place for place, name in enumerate(first)}
    names.sort(key=lambda name: (order.get(name, len(order)), name))
    return [f"tests/{name}.py" for name in names]


def copy(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies what the tests need of a tree, and the programs compiled in it."""
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / name, target / name, ignore=ignore)
    shutil.copy2(source / "setup.cfg", target)
    if (source / COMPILED).exists():
        # Programs are never overwritten; but a test that is killed may leave half of
        # one, so each copy has a folder of its own.
        shutil.copytree(source / COMPILED, target / COMPILED, copy_function=os.link)
    return target


async def killer(
    tree: pathlib.Path, files: Sequence[str], *, limit: float | None
) -> str | None:
    """The first test that fails in the tree; None if all pass.

    Args:
      tree: a copy of the repository.
      files: test files, in the order in which they run; then those of their tests that
        need float64.
      limit: seconds for all of them; None: no limit.

    Returns:
      The test, 'timeout', or the signal that ended it.

    Raises:
      RuntimeError: pytest ended without a verdict on the code.
    """
    try:
        async with asyncio.timeout(limit):
            for marker in MARKERS:
                command = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
                status, output = await python(tree, *command, "-m", marker, *files)
                if status < 0:
                    return signal.Signals(-status).name
                if failed := re.search(
                    r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE
                ):
                    return failed[1]
                if status != 0:
                    raise RuntimeError(f"pytest ended with {status}:\n{output}")
    except TimeoutError:
        return "timeout"
    return None


async def python(tree: pathlib.Path, *arguments: str) -> tuple[int, str]:
    """Runs Python in a tree; whatever happens here, it does not outlive the call.

    Returns:
      Its exit status, negative for a signal, and all that it printed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=tree,
        env=os.environ
        | {
            "JAX_COMPILATION_CACHE_DIR": str(tree / COMPILED),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace")


def _imports(packages: str, text: str) -> bool:
    return bool(re.search(rf"^ *(?:import|from) (?:{packages})\b", text, re.MULTILINE))
