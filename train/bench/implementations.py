"""The sweep over attention: implementations x lengths x dtypes x modes x directions.

There are two sweeps: over lengths, and over the number of heads at fixed width
E = N · H. Within a case all implementations take turns, and so does a large matrix
product of the same dtype. An implementation whose call took longer than the plan's
patience is skipped at greater lengths, and one whose program needs more memory than
there is, is not run.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from train import foreign
from train.bench import peers, presets, workload
from train.report import stopwatch

PRODUCT = "matrix product"

Row = dict[str, Any]


def sweep(
    plan: presets.Plan,
    contenders: Mapping[str, peers.Contender],
    *,
    announce: Callable[[str], None],
) -> Iterator[list[Row]]:
    """Measures case by case.

    Args:
      plan: the cases.
      contenders: the implementations, by name.
      announce: called with a description of the next case.

    Yields:
      The rows of a case, one for each implementation and mode. The `verdict` of a row
      is 'measured', 'wrong', 'refused' (it raised, or there is too little memory) or
      'skipped' (it was too slow at a smaller length); all but the first have a
      `reason`.
    """
    slow: dict[tuple[Any, ...], str] = {}
    cases = list(works(plan))
    for i, (sweep, work) in enumerate(cases, 1):
        announce(
            f"{i}/{len(cases)}  T={work.length}, {work.num_heads} heads of "
            f"{work.width}, {work.dtype}, {work.direction}"
        )
        rows = _measure(sweep, work, plan, contenders, slow)
        yield rows
        for row in rows:
            if row["verdict"] == "measured":
                seconds = row["milliseconds"][1] / 1e3
                if seconds > plan.patience:
                    reason = f"took {seconds:.1f} s at T={work.length}"
                    slow[_series(row)] = reason


def works(plan: presets.Plan) -> Iterator[tuple[str, workload.Work]]:
    """Lists the work of the plan, each with the name of its sweep.

    Args:
      plan: the cases.

    Yields:
      The sweep, 'length' or 'heads', and the work.
    """
    total = plan.num_heads * plan.width
    sizes = [
        ("length", length, plan.num_heads, plan.num_kv_heads) for length in plan.lengths
    ]
    sizes += [("heads", plan.head_length, n, n) for n in plan.head_counts]
    for dtype in plan.dtypes:
        for sweep, length, num_heads, num_kv_heads in sizes:
            for direction in plan.directions:
                yield (
                    sweep,
                    workload.Work(
                        length=length,
                        dtype=dtype,
                        batch_size=plan.batch_size,
                        num_heads=num_heads,
                        num_kv_heads=num_kv_heads,
                        width=total // num_heads,
                        is_causal=plan.is_causal,
                        backward=direction != presets.DIRECTIONS[0],
                    ),
                )


def _measure(
    sweep: str,
    work: workload.Work,
    plan: presets.Plan,
    contenders: Mapping[str, peers.Contender],
    slow: Mapping[tuple[Any, ...], str],
) -> list[Row]:
    """Checks every implementation of a case, then times them in turns."""
    arrays = work.arrays()
    expected = workload.expected(arrays, work.visible)
    rows: list[Row] = []
    running: list[tuple[Row, workload.Runner]] = []
    for name, contender in contenders.items():
        asked = []
        for mode in contender.modes:
            # A contender with a single mode takes part in any case.
            if mode in plan.modes or len(contender.modes) == 1:
                row = _describe(name, mode, sweep, work)
                rows.append(row)
                if reason := slow.get(_series(row)):
                    row |= {"verdict": "skipped", "reason": reason}
                else:
                    asked.append(row)
        try:
            runners = contender.runners(work, arrays) if asked else {}
        # Foreign code: anything may go wrong.
        except (Exception, SystemExit) as error:
            refusal = {"verdict": "refused", "reason": foreign.blame(error)}
            for row in asked:
                row |= refusal
            continue
        for row in asked:
            runner = runners[row["mode"]]
            row |= check(runner, expected, work.dtype)
            if row["verdict"] == "measured":
                running.append((row, runner))
    product, flops = stopwatch.matrix_product(plan.product_size, work.dtype)
    runs = {str(i): runner.run for i, (_, runner) in enumerate(running)}
    *times, product_times = stopwatch.interleaved(
        runs | {PRODUCT: product},
        stopwatch.turns(plan.rounds, seconds=plan.seconds),
    ).values()
    rate = flops / float(np.median(product_times))
    for (row, runner), seconds in zip(running, times, strict=True):
        flops_per_second = work.flops / float(np.median(seconds))
        compiled = row["mode"] == "jit"
        row |= {
            "milliseconds": stopwatch.quartiles(seconds),
            "flops_per_second": flops_per_second,
            "share_of_product": flops_per_second / rate,
            "compile_seconds": runner.compile_seconds,
            "temporary_bytes": runner.temporary_bytes if compiled else None,
            "traces": runner.traces(),
        }
    return rows


def check(runner: workload.Runner, expected: workload.Expected, dtype: str) -> Row:
    """Checks whether a runner may be timed.

    Args:
      runner: computes the result to be checked.
      expected: the reference's result.
      dtype: of query, key and value, which sets the tolerance.

    Returns:
      `verdict`, and `error` or `reason`: see `sweep`.
    """
    limit = workload.memory_limit()
    if (runner.temporary_bytes or 0) > limit:
        reason = f"needs {runner.temporary_bytes:.1e} bytes, there are {limit:.1e}"
        return {"verdict": "refused", "reason": reason}
    try:
        error = expected.error(runner)
    except workload.WrongShape as failure:
        return {"verdict": "wrong", "reason": str(failure)}
    # Foreign code: anything may go wrong.
    except (Exception, SystemExit) as failure:
        return {"verdict": "refused", "reason": foreign.blame(failure)}
    tolerance = workload.tolerance(dtype)
    if error <= tolerance:  # NaN is not
        return {"verdict": "measured", "error": error}
    reason = f"off by {error:.1e} of the largest value, allowed {tolerance:.0e}"
    return {"verdict": "wrong", "reason": reason}


def _describe(name: str, mode: str, sweep: str, work: workload.Work) -> Row:
    """Returns the entries of a row that identify it."""
    sizes = dataclasses.asdict(work)
    del sizes["backward"]
    return {
        "sweep": sweep,
        "implementation": name,
        "mode": mode,
        "direction": work.direction,
        **sizes,
    }


def _series(row: Row) -> tuple[Any, ...]:
    """Returns a key that rows share if they differ in size alone."""
    keys = ("sweep", "implementation", "mode", "direction", "dtype")
    return tuple(row[key] for key in keys)


def exponents(rows: Sequence[Row]) -> list[Row]:
    """Fits how time and memory of each implementation grow with T.

    Args:
      rows: rows of `sweep`, of which those over lengths count.

    Returns:
      A row for each series, with the exponents `time` and `memory` of T; None where
      there are too few lengths.
    """
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["sweep"] == "length" and row["verdict"] == "measured":
            series.setdefault(_series(row), []).append(row)
    fits = []
    for (_, name, mode, direction, dtype), points in series.items():
        lengths = [row["length"] for row in points]
        times = [row["milliseconds"][1] for row in points]
        memory = [row["temporary_bytes"] or 0 for row in points]
        fits.append(
            {
                "implementation": name,
                "mode": mode,
                "direction": direction,
                "dtype": dtype,
                "time": stopwatch.growth(lengths, times),
                "memory": stopwatch.growth(lengths, memory),
            }
        )
    return fits
