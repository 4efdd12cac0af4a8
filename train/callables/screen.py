"""The audit of a stranger's callable as lines of one screen."""

import textwrap
from collections.abc import Iterator, Sequence

import rich.console

from attention.properties import findings, outcomes
from train.callables import adapter, replay, verdict

_COLUMNS = 80
_TABLE = "{:<12} {:<15} {}"
_STYLES = {
    "leak": "bold red",
    verdict.LEAK: "bold red",
    "clear": "green",
    verdict.NO_LEAK: "green",
}
# What to say of a leak that this probe alone has seen, of that size.
_HINTS = {
    "huge": "only under inputs of size {:.3g}",
    "training": "only in training mode, where dropout of changing shape looks like it",
}


def leak_lines(target: adapter.Target, leak: verdict.Leak) -> list[str]:
    """The leak in lines for the screen."""
    first, small = leak.seen[0], leak.smallest
    finding = first.finding
    if finding is None or small is None:
        return [first.tried]
    other_probes = ", ".join(outcome.probe for outcome in leak.seen[1:])
    hint = _HINTS.get(finding.probe) if not other_probes else None
    length, mode = finding.inputs.shape[1], replay.mode(finding)
    return [
        replay.words(finding),
        f"seen by {finding.probe}, length {length}, {mode} mode"
        + (f"; also by {other_probes}" if other_probes else ""),
        f"smallest pair of inputs: {list(small.inputs.shape)} in {leak.file}; "
        "to replay it:",
        *_shell(replay.command(target, leak.file)),
        *(f"    {line}" for line in replay.by_hand(target, small, leak.file)),
        *([hint.format(finding.size)] if hint else ()),
    ]


def head(console: rich.console.Console, target: adapter.Target) -> None:
    """Prints what is audited, and the table's head."""
    kind = f"{target.vocab_size} ids" if target.vocab_size else f"width {target.width}"
    _say(console, f"{target.name} ({target.framework}), length {target.length}, {kind}")
    _say(console, _TABLE.format("probe", "result", "what was tried"), "bold")


def show_row(console: rich.console.Console, outcome: outcomes.Outcome) -> None:
    """Prints a row of the table, cut where the screen ends."""
    line = _TABLE.format(outcome.probe, outcome.kind, outcome.tried)
    if len(line) > _COLUMNS:
        line = f"{line[: _COLUMNS - 1]}…"
    console.print(line, style=_STYLES.get(outcome.kind))


def show_verdict(
    console: rich.console.Console,
    results: Sequence[outcomes.Outcome],
    lines: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Prints the verdict.

    Args:
      console: console to print to.
      results: outcomes of the probes.
      lines: lines about the leak, of `leak_lines`; none if there is no leak.
      notes: notes of the target.
    """
    conclusion = verdict.verdict(results)
    why = f": {lines[0]}" if lines else ""
    if conclusion == verdict.NO_LEAK:
        why = _by_whom(results)
    _say(console, f"verdict: {conclusion}{why}", _STYLES.get(conclusion))
    for line in [*lines[1:], *_explanations(results), *notes]:
        _say(console, line)


def _by_whom(results: Sequence[outcomes.Outcome]) -> str:
    """Which probes conclusion no leak, where some that could have did not run."""
    ran, not_run = (
        ", ".join(outcome.probe for outcome in results if outcome.kind in kinds)
        for kinds in (verdict.PASSED, ("skipped", "refused"))
    )
    return f" by {ran}; not run: {not_run}" if not_run else ""


def _explanations(results: Sequence[outcomes.Outcome]) -> Iterator[str]:
    """What is neither clear nor a leak, and what the learning proof showed."""
    rounding = [outcome.finding for outcome in results if outcome.kind == "rounding"]
    if (most := findings.worst(rounding)) and verdict.verdict(results) != verdict.LEAK:
        yield f"rounding: {replay.rounding_words(most)}"
    if any(outcome.kind == "nan-unsafe" for outcome in results):
        yield (
            "nan-unsafe: 0 x NaN: earlier outputs turn into NaN, and no number moves"
        )
    if any(
        outcome.moved is not None and not outcome.moved.any() for outcome in results
    ):
        yield "no edit moved any output: does it depend on the input at all?"
    if verdict.verdict(results) == verdict.LEAK:
        return
    learned = [
        outcome.tried for outcome in results if outcome.probe == verdict.LEARNING
    ]
    if reasons := verdict.refusals_of_main(results):
        yield f"the main probe, {verdict.MAIN}, was refused: {reasons[0]}"
    elif verdict.verdict(results) == verdict.NOT_VERIFIED and not learned:
        yield "every probe was refused or left out"
    yield from (f"{verdict.LEARNING}: {words}" for words in learned)


def _shell(command: Sequence[str]) -> list[str]:
    """A command in lines that fit the screen and can be copied."""
    line = f"    {' '.join(command)}"
    if len(line) <= _COLUMNS:
        return [line]
    *words, last = command
    return [f"    {' '.join(words)} \\", f"        {last}"]


def _say(console: rich.console.Console, line: str, style: str | None = None) -> None:
    """Prints words in lines that fit the screen; code as it is."""
    indented = line.startswith(" ")
    parts = (
        [line] if indented else textwrap.wrap(line, _COLUMNS, subsequent_indent="  ")
    )
    for part in parts:
        console.print(part, style=style)
