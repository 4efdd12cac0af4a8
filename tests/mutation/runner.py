"""Runs tests in copies of the tree, for `tests.mutants`.

A copy comes with the programs that were compiled in the tree it is made of, which saves
most of the time: jax looks programs up by their content, so those of a mutant are
compiled anew.
"""

import asyncio
import collections
import contextlib
import os
import pathlib
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from tests.mutation import first_tests

FOLDERS = ("attention", "configs", "models", "tests", "train")
COMPILED = ".jax_cache"
# How many times as long as without a mutation some tests may take, and seconds that
# they may take in any case: a mutant's programs are compiled anew.
PATIENCE, LEAST_LIMIT = 10, 120
# Exit statuses of pytest: all passed, nothing to run, no such test.
PASSED, NO_SUCH_TEST, NOTHING_RAN = 0, 4, 5


def copy(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies what the tests need of a tree, and the programs compiled in it."""
    for name in FOLDERS:
        shutil.copytree(source / name, target / name)
    shutil.copy2(source / "setup.cfg", target)
    if (source / COMPILED).exists():
        # Programs are never overwritten; but a test that is killed may leave half of
        # one, so each copy has a folder of its own.
        shutil.copytree(source / COMPILED, target / COMPILED, copy_function=_link)
    return target


def _link(source: str, target: str) -> None:
    """Another name for a file; a copy where it stands on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


async def control(
    tree: pathlib.Path, files: Sequence[str], *, jobs: int
) -> tuple[str | None, dict[str, float]]:
    """Runs tests of a tree without any mutation, some processes at a time.

    Returns:
      A test that fails, or None; and the seconds that the tests of each file took.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    for batch in first_tests.by_marker(tree, files):
        failed, output = await _pytest(
            tree,
            batch,
            f"--numprocesses={jobs}",
            "--dist=loadfile",
            "--junitxml=seconds.xml",
            "--override-ini=junit_family=xunit1",
        )
        if failed:
            return failed, seconds
        for case in ElementTree.parse(tree / "seconds.xml").iter("testcase"):
            seconds[case.attrib["file"]] += float(case.attrib["time"])
    return None, seconds


async def killer(
    tree: pathlib.Path,
    batches: Sequence[first_tests.Batch],
    *,
    seconds: Mapping[str, float],
) -> str | None:
    """The first test that fails in the tree; None if all pass.

    Args:
      tree: a copy of the repository.
      batches: tests, in the order in which they run.
      seconds: time that each test file takes without a mutation.

    Returns:
      The test, 'timeout', or the signal that ended it.

    Raises:
      RuntimeError: pytest ended without a verdict on the code.
    """
    for batch in batches:
        usual = sum(seconds.get(test.partition("::")[0], 0.0) for test in batch.tests)
        try:
            async with asyncio.timeout(max(LEAST_LIMIT, PATIENCE * usual)):
                failed, _ = await _pytest(tree, batch, "-x")
        except TimeoutError:
            return "timeout"
        if failed:
            return failed
    return None


async def _pytest(
    tree: pathlib.Path, batch: first_tests.Batch, *options: str
) -> tuple[str | None, str]:
    """The first test of a batch that fails, or a signal; None if all pass."""
    options = ("-q", "-p", "no:cacheprovider", "-m", batch.marker, *options)
    status, output = await python(tree, "-m", "pytest", *options, *batch.tests)
    if status < 0:
        return signal.Signals(-status).name, output
    if failed := re.search(
        r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE
    ):
        return failed[1], output
    # A single test may have been renamed since it was noted.
    is_gone = status == NO_SUCH_TEST and "::" in batch.tests[0]
    if status not in (PASSED, NOTHING_RAN) and not is_gone:
        raise RuntimeError(f"pytest ended with {status}:\n{output}")
    return None, output


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
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
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
