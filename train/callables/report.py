"""What a stranger's audit found, as lines of one screen and as files.

report.json               target, verdict, probes, leak, versions
figures/dependency.png    which output moved by edits of which input
leak.npz                  the smallest pair of inputs that shows a leak, if there is
"""

import dataclasses
import pathlib
import platform
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rich.console

from attention.properties import findings, probes
from train.callables import adapter, replay
from train.proofs import dependence
from train.report import dependency_figure

LEARNING = "learning"
# The probe without which nothing is verified, unless it was skipped.
MAIN = "edits"
LEAK, NO_LEAK, NOT_VERIFIED = "LEAK", "no leak found", "not verified"

_COLUMNS = 80
_TABLE = "{:<12} {:<15} {}"
_STYLES = {"leak": "bold red", LEAK: "bold red", "clear": "green", NO_LEAK: "green"}
# What a result says of causality; nothing, if it is not here.
_PASSED = {
    "clear": True,
    "rounding": True,
    "nan-unsafe": True,
    "leak": False,
    "void": False,
}
# What to say of a leak that this probe alone has seen, of that size.
_HINTS = {
    "huge": "only under inputs of size {:.3g}",
    "training": "only in training mode, where dropout of changing shape looks like it",
}


@dataclasses.dataclass(frozen=True)
class Leak:
    """What shows that a target leaks.

    Attributes:
      seen: outcomes of the probes that saw it; the first is kept.
      smallest: pair of inputs of the first; None of the learning proof, which edits
        nothing.
      file: that holds this pair.
    """

    seen: Sequence[probes.Outcome]
    smallest: findings.Finding | None
    file: pathlib.Path


def verdict(outcomes: Sequence[probes.Outcome]) -> str:
    """LEAK, NO_LEAK, or NOT_VERIFIED where too little was looked at or learned."""
    passed = {outcome.probe: _PASSED.get(outcome.kind) for outcome in outcomes}
    if any(outcome.kind == "leak" for outcome in outcomes):
        return LEAK
    learned = passed.pop(LEARNING, True)
    enough = learned and any(passed.values()) and not _refused_main(outcomes)
    return NO_LEAK if enough else NOT_VERIFIED


def _refused_main(outcomes: Sequence[probes.Outcome]) -> list[str]:
    """Why the main probe was refused, if it was."""
    return [
        outcome.tried
        for outcome in outcomes
        if (outcome.probe, outcome.kind) == (MAIN, "refused")
    ]


def report(
    target: adapter.Target,
    outcomes: Sequence[probes.Outcome],
    leak: Leak | None,
    seconds: float,
) -> dict[str, Any]:
    """What stands in report.json."""
    found = verdict(outcomes)
    return {
        "target": target.name,
        "framework": target.framework,
        "input": "tokens" if target.vocab_size else "embeddings",
        "length": target.length,
        "vocab_size": target.vocab_size,
        "width": target.width,
        "verdict": found,
        "causality": {
            "passed": found == NO_LEAK,
            "probes": [
                {
                    "name": outcome.probe,
                    "passed": _PASSED.get(outcome.kind),
                    "result": outcome.kind,
                    "reason": outcome.tried,
                    "finding": outcome.finding and _finding_report(outcome.finding),
                    **outcome.figures,
                }
                for outcome in outcomes
            ],
        },
        "leak": leak and _leak_report(target, leak),
        "notes": list(target.notes),
        "versions": _versions(),
        "seconds": seconds,
    }


def _leak_report(target: adapter.Target, leak: Leak) -> dict[str, Any]:
    """The leak as it stands in report.json."""
    first, small = leak.seen[0], leak.smallest
    if first.finding is None or small is None:
        return {"probe": first.probe, "reason": first.tried}
    return {
        **_finding_report(first.finding),
        "mode": replay.mode(first.finding),
        "probes": [outcome.probe for outcome in leak.seen],
        "shape": list(small.inputs.shape),
        "smallest": _finding_report(small),
        "file": leak.file.name,
        "replay": " ".join(replay.command(target, leak.file)),
        "by_hand": replay.by_hand(target, small, leak.file),
    }


def leak_lines(target: adapter.Target, leak: Leak) -> list[str]:
    """The leak in lines for the screen."""
    first, small = leak.seen[0], leak.smallest
    finding = first.finding
    if finding is None or small is None:
        return [first.tried]
    others = ", ".join(outcome.probe for outcome in leak.seen[1:])
    hint = _HINTS.get(finding.probe) if not others else None
    length, mode = finding.inputs.shape[1], replay.mode(finding)
    return [
        replay.words(finding),
        f"seen by {finding.probe}, length {length}, {mode} mode"
        + (f"; also by {others}" if others else ""),
        f"smallest pair of inputs: {list(small.inputs.shape)} in {leak.file}; "
        "to replay it:",
        *_shell(replay.command(target, leak.file)),
        *(f"    {line}" for line in replay.by_hand(target, small, leak.file)),
        *([hint.format(finding.size)] if hint else ()),
    ]


def draw(
    folder: pathlib.Path, outcomes: Sequence[probes.Outcome], title: str
) -> list[str]:
    """Draws what edits moved; or removes an old picture.

    Args:
      folder: of pictures.
      outcomes: of the probes.
      title: of the picture.

    Returns:
      Its path from the folder above, if there is one.
    """
    edits = next((outcome for outcome in outcomes if outcome.moved is not None), None)
    if edits is None or edits.moved is None:
        for stale in folder.glob("dependency.*"):
            stale.unlink()
        return []
    # Rounding is no dependence: less than a share of the most that the edit moved.
    finite = np.isfinite(edits.moved)
    most = np.max(edits.moved, axis=0, where=finite, initial=0)
    dependency = edits.moved > findings.ROUNDING * most
    if edits.kind != "leak":
        dependency = np.tril(dependency)
    for finding in (outcome.finding for outcome in outcomes if outcome.kind == "leak"):
        if (
            finding is not None
            and finding.row == finding.target_row
            and finding.inputs.shape[1] == len(dependency)
        ):
            dependency[finding.target, finding.source] = True
    picture = dependency_figure.draw(folder, dependency, None, verdict=title)
    return [str(picture.relative_to(folder.parent))]


def head(console: rich.console.Console, target: adapter.Target) -> None:
    """Prints what is audited, and the table's head."""
    kind = f"{target.vocab_size} ids" if target.vocab_size else f"width {target.width}"
    _say(console, f"{target.name} ({target.framework}), length {target.length}, {kind}")
    _say(console, _TABLE.format("probe", "result", "what was tried"), "bold")


def show_row(console: rich.console.Console, outcome: probes.Outcome) -> None:
    """Prints a row of the table, cut where the screen ends."""
    line = _TABLE.format(outcome.probe, outcome.kind, outcome.tried)
    if len(line) > _COLUMNS:
        line = f"{line[: _COLUMNS - 1]}…"
    console.print(line, style=_STYLES.get(outcome.kind))


def show_verdict(
    console: rich.console.Console,
    outcomes: Sequence[probes.Outcome],
    lines: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Prints the verdict.

    Args:
      console: where to.
      outcomes: of the probes.
      lines: of `leak_lines`.
      notes: of the target.
    """
    found = verdict(outcomes)
    why = f": {lines[0]}" if lines else ""
    if found == NO_LEAK:
        why = _by_whom(outcomes)
    _say(console, f"verdict: {found}{why}", _STYLES.get(found))
    for line in [*lines[1:], *_explanations(outcomes), *notes]:
        _say(console, line)


def _by_whom(outcomes: Sequence[probes.Outcome]) -> str:
    """Which probes found no leak, where some that could have did not run."""
    ran, not_run = (
        ", ".join(outcome.probe for outcome in outcomes if outcome.kind in kinds)
        for kinds in (_PASSED, ("skipped", "refused"))
    )
    return f" by {ran}; not run: {not_run}" if not_run else ""


def _explanations(outcomes: Sequence[probes.Outcome]) -> Iterator[str]:
    """What is neither clear nor a leak, and what the learning proof showed."""
    rounding = [outcome.finding for outcome in outcomes if outcome.kind == "rounding"]
    if (most := findings.worst(rounding)) and verdict(outcomes) != LEAK:
        yield f"rounding: {replay.rounding_words(most)}"
    if any(outcome.kind == "nan-unsafe" for outcome in outcomes):
        yield (
            "nan-unsafe: 0 x NaN: earlier outputs turn into NaN, and no number moves"
        )
    if any(
        outcome.moved is not None and not outcome.moved.any() for outcome in outcomes
    ):
        yield "no edit moved any output: does it depend on the input at all?"
    if verdict(outcomes) == LEAK:
        return
    learned = [outcome.tried for outcome in outcomes if outcome.probe == LEARNING]
    if reasons := _refused_main(outcomes):
        yield f"the main probe, {MAIN}, was refused: {reasons[0]}"
    elif verdict(outcomes) == NOT_VERIFIED and not learned:
        yield "every probe was refused or left out"
    yield from (f"{LEARNING}: {words}" for words in learned)


def _shell(command: Sequence[str]) -> list[str]:
    """A command in lines that fit the screen and can be copied."""
    line = f"    {' '.join(command)}"
    if len(line) <= _COLUMNS:
        return [line]
    *words, last = command
    return [f"    {' '.join(words)} \\", f"        {last}"]


def _finding_report(finding: findings.Finding) -> dict[str, Any]:
    names = ("kind", "probe", "source", "target", "row", "target_row")
    return {
        **{name: getattr(finding, name) for name in names},
        "movement": dependence.finite(finding.movement),
        "size": dependence.finite(finding.size),
        "length": finding.inputs.shape[1],
    }


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "jax": jax.__version__,
    }
    if torch := sys.modules.get("torch"):
        versions["torch"] = torch.__version__
    return versions


def _say(console: rich.console.Console, line: str, style: str | None = None) -> None:
    """Prints words in lines that fit the screen; code as it is."""
    indented = line.startswith(" ")
    parts = (
        [line] if indented else textwrap.wrap(line, _COLUMNS, subsequent_indent="  ")
    )
    for part in parts:
        console.print(part, style=style)
