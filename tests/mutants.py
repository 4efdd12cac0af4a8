"""Mutation check: do the tests see small wrong edits of the code?

    python -m tests.mutants
    python -m tests.mutants --only=masks/leaves

Each mutation of tests/mutation/mutations.py is made in its own copy of the tree, where
the tests of attention/ and models/ run in processes of their own until one fails:
those of the edited file first, then all others. The working tree is read once, at the
start, and never touched.

A mutant that fails no test has survived: a test is missing, or the mutation is
equivalent to the original, and its row says why. One whose tests take ten times as long
as they should is killed too ('timeout').

runs/mutants/report.json holds what is known so far, also after Ctrl-C. The test that it
names is tried first when the same mutation is made again.

Exit status: 0 at least 95 % of the mutants that are not equivalent are killed, and none
of those that are said to be; 1 otherwise; 2 unusable arguments, or a test fails without
any mutation.
"""

import asyncio
import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import rich.console
import rich.table
import rich.text
from absl import flags

from tests.mutation import first_tests, mutations, runner
from train import cli, workdir

ROOT = pathlib.Path(__file__).parent.parent
GOAL = 0.95


class Result(NamedTuple):
    """What became of a mutant.

    Attributes:
      mutation: that was made.
      killer: the test that failed, 'timeout' or a signal; None: it survived.
      seconds: until then.
    """

    mutation: mutations.Mutation
    killer: str | None
    seconds: float


async def examine(
    chosen: Sequence[mutations.Mutation],
    folder: pathlib.Path,
    jobs: int,
    killers: Mapping[str, str],
    console: rich.console.Console,
    keep: Callable[[list[Result]], None],
) -> list[Result]:
    """Makes every mutant, and sees what kills it.

    Args:
      chosen: mutations.
      folder: for copies of the tree.
      jobs: mutants at a time.
      killers: name of a mutation -> the test that failed when it was last made.
      console: for a line about each mutant as it finishes.
      keep: is called with all results by then, too.

    Returns:
      Results in the order of `chosen`.

    Raises:
      UsageError: a test fails without any mutation, or an edit does not fit its file.
    """
    original = runner.copy(ROOT, folder / "original")
    texts = {name: (original / name).read_text() for name in {m.file for m in chosen}}
    with cli.usage_errors():
        edited = [mutation.apply(texts[mutation.file]) for mutation in chosen]
    console.print(f"{len(chosen)} mutants; first the tests without any mutation")
    began = time.monotonic()
    seconds = await _control(original, jobs)
    console.print(f"they pass, in {time.monotonic() - began:.0f} s")
    free = asyncio.Semaphore(jobs)
    results: dict[int, Result] = {}

    async def one(number: int, mutation: mutations.Mutation) -> None:
        async with free:
            start = time.monotonic()
            tree = runner.copy(original, folder / str(number))
            (tree / mutation.file).write_text(edited[number])
            batches = first_tests.batches(
                tree,
                mutation.file,
                seconds=seconds,
                killer=killers.get(mutation.name),
            )
            killer = await runner.killer(tree, batches, seconds=seconds)
            shutil.rmtree(tree)
        results[number] = Result(mutation, killer, time.monotonic() - start)
        fate = f"killed by {killer}" if killer else "SURVIVED"
        _say(console, f"{len(results)}/{len(chosen)}  {mutation.name}: {fate}")
        keep([results[i] for i in sorted(results)])

    async with asyncio.TaskGroup() as group:
        for number, mutation in enumerate(chosen):
            group.create_task(one(number, mutation))
    return [results[number] for number in range(len(chosen))]


async def _control(tree: pathlib.Path, jobs: int) -> dict[str, float]:
    """Runs the tests as they are; what is compiled here serves the mutants too.

    Returns:
      Seconds that each test file took.

    Raises:
      UsageError: a test fails, or the tests of the tree import other code than its own.
    """
    modules = "attention, models"
    where = f"import {modules}; print(*(m.__file__ for m in ({modules})), sep='\\n')"
    _, output = await runner.python(tree, "-c", where)
    for line in output.splitlines():
        if not pathlib.Path(line).is_relative_to(tree):
            raise cli.UsageError(f"the tests of a copy would import {line}")
    failed, seconds = await runner.control(tree, first_tests.files(tree), jobs=jobs)
    if failed:
        raise cli.UsageError(f"without any mutation {failed} fails")
    return seconds


def known_killers(path: pathlib.Path) -> dict[str, str]:
    """Name of a mutation -> the test that killed it, of an earlier report, if any."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {
        f"{row['file']}: {row['wrong']}": row["killer"]
        for row in rows
        if "::" in (row["killer"] or "")
    }


def show(results: Sequence[Result], console: rich.console.Console) -> bool:
    """Prints what killed each mutant and what survived; returns whether it will do."""
    table = rich.table.Table("file", "what is wrong", "killed by")
    for mutation, killer, _ in results:
        cells = (mutation.file, mutation.wrong, killer or "-")
        table.add_row(*map(rich.text.Text, cells))
    console.print(table)
    for mutation, killer, _ in results:
        if mutation.equivalent:
            fate = f"killed by {killer}, though" if killer else "equivalent:"
            _say(console, f"{mutation.name}\n  {fate} {mutation.equivalent}")
        elif killer is None:
            _say(console, f"{mutation.name}\n  SURVIVED: no test sees it")
    wrong = [result for result in results if not result.mutation.equivalent]
    killed = sum(result.killer is not None for result in wrong)
    refuted = sum(result.killer is not None for result in results) - killed
    _say(
        console,
        f"killed {killed} of {len(wrong)} mutants; of {len(results) - len(wrong)} that "
        f"are said to be equivalent {refuted} are not",
    )
    return killed >= GOAL * len(wrong) and not refuted


def _say(console: rich.console.Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def define_flags(values: flags.FlagValues) -> None:
    """Declares the program's flags."""
    flags.DEFINE_string(
        "only", "", "mutants whose file or description has this", flag_values=values
    )
    flags.DEFINE_integer(
        "jobs", 2, "mutants at a time", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string(
        "workdir", "runs/mutants", "folder of report.json", flag_values=values
    )


def main(values: flags.FlagValues) -> int:
    """Parses flags, makes the mutants, and reports."""
    chosen = [m for m in mutations.MUTATIONS if values.only in m.name]
    if not chosen:
        raise cli.UsageError(f"no mutation has --only={values.only} in its name")
    path = pathlib.Path(values.workdir)
    with cli.usage_errors():
        path.mkdir(parents=True, exist_ok=True)
    console = rich.console.Console()

    killers = known_killers(path / workdir.REPORT)

    def keep(results: list[Result]) -> None:
        rows = [
            result.mutation._asdict()
            | {"killer": result.killer, "seconds": round(result.seconds, 1)}
            for result in results
        ]
        workdir.write(path / workdir.REPORT, json.dumps(rows, indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = pathlib.Path(name).resolve()
        results = asyncio.run(
            examine(chosen, folder, values.jobs, killers, console, keep)
        )
    return 0 if show(results, console) else 1


if __name__ == "__main__":
    cli.run(main, define_flags)
