"""The benchmark of attention: from flags to results.json, tables and pictures.

`train.benchmark --what=attention` is the program.
"""

import dataclasses
import functools
import json
import os
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

from train import cli, foreign, workdir
from train.bench import (
    claims,
    implementations,
    peers,
    picture,
    presets,
    tables,
    trials,
)
from train.report import machine, terminal

WORKDIR = "runs/benchmark"
# PyTorch's threads spin for a while after their work, on the cores of whoever has the
# next turn. It reads these when it is imported. Not for a training step, whose many
# small operations would wait for threads that wake up.
PASSIVE_THREADS = types.MappingProxyType(
    {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
)


def measure(
    plan: presets.Plan,
    contenders: Mapping[str, peers.Contender],
    left_out: Mapping[str, str],
    *,
    preset: str,
    path: pathlib.Path,
) -> dict[str, Any]:
    """Measures attention; writes, shows and draws the results.

    Args:
      plan: the cases, and how they are measured.
      contenders: the implementations, by name.
      left_out: for each unavailable implementation, the reason.
      preset: name of the plan.
      path: folder for results.json and the pictures.

    Returns:
      The contents of results.json.
    """
    console = terminal.console()
    results: dict[str, Any] = {
        "what": "attention",
        "preset": preset,
        "complete": False,
        "machine": machine.describe(),
        "left_out": dict(left_out),
        "rows": [],
        "exponents": [],
        "claims": [],
    }

    def keep() -> None:
        results["exponents"] = implementations.exponents(results["rows"])
        text = json.dumps(results, indent=2, allow_nan=False) + "\n"
        workdir.write(path / tables.RESULTS, text)

    keep()
    said = ""
    try:
        # Redrawn seldom, since that takes time from what is measured.
        with console.status("", refresh_per_second=1) as status:

            def announce(words: str) -> None:
                nonlocal said
                said = words
                status.update(words)

            for rows in implementations.sweep(plan, contenders, announce=announce):
                results["rows"] += rows
                keep()
                console.print(f"{said}: {tables.case_line(rows)}")
            if plan.claims:
                scale = trials.Scale(plan.claims, plan.rounds, plan.seconds)
                for claim in claims.measure(scale, announce=announce):
                    results["claims"].append(claim)
                    keep()
                    console.print(tables.claim_line(claim))
        results["complete"] = True
        keep()
    finally:  # also when interrupted
        tables.show(console, results)
        measured = [row for row in results["rows"] if row["verdict"] == "measured"]
        pictures = [
            picture.draw(path / workdir.FIGURES, measured, dtype=dtype)
            for dtype in dict.fromkeys(row["dtype"] for row in measured)
        ]
        files = [tables.RESULTS, *(str(x.relative_to(path)) for x in pictures)]
        console.print(f"{path}: {', '.join(files)}")
    return results


def passed(results: Mapping[str, Any]) -> bool:
    """Returns whether nothing was wrong, no claim missed, and any target measured."""
    rows = results["rows"]
    verdicts = {x["verdict"] for x in (*rows, *results["claims"])}
    of_target = {
        row["verdict"] for row in rows if row["implementation"] == peers.TARGET
    }
    unmeasured = of_target and "measured" not in of_target
    return not (verdicts & {"wrong", "missed"} or unmeasured)


def define_flags(values: flags.FlagValues) -> None:
    """Declares the flags of --what=attention, where None means the preset's value."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    several = functools.partial(flags.DEFINE_list, flag_values=values)
    integer = functools.partial(flags.DEFINE_integer, flag_values=values)
    flags.DEFINE_enum(
        "preset",
        None,
        list(presets.PRESETS),
        "what is measured unless a flag says otherwise; not given: by the platform",
        flag_values=values,
    )
    text("workdir", WORKDIR, "folder for the results")
    text("target", None, "package.module:callable, your kernel")
    several("compare", None, "two results.json: print the ratios, and measure nothing")
    known = ", ".join(peers.CONTENDERS)
    several("implementations", None, f"of {known}")
    several("lengths", None, "T = S, ascending")
    several("dtypes", None, f"of {', '.join(presets.DTYPES)}")
    several("modes", None, f"of {', '.join(presets.MODES)}")
    several("directions", None, f"of {', '.join(presets.DIRECTIONS)}")
    integer("batch_size", None, "B", lower_bound=1)
    integer("num_heads", None, "N, query heads", lower_bound=1)
    integer("num_kv_heads", None, "K, key/value heads", lower_bound=1)
    integer("width", None, "H, of a head", lower_bound=1)
    flags.DEFINE_bool(
        "is_causal", None, "hide later keys in the sweeps", flag_values=values
    )
    several("head_counts", None, "numbers of heads at fixed num_heads * width")
    integer("head_length", None, "T of that sweep", lower_bound=1)
    flags.DEFINE_float(
        "patience",
        None,
        "seconds of a call after which its implementation is skipped at greater T",
        lower_bound=0.0,
        flag_values=values,
    )
    integer(
        "claims",
        None,
        "1: the table of claims; 0: not; n: at lengths n times smaller, not judged",
        lower_bound=0,
    )


def main(values: flags.FlagValues) -> int:
    """Measures attention; writes, shows and draws the results."""
    for name, value in PASSIVE_THREADS.items():
        os.environ.setdefault(name, value)
    preset = values.preset or jax.default_backend()
    with cli.usage_errors():
        plan = _plan(values, preset)
        target = foreign.load(values.target) if values.target else None
        contenders, left_out = peers.choose(plan.implementations, target)
        path = pathlib.Path(values.workdir).absolute()
        (path / workdir.FIGURES).mkdir(parents=True, exist_ok=True)
    results = measure(plan, contenders, left_out, preset=preset, path=path)
    return 0 if passed(results) else 1


def _plan(values: flags.FlagValues, preset: str) -> presets.Plan:
    """Returns the preset's plan, changed by the flags on the command line."""
    if preset not in presets.PRESETS:
        raise ValueError(f"there is no preset for the platform {preset!r}: name one")
    plan = presets.PRESETS[preset]
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(plan):
        if field.name in values and values[field.name].present:
            value = values[field.name].value
            if isinstance(value, list):
                kind = type((getattr(plan, field.name) or ("",))[0])
                value = tuple(map(kind, value))
            changes[field.name] = value
    if "num_heads" in changes:
        changes = {"num_kv_heads": changes["num_heads"]} | changes
    plan = dataclasses.replace(plan, **changes)
    if "float64" in plan.dtypes and not jax.config.values["jax_enable_x64"]:
        raise ValueError("float64 needs --jax_enable_x64=true")
    return plan
