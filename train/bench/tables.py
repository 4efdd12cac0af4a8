"""Output of the benchmark of attention: lines, tables, the ratios of two results."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table

from train.report import machine, terminal

RESULTS = "results.json"
Row = Mapping[str, Any]
Results = Mapping[str, Any]


def case_line(rows: Sequence[Row]) -> str:
    """Formats the medians of a case as one line."""
    parts = []
    for row in rows:
        measured = row["verdict"] == "measured"
        text = f"{row['milliseconds'][1]:.4g} ms" if measured else row["verdict"]
        parts.append(f"{_name(row)} {text}")
    return ", ".join(parts)


def claim_line(claim: Row) -> str:
    """Formats a claim as one line."""
    return f"{claim['asked']}: {_numbers(claim)} {claim['verdict']}"


def show(console: rich.console.Console, results: Results) -> None:
    """Prints all results: tables, what was not measured and why, and claims."""
    console.print(machine.words(results["machine"]))
    keys = ("sweep", "dtype", "direction")
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in results["rows"]:
        tables.setdefault(tuple(row[key] for key in keys), []).append(row)
    for (sweep, *_), rows in tables.items():
        console.print(_times(sweep, rows))
        if sweep == "length":
            console.print(_details(rows, results["exponents"]))
    reasons = {
        f"{_name(row)}, {row['direction']}, {row['dtype']}, T={row['length']}, "
        f"N={row['num_heads']}: {row['verdict']}: {row['reason']}"
        for row in results["rows"]
        if row["verdict"] != "measured"
    }
    reasons |= {
        f"{name}: left out: {reason}" for name, reason in results["left_out"].items()
    }
    for line in sorted(reasons):
        console.print(line)
    if results["claims"]:
        console.print(_claims(results["claims"]))


def _times(sweep: str, rows: Sequence[Row]) -> rich.table.Table:
    """Makes a table with a line for each implementation and mode, a column per size."""
    size, letter = ("length", "T") if sweep == "length" else ("num_heads", "N")
    fixed = rows[0]
    heads, width = fixed["num_heads"], fixed["width"]
    shape = f"{heads} heads of {width}"
    if sweep == "heads":
        shape = f"T={fixed['length']}, N heads of {heads * width} / N"
    sizes = list(dict.fromkeys(row[size] for row in rows))
    table = terminal.table(
        f"{fixed['direction']}, {fixed['dtype']}, {shape}"
        f"{', causal' * fixed['is_causal']}: "
        "milliseconds, median ± half the interquartile range",
        *("", *(f"{letter}={n}" for n in sizes)),
        no_wrap=True,
    )
    lines: dict[str, dict[int, str]] = {}
    for row in rows:
        text = row["verdict"]
        if text == "measured":
            low, median, high = row["milliseconds"]
            text = f"{median:.4g} ±{(high - low) / 2 / median:.0%}"
        lines.setdefault(_name(row), {})[row[size]] = text
    for name, cells in lines.items():
        table.add_row(name, *(cells.get(n, "") for n in sizes))
    return table


def _details(rows: Sequence[Row], exponents: Sequence[Row]) -> rich.table.Table:
    """Makes a table of rates, compilation, memory and growth at the greatest length."""
    table = terminal.table(
        "at the greatest length measured",
        *("", "T", "share of product", "compiled in", "traces", "temporary"),
        *("time ~ T^", "memory ~ T^"),
        no_wrap=True,
    )
    last = {_name(row): row for row in rows if row["verdict"] == "measured"}
    growth = {
        _name(x): x
        for x in exponents
        if all(x[key] == rows[0][key] for key in ("direction", "dtype"))
    }
    for name, row in last.items():
        exponent = growth.get(name, {})
        table.add_row(
            name,
            str(row["length"]),
            f"{row['share_of_product']:.0%}",
            _text(row["compile_seconds"], "{:.2f} s"),
            _text(row["traces"], "{}"),
            _text(row["temporary_bytes"], "{:.3g} bytes"),
            *(_text(exponent.get(key), "{:.2f}") for key in ("time", "memory")),
        )
    return table


def _name(row: Row) -> str:
    return f"{row['implementation']} {row['mode']}"


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _claims(claims: Sequence[Row]) -> rich.table.Table:
    headings = ("asked", "at most", "measured", "verdict")
    table = terminal.table("what is claimed", *headings)
    for claim in claims:
        limits = " / ".join(f"{x:g}" for x in claim["at_most"])
        verdict = claim["verdict"]
        if claim["reason"]:
            verdict += f": {claim['reason']}"
        table.add_row(
            claim["asked"],
            f"{limits} {claim['unit']}".strip(),
            _numbers(claim),
            verdict,
        )
    return table


def _numbers(claim: Row) -> str:
    if claim["measured"] is None:
        return ""
    numbers = " / ".join(f"{x:.3g}" for x in claim["measured"])
    return f"{numbers} {claim['unit']}".strip()


def compare(console: rich.console.Console, paths: Sequence[pathlib.Path]) -> None:
    """Prints the ratios of the numbers that two files share, the second to the first.

    Args:
      console: where the table is printed.
      paths: two files of results.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file holds no results, or the files share none.
    """
    first, second = (_medians(path) for path in paths)
    common = [key for key in first if key in second]
    if not common:
        raise ValueError(f"{paths[0]} and {paths[1]} have nothing in common")
    table = terminal.table(f"A: {paths[0]}, B: {paths[1]}", "", "A", "B", "B / A")
    for key in common:
        a, b = first[key], second[key]
        ratio = f"{b / a:.2f}" if a else ""
        table.add_row(key, f"{a:.4g}", f"{b:.4g}", ratio)
    console.print(table)
    alone = len(first.keys() ^ second.keys())
    if alone:
        console.print(f"in one of the files only: {alone}")


def _medians(path: pathlib.Path) -> dict[str, float]:
    """Reads the numbers of a file of results, each with its description."""
    try:
        results = json.loads(path.read_text())
        if results["what"] == "train_step":
            steps = results["milliseconds"].items()
            return {f"{name}, ms per step": x[1] for name, x in steps}
        medians = {
            _label(row): row["milliseconds"][1]
            for row in results["rows"]
            if row["verdict"] == "measured"
        }
        for claim in results["claims"]:
            for i, x in enumerate(claim["measured"] or ()):
                medians[f"{claim['asked']} ({i + 1}) {claim['unit']}".strip()] = x
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of a benchmark: {error}") from None
    return medians


def _label(row: Row) -> str:
    sizes = ("batch_size", "length", "num_heads", "num_kv_heads", "width")
    numbers = (
        f"{letter}={row[size]}" for letter, size in zip("BTNKH", sizes, strict=True)
    )
    causal = ", causal" * row["is_causal"]
    return (
        f"{_name(row)}, {row['direction']}, {row['dtype']}, {' '.join(numbers)}{causal}"
    )
