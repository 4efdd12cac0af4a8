"""Mixers of linear time: how their time grows with T, and how it compares with flash.

    seconds ≈ c · Tᵅ,   α at most 1.15        forward, T from 2048 to 32768
    at T = 16384 at least three times as fast as full causal flash attention

`mixer_cases` lists the mixers. The second claim is made for linear attention,
Performer, RWKV and Mamba; the other mixers are measured for comparison.

`train.benchmark --what=mixers` is the program.
"""

import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rich.table
from absl import flags

from train import cli, workdir
from train.bench import mixer_cases, presets, tables
from train.report import machine, stopwatch, terminal

LENGTHS, RACE = (2048, 4096, 8192, 16384, 32768), 16384
MOST_GROWTH, LEAST_SPEED = 1.15, 3.0
ROUNDS, SECONDS = 7, 60.0
DIRECTIONS = presets.DIRECTIONS

Row = Mapping[str, Any]


def measure(
    *, divisor: int, rounds: int, announce: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    """Measures each mixer at all lengths in turns, then all mixers at one length.

    Args:
      divisor: divides every length; 1 where the claims are judged.
      rounds: largest number of measurements of each case.
      announce: called with a description of the next cases.

    Yields:
      The rows measured together, each with its `part`, 'growth' or 'race', and the
      fields that `train.benchmark --compare` reads.
    """
    forward, _ = DIRECTIONS
    for name in mixer_cases.CONTENDERS:
        if name == mixer_cases.FLASH:
            continue
        announce(f"growth of {name}")
        yield _in_turns(
            "growth", [(name, n // divisor) for n in LENGTHS], forward, rounds
        )
    for direction in DIRECTIONS:
        announce(f"everyone at T={RACE // divisor}, {direction}")
        yield _in_turns(
            "race",
            [(name, RACE // divisor) for name in mixer_cases.CONTENDERS],
            direction,
            rounds,
        )


def _in_turns(
    part: str, works: list[tuple[str, int]], direction: str, rounds: int
) -> list[dict[str, Any]]:
    pieces = {
        f"{name} {length}": mixer_cases.piece(
            name, length, backward=direction != DIRECTIONS[0]
        )
        for name, length in works
    }
    seconds = stopwatch.interleaved(
        {key: piece.run for key, piece in pieces.items()},
        stopwatch.turns(rounds, seconds=SECONDS),
    )
    return [
        {
            "part": part,
            "implementation": name,
            "mode": "jit",
            "verdict": "measured",
            "direction": direction,
            "dtype": "float32",
            "batch_size": 1,
            "length": length,
            "num_heads": mixer_cases.HEADS,
            "num_kv_heads": mixer_cases.HEADS,
            "width": mixer_cases.WIDTH,
            "is_causal": True,
            "milliseconds": stopwatch.quartiles(seconds[f"{name} {length}"]),
            "temporary_bytes": pieces[f"{name} {length}"].temporary_bytes,
        }
        for name, length in works
    ]


def line(rows: Sequence[Row]) -> str:
    """Formats the rows measured together as one line."""
    words = [
        f"{x['implementation']} T={x['length']} {x['milliseconds'][1]:.4g} ms"
        for x in rows
    ]
    return f"{rows[0]['direction']}: {', '.join(words)}"


def claims(rows: Sequence[Row], *, judged: bool) -> list[dict[str, Any]]:
    """Judges the claims by the rows.

    Args:
      rows: the rows measured so far.
      judged: whether they were measured at the lengths of the claims.

    Returns:
      For each claim: `asked`, `limit` as text, `unit`, `measured` and `verdict`, which
      is 'met', 'missed', 'not claimed' or 'not judged'.
    """
    judgements = []
    for name, contender in mixer_cases.CONTENDERS.items():
        series = [
            x for x in rows if (x["part"], x["implementation"]) == ("growth", name)
        ]
        exponent = stopwatch.growth(
            [x["length"] for x in series], [x["milliseconds"][1] for x in series]
        )
        if exponent is not None:
            met = exponent <= MOST_GROWTH
            limit = f"at most {MOST_GROWTH}"
            judgements.append(_claim(f"{name}: time ~ T^", limit, [exponent], met))
        speeds = _speeds(rows, name)
        if name != mixer_cases.FLASH and len(speeds) == len(DIRECTIONS):
            asked = f"{name}: times as fast as flash, {' / '.join(DIRECTIONS)}"
            met = min(speeds) >= LEAST_SPEED
            claim = _claim(asked, f"at least {LEAST_SPEED:g}", speeds, met)
            if not contender.claimed:
                claim |= {"limit": "", "verdict": "not claimed"}
            judgements.append(claim)
    if not judged:
        return [claim | {"verdict": "not judged"} for claim in judgements]
    return judgements


def _speeds(rows: Sequence[Row], name: str) -> list[float]:
    """Divides flash's medians by those of a mixer, for the directions so far."""
    medians = {
        (x["implementation"], x["direction"]): x["milliseconds"][1]
        for x in rows
        if x["part"] == "race"
    }
    return [
        medians[mixer_cases.FLASH, direction] / medians[name, direction]
        for direction in DIRECTIONS
        if (name, direction) in medians
    ]


def _claim(asked: str, limit: str, measured: list[float], met: bool) -> dict[str, Any]:
    return {
        "asked": asked,
        "limit": limit,
        "unit": "",
        "measured": measured,
        "verdict": "met" if met else "missed",
    }


def rendered(results: Mapping[str, Any]) -> Iterator[rich.table.Table]:
    """Renders the medians of both parts, and the claims, as tables."""
    rows = results["rows"]
    for part, of_line, of_column in (
        ("growth", "implementation", "length"),
        ("race", "implementation", "direction"),
    ):
        of_part = [row for row in rows if row["part"] == part]
        columns = list(dict.fromkeys(row[of_column] for row in of_part))
        length = ""
        if part == "race" and of_part:
            length = f" at T={of_part[0]['length']}"
        table = terminal.table(
            f"{part}{length}: milliseconds, median (temporary MB)",
            *("", *map(str, columns)),
        )
        lines: dict[str, dict[Any, str]] = {}
        for row in of_part:
            memory = row["temporary_bytes"]
            text = f"{row['milliseconds'][1]:.4g}"
            text += "" if memory is None else f" ({memory / 1e6:.3g})"
            lines.setdefault(row[of_line], {})[row[of_column]] = text
        for name, cells in lines.items():
            table.add_row(name, *(cells.get(x, "") for x in columns))
        yield table
    headings = ("asked", "limit", "measured", "verdict")
    table = terminal.table("what is claimed", *headings)
    for claim in results["claims"]:
        numbers = " / ".join(f"{x:.3g}" for x in claim["measured"])
        table.add_row(claim["asked"], claim["limit"], numbers, claim["verdict"])
    yield table


def define_flags(values: flags.FlagValues) -> None:
    """Declares the flags of --what=mixers."""
    flags.DEFINE_integer(
        "divisor",
        1,
        "of the lengths; above 1 the claims are not judged",
        lower_bound=1,
        upper_bound=LENGTHS[0],
        flag_values=values,
    )


def main(values: flags.FlagValues) -> int:
    """Measures the mixers; writes and shows the results."""
    path = pathlib.Path(values.workdir).absolute()
    with cli.usage_errors():
        path.mkdir(parents=True, exist_ok=True)
    console = terminal.console()
    results: dict[str, Any] = {
        "what": "mixers",
        "complete": False,
        "machine": machine.describe(),
        "rows": [],
        "claims": [],
    }

    def keep() -> None:
        judged = values.divisor == 1
        results["claims"] = claims(results["rows"], judged=judged)
        text = json.dumps(results, indent=2, allow_nan=False) + "\n"
        workdir.write(path / tables.RESULTS, text)

    rounds = values.rounds or ROUNDS
    try:
        # Redrawn seldom, since that takes time from what is measured.
        with console.status("", refresh_per_second=1) as status:
            for rows in measure(
                divisor=values.divisor, rounds=rounds, announce=status.update
            ):
                results["rows"] += rows
                keep()
                console.print(line(rows))
        results["complete"] = True
        keep()
    finally:  # also when interrupted
        console.print(machine.words(results["machine"]))
        for table in rendered(results):
            console.print(table)
    return int(any(claim["verdict"] == "missed" for claim in results["claims"]))
