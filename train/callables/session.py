"""An audit of a stranger's callable: every probe, one screen and some files.

These files appear when all is done, each whole or not at all; those of an earlier
audit in the folder go away. `train.audit` is the program.

    report.json               target, verdict, probes, leak, versions
    figures/dependency.png    which output moved by edits of which input
    leak.npz                  smallest pair of inputs that shows a leak, if there is one
"""

import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np
import rich.console
import rich.status

from attention.properties import calls, outcomes, probes
from train import foreign, workdir
from train.callables import adapter, picture, replay, screen, verdict
from train.proofs import learning


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
    target: adapter.Target,
    *,
    path: pathlib.Path,
    skip: Collection[str],
    trainer: learning.Trainer | None,
) -> bool:
    """Runs the probes, shows and writes what they saw.

    Args:
      target: the callable, of `adapter.adapt`.
      path: the folder, of `prepare`.
      skip: names of probes that are left out.
      trainer: trainer for the learning proof; None leaves that proof out.

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
    screen.head(console, target)
    results = []
    for outcome in _outcomes(target, console, skip, trainer):
        screen.show_row(console, outcome)
        results.append(outcome)
    for name in (workdir.REPORT, replay.FILE_NAME):
        (path / name).unlink(missing_ok=True)
    leak = _keep_leak(target, path / replay.FILE_NAME, results)
    conclusion = verdict.verdict(results)
    title = f"{target.name}: {conclusion}"
    pictures = picture.draw(path / workdir.FIGURES, results, title)
    seconds = time.perf_counter() - began
    contents = verdict.as_json(target, results, leak, seconds)
    workdir.write(path / workdir.REPORT, json.dumps(contents, indent=2) + "\n")
    lines = screen.leak_lines(target, leak) if leak else []
    screen.show_verdict(console, results, lines, target.notes)
    print(f"{path}: {', '.join([workdir.REPORT, *pictures])} ({seconds:.1f} s)")
    return conclusion == verdict.NO_LEAK


def _outcomes(
    target: adapter.Target,
    console: rich.console.Console,
    skip: Collection[str],
    trainer: learning.Trainer | None,
) -> Iterator[outcomes.Outcome]:
    """Each as soon as its probe is done, with a sign of life on a terminal."""
    for probe in probes.PROBES:
        if probe in skip:
            yield outcomes.Outcome(probe, "skipped", "--skip")
            continue
        with console.status(probe) as status:
            outcome = probes.run(probe, _watched(target, status, probe))
        yield outcome
    if trainer is not None:
        with console.status("learning: the trainer is called twice"):
            outcome = _learn(target, trainer)
        yield outcome


def _watched(
    target: adapter.Target, status: rich.status.Status, probe: str
) -> adapter.Target:
    """The target, counting its calls."""
    count = itertools.count(1)

    def watched(fn: calls.NumpyFunction) -> calls.NumpyFunction:
        def call(inputs: np.ndarray) -> np.ndarray:
            status.update(f"{probe}: call {next(count)}")
            return fn(inputs)

        return call

    training = target.training and watched(target.training)
    return dataclasses.replace(target, fn=watched(target.fn), training=training)


def _learn(target: adapter.Target, trainer: learning.Trainer) -> outcomes.Outcome:
    assert target.vocab_size is not None
    name = verdict.LEARNING
    try:
        proof = learning.prove_trainer(
            trainer,
            vocab_size=target.vocab_size,
            length=target.length,
            rng=jax.random.key(target.seed),
        )
    # Foreign code: anything may go wrong.
    except (Exception, SystemExit) as error:
        return outcomes.Outcome(name, "refused", foreign.blame(error))
    return outcomes.Outcome(name, proof.result, proof.reason, figures=proof.figures)


def _keep_leak(
    target: adapter.Target, file: pathlib.Path, results: Sequence[outcomes.Outcome]
) -> verdict.Leak | None:
    """Writes the smallest pair of inputs that shows the first leak, if there is one."""
    seen = [outcome for outcome in results if outcome.kind == "leak"]
    if not seen:
        return None
    smallest = None
    if seen[0].finding is not None:
        smallest = replay.smallest(target, seen[0].finding)
        replay.save(file, target, smallest)
    return verdict.Leak(seen, smallest, file)
