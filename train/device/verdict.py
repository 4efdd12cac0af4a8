"""Output of the check of a device: a table for each part, and the verdict."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from train.bench import implementations, tables
from train.report import machine, terminal

Row = Mapping[str, Any]
FAULTS = frozenset({"wrong", "failed"})


def passed(report: Row) -> bool:
    """Returns whether every part ran to its end, and nothing in it is wrong."""
    verdicts = {row["verdict"] for row in _all(report)}
    return bool(report["complete"] and not report["broken"] and not verdicts & FAULTS)


def show(console: rich.console.Console, report: Row) -> None:
    """Prints all results, notes and faults."""
    console.print(machine.words(report["machine"]))
    for name, rows in report["rows"].items():
        if rows:
            _SHOW[name](console, report, rows)
    for line in report["notes"]:
        console.print(line)
    for name, reason in report["broken"].items():
        console.print(f"{name}: broken: {reason}")
    counts = collections.Counter(row["verdict"] for row in _all(report))
    numbers = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    seconds = ", ".join(f"{name} {x:.0f} s" for name, x in report["seconds"].items())
    words = "passed" if passed(report) else "NOT passed"
    console.print(f"{words}: {numbers} ({seconds})")


def _all(report: Row) -> list[Row]:
    return [row for rows in report["rows"].values() for row in rows]


def _correctness(
    console: rich.console.Console, report: Row, rows: Sequence[Row]
) -> None:
    del report
    table = terminal.table(
        "errors against float64, as a share of the largest value (* = what None is)",
        *("implementation", "case", "dtype", "precision"),
        *("output", "at most", "gradients", "at most", "verdict"),
    )
    refusals: dict[str, list[str]] = {}
    for row in rows:
        name, dtype = row["implementation"], row["dtype"]
        if row["verdict"] == "refused":
            words = f"{name} refused {dtype}: {row['reason']}"
            refusals.setdefault(words, []).append(row["case"])
            continue
        errors, limits = row.get("errors", {}), row.get("tolerances", {})
        gradients = [x for key, x in errors.items() if key != "out"]
        table.add_row(
            name + "*" * row["chosen"],
            row["case"],
            dtype,
            row["precision"],
            _number(errors.get("out")),
            _number(limits.get("out")),
            _number(None if None in gradients else max(gradients, default=None)),
            _number(limits.get("dq")),
            _verdict(row),
        )
    console.print(table)
    for words, names in refusals.items():
        console.print(f"{words}: {', '.join(dict.fromkeys(names))}")


def _masks(console: rich.console.Console, report: Row, rows: Sequence[Row]) -> None:
    del report
    table = terminal.table(
        f"masks at T={rows[0]['length']}, {rows[0]['dtype']}",
        *("mask", "direction", "implementation", "milliseconds", "of the other's"),
        *("temporary bytes", "error", "at most", "verdict"),
    )
    for row in rows:
        table.add_row(
            row["mask"],
            row["direction"],
            row["implementation"],
            f"{row['milliseconds'][1]:.4g}" if "milliseconds" in row else "",
            f"{row['ratio']:.2f}" if "ratio" in row else "",
            _number(row.get("temporary_bytes"), ".3g"),
            _number(row.get("error")),
            _number(row["tolerance"]),
            _verdict(row),
        )
    console.print(table)


def _train_step(
    console: rich.console.Console, report: Row, rows: Sequence[Row]
) -> None:
    del report
    (row,) = rows
    table = terminal.table(
        f"a training step: {row['milliseconds'][1]:.3g} ms, "
        f"{row['tokens_per_second']:.3g} tokens/s, {row['flops_per_second']:.2g} "
        f"FLOP/s, compiled in {row['compile_seconds']:.1f} s: {_verdict(row)}",
        *("", "first step", "on the CPU", "off by", "at most"),
        f"after {row['steps']} steps",
    )
    for name, value in row["first"].items():
        table.add_row(
            name,
            _number(value, ".4f"),
            _number((row["on_cpu"] or {}).get(name), ".4f"),
            _number(row["errors"].get(name)),
            _number(row["tolerance"]),
            _number(row["last"][name], ".4f"),
        )
    console.print(table)


def _benchmark(console: rich.console.Console, report: Row, rows: Sequence[Row]) -> None:
    results = {
        "machine": report["machine"],
        "rows": rows,
        "exponents": implementations.exponents([dict(row) for row in rows]),
        "left_out": {},
        "claims": [],
    }
    tables.show(console, results)


def _number(x: float | None, form: str = ".1e") -> str:
    return "" if x is None else format(x, form)


def _verdict(row: Row) -> str:
    reason = row.get("reason")
    return f"{row['verdict']}: {reason}" if reason else str(row["verdict"])


_SHOW = {
    "correctness": _correctness,
    "masks": _masks,
    "train_step": _train_step,
    "benchmark": _benchmark,
}
