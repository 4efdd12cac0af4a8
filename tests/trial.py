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
        "attention/additive.py": ("additive_test",),
        "attention/arguments.py": ("arguments_test", "shapes_test"),
        "attention/blockwise.py": ("blockwise_test", "flash_test"),
        "attention/choice.py": ("choice_test",),
        "attention/closures.py": ("closures_test",),
        "attention/convolution.py": ("convolution_test",),
        "attention/dot_product.py": ("cases_test", "dot_product_test"),
        "attention/dropout.py": ("dropout_test",),
        "attention/edits.py": ("edits_test", "probes_test"),
        "attention/equivalence.py": ("equivalence_test",),
        "attention/flash.py": ("flash_test", "closures_test", "blockwise_test"),
        "attention/heads.py": ("shapes_test", "blockwise_test"),
        "attention/hull.py": ("hull_test",),
        "attention/jax_nn.py": ("cases_test", "dot_product_test"),
        "attention/leaks.py": ("probes_test", "properties_test"),
        "attention/linear.py": ("linear_test", "linear_state_test"),
        "attention/linear_sums.py": ("linear_sums_test", "linear_test"),
        "attention/lowrank.py": ("lowrank_test",),
        "attention/mamba.py": ("mamba_test",),
        "attention/mask_algebra.py": ("mask_algebra_test", "masks_test"),
        "attention/mask_blocks.py": ("mask_blocks_test", "flash_test"),
        "attention/mask_leaves.py": ("masks_test", "mask_blocks_test"),
        "attention/mask_sparse.py": ("mask_sparse_test", "mask_blocks_test"),
        "attention/masks.py": ("masks_test",),
        "attention/movements.py": ("movements_test",),
        "attention/numerics.py": ("positions_test",),
        "attention/positions.py": ("positions_test",),
        "attention/probes.py": ("edits_test", "probes_test"),
        "attention/properties.py": ("properties_test",),
        "attention/random_features.py": ("random_features_test",),
        "attention/recurrence.py": ("recurrence_test", "rwkv6_test", "mamba_test"),
        "attention/reference.py": ("cases_test", "dropout_test"),
        "attention/retention.py": ("retention_test",),
        "attention/rwkv.py": ("rwkv_test",),
        "attention/rwkv6.py": ("rwkv6_test",),
        "attention/search.py": ("search_test", "probes_test"),
        "attention/softmax.py": ("cases_test", "textbook_test"),
        "attention/visits.py": ("flash_test", "blockwise_test"),
        "models/linear.py": ("linear_state_test", "mechanisms_test"),
        "models/mamba.py": ("mamba_module_test", "pretrained_test"),
        "models/mixers.py": ("mixers_test",),
        "models/multihead.py": ("multihead_test", "arguments_test"),
        "models/recurrent.py": ("recurrent_test",),
        "models/retention.py": ("retention_test", "mechanisms_test"),
        "models/rwkv.py": ("rwkv_modules_test", "pretrained_test"),
    }
)
CONTRACT = "contract_test"


def suite(tree: pathlib.Path, edited: str | None = None) -> list[str]:
    """The test files of a tree, likely killers of an edited file first.

    The suite is every test file that imports attention or models, but not train: what
    trains is slow, and has tests of its own.
    """
    first = [*FIRST.get(edited or "", ()), CONTRACT]
    tests = {path.stem: path.read_text() for path in tree.glob("tests/*_test.py")}
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
