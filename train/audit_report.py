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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
from jaxtyping import Float

from attention import leaks
from train import dependency_figure, proofs, replay, targets

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
_EXPLANATIONS = {
    "rounding": "sums in another order, as an FFT's, move earlier outputs a little",
    "nan-unsafe": "0 x NaN: earlier outputs turn into NaN, and no number moves",
}


# What to say of a leak that this probe alone has seen, of that size.
_HINTS = {
    "huge": "only under inputs of size {:.3g}",
    "training": "only in training mode, where dropout of changing shape looks like it",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      probe: its name.
      result: a kind of `probes.Outcome`, 'skipped', or 'void' of a learning proof that
        showed nothing.
      tried: what was done, or why nothing was.
      finding: the worst.
      moved: of `probes.Outcome`.
      figures: of `proofs.Proof`.
    """

    probe: str
    result: str
    tried: str
    finding: leaks.Finding | None = None
    moved: Float[np.ndarray, "T T"] | None = None
    figures: Mapping[str, Any] | None = None


def verdict(rows: Sequence[Row]) -> str:
    """LEAK, NO_LEAK, or NOT_VERIFIED where too little was looked at or learned."""
    passed = {row.probe: _PASSED.get(row.result) for row in rows}
    if any(row.result == "leak" for row in rows):
        return LEAK
    learned = passed.pop(LEARNING, True)
    enough = learned and any(passed.values()) and not _refused_main(rows)
    return NO_LEAK if enough else NOT_VERIFIED


def _refused_main(rows: Sequence[Row]) -> list[str]:
    """Why the main probe was refused, if it was."""
    return [row.tried for row in rows if (row.probe, row.result) == (MAIN, "refused")]


def report(
    target: targets.Target,
    name: str,
    rows: Sequence[Row],
    leak: Mapping[str, Any] | None,
    seconds: float,
) -> dict[str, Any]:
    """What stands in report.json; `leak` is of `keep_leak`."""
    found = verdict(rows)
    return {
        "target": name,
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
                    "name": row.probe,
                    "passed": _PASSED.get(row.result),
                    "result": row.result,
                    "reason": row.tried,
                    "finding": row.finding and _finding_report(row.finding),
                    **(row.figures or {}),
                }
                for row in rows
            ],
        },
        "leak": leak,
        "notes": list(target.notes),
        "versions": _versions(),
        "seconds": seconds,
    }


def keep_leak(
    target: targets.Target, name: str, path: pathlib.Path, rows: Sequence[Row]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Writes the smallest pair of inputs that shows a leak; or removes an old one.

    Args:
      target: that was probed.
      name: of the callable.
      path: folder of leak.npz.
      rows: of the table; the first leak in it is kept.

    Returns:
      The leak for the report, and in lines for the screen.
    """
    file = path / replay.FILE_NAME
    file.unlink(missing_ok=True)
    seen = [row for row in rows if row.result == "leak"]
    if not seen:
        return None, []
    finding = seen[0].finding
    if finding is None:  # of the learning proof, which edits nothing
        return {"probe": seen[0].probe, "reason": seen[0].tried}, [seen[0].tried]
    small = replay.smallest(target, finding)
    replay.save(file, name, target, small)
    kept = {
        **_finding_report(finding),
        "mode": replay.mode(finding),
        "probes": [row.probe for row in seen],
        "shape": list(small.inputs.shape),
        "smallest": _finding_report(small),
        "file": replay.FILE_NAME,
        "replay": " ".join(replay.command(name, file)),
        "by_hand": replay.by_hand(name, target, small, file),
    }
    others = ", ".join(kept["probes"][1:])
    hint = _HINTS.get(finding.probe) if not others else None
    lines = [
        replay.words(finding),
        f"seen by {finding.probe}, length {kept['length']}, {kept['mode']} mode"
        + (f"; also by {others}" if others else ""),
        f"smallest pair of inputs: {kept['shape']} in {file}; to replay it:",
        *_shell(replay.command(name, file)),
        *(f"    {line}" for line in kept["by_hand"]),
        *([hint.format(finding.size)] if hint else ()),
    ]
    return kept, lines


def draw(folder: pathlib.Path, rows: Sequence[Row], title: str) -> list[str]:
    """Draws what edits moved; or removes an old picture.

    Args:
      folder: of pictures.
      rows: of the table.
      title: of the picture.

    Returns:
      Its path from the folder above, if there is one.
    """
    edits = next((row for row in rows if row.moved is not None), None)
    if edits is None or edits.moved is None:
        for stale in folder.glob("dependency.*"):
            stale.unlink()
        return []
    # Rounding is no dependence: less than a share of the most that the edit moved.
    finite = np.isfinite(edits.moved)
    most = np.max(edits.moved, axis=0, where=finite, initial=0)
    dependency = edits.moved > leaks.ROUNDING * most
    if edits.result != "leak":
        dependency = np.tril(dependency)
    for finding in (row.finding for row in rows if row.result == "leak"):
        if (
            finding is not None
            and finding.row == finding.target_row
            and finding.inputs.shape[1] == len(dependency)
        ):
            dependency[finding.target, finding.source] = True
    picture = dependency_figure.draw(folder, dependency, None, verdict=title)
    return [str(picture.relative_to(folder.parent))]


def head(console: rich.console.Console, target: targets.Target, name: str) -> None:
    """Prints what is audited, and the table's head."""
    kind = f"{target.vocab_size} ids" if target.vocab_size else f"width {target.width}"
    _say(console, f"{name} ({target.framework}), length {target.length}, {kind}")
    _say(console, _TABLE.format("probe", "result", "what was tried"), "bold")


def show_row(console: rich.console.Console, row: Row) -> None:
    """Prints a row of the table, cut where the screen ends."""
    line = _TABLE.format(row.probe, row.result, row.tried)
    if len(line) > _COLUMNS:
        line = f"{line[: _COLUMNS - 1]}…"
    console.print(line, style=_STYLES.get(row.result))


def show_verdict(
    console: rich.console.Console,
    rows: Sequence[Row],
    lines: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Prints the verdict.

    Args:
      console: where to.
      rows: of the table.
      lines: of `keep_leak`.
      notes: of the target.
    """
    found = verdict(rows)
    why = f": {lines[0]}" if lines else ""
    _say(console, f"verdict: {found}{why}", _STYLES.get(found))
    for line in [*lines[1:], *_explanations(rows), *notes]:
        _say(console, line)


def _explanations(rows: Sequence[Row]) -> Iterator[str]:
    """What is neither clear nor a leak, and what the learning proof showed."""
    results = {row.result for row in rows}
    for result, words in _EXPLANATIONS.items():
        if result in results:
            yield f"{result}: {words}"
    if any(row.moved is not None and not row.moved.any() for row in rows):
        yield "no edit moved any output: does it depend on the input at all?"
    if verdict(rows) == LEAK:
        return
    learned = [row.tried for row in rows if row.probe == LEARNING]
    if reasons := _refused_main(rows):
        yield f"the main probe, {MAIN}, was refused: {reasons[0]}"
    elif verdict(rows) == NOT_VERIFIED and not learned:
        yield "every probe was refused or left out"
    yield from (f"{LEARNING}: {words}" for words in learned)


def _shell(command: Sequence[str]) -> list[str]:
    """A command in lines that fit the screen and can be copied."""
    line = f"    {' '.join(command)}"
    if len(line) <= _COLUMNS:
        return [line]
    *words, last = command
    return [f"    {' '.join(words)} \\", f"        {last}"]


def _finding_report(finding: leaks.Finding) -> dict[str, Any]:
    names = ("kind", "probe", "source", "target", "row", "target_row")
    return {
        **{name: getattr(finding, name) for name in names},
        "movement": proofs.finite(finding.movement),
        "size": proofs.finite(finding.size),
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
