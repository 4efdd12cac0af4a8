"""Measures attention, mixers or a training step, beside whatever else is installed.

    python -m train.benchmark --preset=cpu
    python -m train.benchmark --preset=smoke --target=package.module:callable
    python -m train.benchmark --compare a/results.json b/results.json
    python -m train.benchmark --what=train_step --config=configs/shakespeare_char.py
    python -m train.benchmark --what=mixers --workdir=runs/bench_mixers

--what=attention: implementations x lengths x dtypes x {jit, eager} x {forward,
forward+backward}, and a sweep over the number of heads at fixed width. All take turns
within a case, so that a busy machine slows all alike; medians and quartiles, the share
of the rate of a large matrix product in the same turns, compile time, traces, peak
temporary memory, and how time and memory grow with T. Everything is compared with the
reference before it is timed; what is wrong is not timed. A target has the signature of
`jax.nn.dot_product_attention` and is traceable by jax. --preset=cpu adds the table of
what is claimed, with a verdict per row.

Each case is written into WORKDIR/results.json when it is done: an interrupted run keeps
them. A picture for each dtype, and the arrays behind it, lie in WORKDIR/figures.

--what=train_step: milliseconds per step, and what the step's matrix products alone
would take at the rate measured in the same turns.

--what=mixers: how the time of mixers of linear time grows with T, and how many times as
fast as causal flash attention they are at T = 16384, each with a verdict.

Exit status: 0 measured, and all claims met; 1 a wrong result, a claim missed, or a
target that could not be measured; 2 unusable arguments.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import flags

# `python -m` searches the current folder first, where a user may have a models.py.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from train import cli, foreign, workdir
from train.bench import (
    claims,
    implementations,
    mixers,
    peers,
    picture,
    presets,
    tables,
    train_step,
    trials,
)
from train.report import machine, terminal

sys.path.pop(0)

WHAT = ("attention", "train_step", "mixers")
WORKDIR = "runs/benchmark"


def attention(
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
    """Declares the program's flags."""
    flags.DEFINE_enum("what", WHAT[0], WHAT, "what is measured", flag_values=values)
    flags.DEFINE_integer(
        "rounds", None, "measurements of each", lower_bound=1, flag_values=values
    )
    _define_attention(values)
    train_step.define_flags(values)
    mixers.define_flags(values)


def _define_attention(values: flags.FlagValues) -> None:
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
    text("workdir", WORKDIR, "folder for what is found")
    text("target", None, "package.module:callable, a kernel of your own")
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
        "seconds of a call after which its implementation is not asked at greater T",
        lower_bound=0.0,
        flag_values=values,
    )
    integer(
        "claims",
        None,
        "1: the table of claims; 0: not; n: at lengths n times smaller, not judged",
        lower_bound=0,
    )


# PyTorch's threads spin for a while after their work, on the cores of whoever has the
# next turn. It reads these when it is imported. Not for a training step, whose many
# small operations would wait for threads that wake up.
PASSIVE_THREADS = types.MappingProxyType(
    {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
)


def main(values: flags.FlagValues) -> int:
    """Parses flags, measures, and reports."""
    if values.compare is not None:
        _refuse_flags(values, define_flags, "--compare", but=("compare",))
        with cli.usage_errors():
            if len(values.compare) != 2:
                raise ValueError(f"--compare needs two files, got {values.compare}")
            paths = [pathlib.Path(path) for path in values.compare]
            tables.compare(terminal.console(), paths)
        return 0
    what = f"--what={values.what}"
    if values.what != "mixers":
        _refuse_flags(values, mixers.define_flags, what)
    if values.what != "train_step":
        _refuse_flags(values, train_step.define_flags, what)
    if values.what != "attention":
        shared = ("workdir",) if values.what == "mixers" else ()
        _refuse_flags(values, _define_attention, what, but=shared)
        return (mixers if values.what == "mixers" else train_step).main(values)
    for name, value in PASSIVE_THREADS.items():
        os.environ.setdefault(name, value)
    preset = values.preset or jax.default_backend()
    with cli.usage_errors():
        plan = _plan(values, preset)
        target = foreign.load(values.target) if values.target else None
        contenders, left_out = peers.choose(plan.implementations, target)
        path = pathlib.Path(values.workdir).absolute()
        (path / workdir.FIGURES).mkdir(parents=True, exist_ok=True)
    results = attention(plan, contenders, left_out, preset=preset, path=path)
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


def _refuse_flags(
    values: flags.FlagValues,
    define: Callable[[flags.FlagValues], None],
    reason: str,
    *,
    but: Sequence[str] = (),
) -> None:
    """Raises UsageError if a flag of a group that has no meaning here is present.

    Args:
      values: the parsed flags.
      define: declares the flags of the group.
      reason: with what they do not go together, for the message.
      but: names of flags that are allowed nevertheless.
    """
    group = flags.FlagValues()
    define(group)
    for name in group:
        if values[name].present and name not in but:
            raise cli.UsageError(f"--{name} does not go with {reason}")


def joined(arguments: Sequence[str]) -> list[str]:
    """Rewrites `--compare A B` as `--compare=A,B`, since a flag has a single value."""
    rewritten = list(arguments)
    if "--compare" in rewritten[:-2]:
        i = rewritten.index("--compare")
        rewritten[i : i + 3] = [f"--compare={rewritten[i + 1]},{rewritten[i + 2]}"]
    return rewritten


if __name__ == "__main__":
    sys.argv = joined(sys.argv)
    cli.run(main, define_flags)
