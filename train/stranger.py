"""Audits a stranger's callable: flags, every probe, one screen, and what it leaves.

The files (`train.audit_report`) appear when all is done, each whole or not at all; what
an earlier audit left in the folder goes away. `train.audit` is the program.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Collection, Iterator

import jax
import numpy as np
import rich.console
import rich.status
from absl import flags

from attention import leaks, probes
from train import audit_report, cli, foreign, learning, replay, targets, workdir

WORKDIR = "runs/audit"
_INPUTS = ("tokens", "embeddings")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the flags of a target."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    integer = functools.partial(flags.DEFINE_integer, flag_values=values)
    text("target", None, "package.module:callable to be audited; the rest is for it")
    flags.DEFINE_enum(
        "input", "tokens", _INPUTS, "what the callable takes", flag_values=values
    )
    integer("vocab_size", None, "number of ids, for tokens", lower_bound=2)
    integer("width", None, "width of the vectors, for embeddings", lower_bound=1)
    integer("length", 64, "positions", lower_bound=2)
    flags.DEFINE_list(
        "skip",
        [],
        f"probes to leave out, of {', '.join(probes.PROBES)}",
        flag_values=values,
    )
    text(
        "trainer",
        None,
        "package.module:callable for the learning proof: rows int32 [R T+1] -> a "
        "function of rows [F T+1] that gives the losses of rows[:, 1:] in nats [F T]",
    )
    text("replay", None, "leak.npz of an audit: does the target still leak on it?")
    integer("edits", 20_000, "token edits of the first probe, at most", lower_bound=1)
    integer("seed", 0, "of all that is drawn", lower_bound=0, upper_bound=2**32 - 1)


def refuse_flags(values: flags.FlagValues) -> None:
    """Raises UsageError for any flag of a target, where none is named."""
    own = flags.FlagValues()
    define_flags(own)
    for name in own:
        if values[name].present:
            raise cli.UsageError(f"--{name} needs --target=package.module:callable")


def main(values: flags.FlagValues) -> int:
    """Audits a callable, or replays a leak of it."""
    if values.replay:
        with cli.usage_errors(), _unusable():
            arrays = replay.read(pathlib.Path(values.replay))
            finding = replay.replay(foreign.load(values.target), arrays)
        leaks_still = finding is not None and finding.kind == "leak"
        words = replay.words(finding) if finding else "no output moves"
        print("still leaks:" if leaks_still else "no leak any more:", words)
        return 1 if leaks_still else 0
    _check_flags(values)
    path = pathlib.Path(values.workdir or WORKDIR)
    with cli.usage_errors():
        target = targets.adapt(
            foreign.load(values.target),
            length=values.length,
            vocab_size=values.vocab_size,
            width=values.width,
            seed=values.seed,
            edits=values.edits,
        )
        trainer = foreign.load(values.trainer) if values.trainer else None
        prepare(path)
    with _unusable():
        shown = audit(
            target, name=values.target, path=path, skip=values.skip, trainer=trainer
        )
    return 0 if shown else 1


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    """A callable that turns out to have a will of its own is misuse, found late."""
    try:
        yield
    except (leaks.NotDeterministic, leaks.Refused) as error:
        raise cli.UsageError(str(error)) from error


def _check_flags(values: flags.FlagValues) -> None:
    """Raises UsageError where flags do not go together."""
    sizes = {"tokens": "vocab_size", "embeddings": "width"}
    for kind, name in sizes.items():
        if kind != values.input and values[name].value is not None:
            raise cli.UsageError(
                f"--{name} goes with --input={kind}, not {values.input}"
            )
    if values[sizes[values.input]].value is None:
        raise cli.UsageError(f"--input={values.input} needs --{sizes[values.input]}=N")
    if values.trainer and values.input != "tokens":
        raise cli.UsageError("--trainer needs --input=tokens")
    unknown = [name for name in values.skip if name not in probes.PROBES]
    if unknown:
        raise cli.UsageError(
            f"--skip knows no probe {unknown[0]!r}, only {', '.join(probes.PROBES)}"
        )
    if probes.PROBES.keys() <= set(values.skip):
        raise cli.UsageError("--skip leaves no probe")


def prepare(path: pathlib.Path) -> None:
    """Makes the folder of an audit.

    Raises:
      ValueError: it cannot be made or written, or holds a run of train.main.
    """
    if (path / workdir.CONFIG).exists():
        raise ValueError(
            f"workdir {str(path)!r} holds a run of train.main, not an audit"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"workdir {str(path)!r} cannot be made: {error.strerror}"
        ) from None
    figures = path / workdir.FIGURES
    for folder in (path, figures):
        if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(f"{str(folder)!r} is no folder that can be written")
    files = (path / name for name in (workdir.REPORT, replay.FILE_NAME))
    for file in (*files, *figures.glob("dependency.*")):
        if file.is_dir():
            raise ValueError(f"{str(file)!r} is a folder, not a file of an audit")


def audit(
    target: targets.Target,
    *,
    name: str,
    path: pathlib.Path,
    skip: Collection[str],
    trainer: learning.Trainer | None,
) -> bool:
    """Runs the probes, shows and writes what they saw.

    Args:
      target: of `targets.adapt`.
      name: of the callable, as `foreign.load` takes it.
      path: the folder, of `prepare`.
      skip: probes that are left out.
      trainer: for the learning proof; None: none.

    Returns:
      Whether no output was seen to depend on a later input, and enough was looked at.
    """
    began = time.perf_counter()
    console = rich.console.Console(
        # This very stream: what the callable prints is turned away from it.
        file=sys.stdout,
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    audit_report.head(console, target, name)
    rows = []
    for row in _rows(target, console, skip, trainer):
        audit_report.show_row(console, row)
        rows.append(row)
    (path / workdir.REPORT).unlink(missing_ok=True)
    leak, lines = audit_report.keep_leak(target, name, path, rows)
    verdict = audit_report.verdict(rows)
    pictured = audit_report.draw(path / workdir.FIGURES, rows, f"{name}: {verdict}")
    seconds = time.perf_counter() - began
    report = audit_report.report(target, name, rows, leak, seconds)
    workdir.write(path / workdir.REPORT, json.dumps(report, indent=2) + "\n")
    audit_report.show_verdict(console, rows, lines, target.notes)
    print(f"{path}: {', '.join([workdir.REPORT, *pictured])} ({seconds:.1f} s)")
    return verdict == audit_report.NO_LEAK


def _rows(
    target: targets.Target,
    console: rich.console.Console,
    skip: Collection[str],
    trainer: learning.Trainer | None,
) -> Iterator[audit_report.Row]:
    """A row as soon as its probe is done, with a sign of life on a terminal."""
    for probe in probes.PROBES:
        if probe in skip:
            yield audit_report.Row(probe, "skipped", "--skip")
            continue
        with console.status(probe) as status:
            outcome = probes.run(probe, _watched(target, status, probe))
        yield audit_report.Row(
            probe, outcome.kind, outcome.tried, outcome.finding, outcome.moved
        )
    if trainer is not None:
        with console.status("learning: the trainer is called twice"):
            row = _learn(target, trainer)
        yield row


def _watched(
    target: targets.Target, status: rich.status.Status, probe: str
) -> targets.Target:
    """The target, counting its calls."""
    calls = itertools.count(1)

    def watched(fn: leaks.Function) -> leaks.Function:
        def call(inputs: np.ndarray) -> np.ndarray:
            status.update(f"{probe}: call {next(calls)}")
            return fn(inputs)

        return call

    training = target.training and watched(target.training)
    return dataclasses.replace(target, fn=watched(target.fn), training=training)


def _learn(target: targets.Target, trainer: learning.Trainer) -> audit_report.Row:
    assert target.vocab_size is not None
    row = functools.partial(audit_report.Row, audit_report.LEARNING)
    try:
        proof = learning.prove_trainer(
            trainer,
            vocab_size=target.vocab_size,
            length=target.length,
            rng=jax.random.key(target.seed),
        )
    # Foreign code: anything may go wrong.
    except (Exception, SystemExit) as error:
        return row("refused", foreign.blame(error))
    result = "clear" if proof.passed else "void" if proof.void else "leak"
    return row(result, proof.reason, figures=proof.figures)
