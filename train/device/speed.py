"""The timed parts of the check of a device.

They are the sweep of `train.benchmark`; flash under sparse masks, against a kernel that
takes them as dense arrays; and a training step, whose first loss and gradient must be
those of the CPU, and which must learn.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

import attention
from models import transformer
from train import config as config_lib
from train import foreign
from train.bench import (
    implementations,
    peers,
    presets,
    train_step,
    trials,
    workload,
)
from train.lm import loop, loss
from train.report import compilation, stopwatch
from train.text import data

Row = dict[str, Any]
Say = Callable[[str], None]
OURS = "flash"
MASKS = {"window": trials.window, "documents": trials.documents}
# Length at which windows have their full size; they shrink with the length.
MASK_LENGTH = 8192
# Largest relative error of the first loss and gradient norm, which TF32 may compute.
STEP_TOLERANCE = 1e-2


def sweep(
    plan: presets.Plan, *, until: float, announce: Say, note: Say
) -> Iterator[list[Row]]:
    """Runs the benchmark's sweep, case by case while there is time.

    Args:
      plan: the cases, and how they are measured.
      until: value of `time.monotonic` after which no case is begun.
      announce: called with a description of the next case.
      note: called with the reasons why implementations or cases are left out.

    Yields:
      The rows of a case, from `implementations.sweep`; but where flash refuses, its
      verdict is 'failed'.
    """
    contenders, left_out = peers.choose(plan.implementations, None)
    for name, reason in left_out.items():
        note(f"{name}: left out: {reason}")
    count = len(list(implementations.works(plan)))
    cases = implementations.sweep(plan, contenders, announce=announce)
    for done in range(count):
        if time.monotonic() > until:
            note(f"time is up: {done} of {count} cases of the benchmark")
            return
        rows = next(cases)
        for row in rows:
            _must_not_refuse(row)
        yield rows


def against_dense(
    plan: presets.Plan, *, length: int, peer: str, announce: Say
) -> Iterator[list[Row]]:
    """Times flash under `MASKS` against jax.nn's kernel under the same dense masks.

    Args:
      plan: heads, widths, dtype, directions, rounds and seconds.
      length: T = S.
      peer: implementation of jax.nn, 'cudnn' or 'xla'.
      announce: called with a description of the next case.

    Yields:
      Two rows for each mask and direction: flash, with the `ratio` of its time to the
      peer's, and the peer. Where flash refuses, its verdict is 'failed'.
    """
    scale = trials.Scale(max(MASK_LENGTH // length, 1), plan.rounds, plan.seconds)
    for name, make in MASKS.items():
        for direction in plan.directions:
            announce(f"{name}, {direction}")
            work = workload.Work(
                length=length,
                dtype=plan.dtypes[0],
                batch_size=plan.batch_size,
                num_heads=plan.num_heads,
                num_kv_heads=plan.num_kv_heads,
                width=plan.width,
                backward=direction != presets.DIRECTIONS[0],
            )
            rows = _two_kernels(work, make(scale, length), peer, scale)
            yield [{"mask": name, "direction": direction, **row} for row in rows]


def _two_kernels(
    work: workload.Work, visible: Any, peer: str, scale: trials.Scale
) -> list[Row]:
    """Checks both kernels, and times those that are right in turns."""
    arrays = work.arrays()
    expected = workload.expected(arrays, visible)
    dense = visible.materialize(work.length, work.length)
    kernels: dict[str, tuple[workload.Kernel, Any]] = {
        OURS: (attention.dot_product_attention, visible),
        f"jax.nn.{peer}, dense": (jax.nn.dot_product_attention, dense),
    }
    rows, runs = [], {}
    for name, (kernel, mask) in kernels.items():
        row: Row = {
            "implementation": name,
            "length": work.length,
            "dtype": work.dtype,
            "tolerance": workload.tolerance(work.dtype),
        }
        bound = functools.partial(kernel, implementation=OURS if name == OURS else peer)
        try:
            runner = workload.jax_runners(bound, arrays, mask=mask)["jit"]
        # Compilers and drivers: anything may go wrong.
        except Exception as error:
            row |= {"verdict": "refused", "reason": foreign.blame(error)}
        else:
            row |= implementations.check(runner, expected, work.dtype)
            row["temporary_bytes"] = runner.temporary_bytes
        if row["verdict"] == "measured":
            runs[name] = runner.run
        _must_not_refuse(row)
        rows.append(row)
    seconds = stopwatch.interleaved(
        runs, stopwatch.turns(scale.rounds, seconds=scale.seconds)
    )
    for row in rows:
        if row["implementation"] in seconds:
            times = seconds[row["implementation"]]
            row["milliseconds"] = stopwatch.quartiles(times)
    if len(runs) == len(kernels):
        ours, theirs = (row["milliseconds"][1] for row in rows)
        rows[0]["ratio"] = ours / theirs
    return rows


def _must_not_refuse(row: Row) -> None:
    """Makes a refusal by flash, which supports everything, a failure."""
    if row["implementation"] == OURS and row["verdict"] == "refused":
        row["verdict"] = "failed"


def training(
    config: config_lib.Config, corpus: data.Corpus, *, rounds: int, steps: int
) -> Row:
    """Trains on this device, beside the CPU for one step, and times it.

    Args:
      config: configuration of model, batch and optimiser.
      corpus: tokens to train on.
      rounds: number of measurements.
      steps: training steps of one measurement.

    Returns:
      A row with the verdict 'right' or 'wrong'; the latter has a `reason`.
    """
    model = transformer.CausalLM(config.model, corpus.tokenizer.vocab_size)
    train_rng, *_ = loop.keys(config.seed)
    state, train_steps = loop.begin(model, train_rng, config, examples=loss.next_token)
    # On an explicit device: if it is the CPU, the step below is not compiled again.
    state, tokens = jax.device_put((state, corpus.train), jax.devices()[0])
    compile_seconds = compilation.cost(train_steps, (state, tokens, 1)).seconds
    on_cpu = _first_step_on_cpu(train_steps, state, tokens)
    state, metrics = train_steps(state, tokens, 1)
    first = _numbers(metrics)

    def run() -> None:
        nonlocal state, metrics
        state, metrics = jax.block_until_ready(train_steps(state, tokens, steps))

    (seconds,) = stopwatch.interleaved({"": run}, range(rounds)).values()
    milliseconds = stopwatch.quartiles([x / steps for x in seconds])
    last = _numbers(metrics)
    errors, reasons = judge_steps(first, last, on_cpu)
    if int(state.skipped):
        reasons.append(f"{int(state.skipped)} steps were not finite")
    train, context = config.train, config.model.context
    tokens_per_step = train.batch_size * train.accumulation * context
    flops = train_step.step_flops(
        config, state.params, vocab_size=corpus.tokenizer.vocab_size
    )
    return {
        "steps": int(state.step),
        "first": _finite(first),
        "on_cpu": None if on_cpu is None else _finite(on_cpu),
        "last": _finite(last),
        "errors": _finite(errors),
        "tolerance": STEP_TOLERANCE,
        "milliseconds": milliseconds,
        "tokens_per_second": tokens_per_step / milliseconds[1] * 1e3,
        "flops_per_second": flops / milliseconds[1] * 1e3,
        "compile_seconds": compile_seconds,
        "verdict": "wrong" if reasons else "right",
        "reason": "; ".join(reasons),
    }


def judge_steps(
    first: Mapping[str, float],
    last: Mapping[str, float],
    on_cpu: Mapping[str, float] | None,
) -> tuple[dict[str, float], list[str]]:
    """Judges training by its loss and gradient norm.

    Args:
      first: loss and gradient norm of the first step.
      last: loss and gradient norm of the last steps.
      on_cpu: loss and gradient norm of the first step on the CPU; None if unknown.

    Returns:
      Relative errors of the first step against the CPU's, and the faults as text.
    """
    errors, reasons = {}, []
    for name, expected in (on_cpu or {}).items():
        errors[name] = abs(first[name] - expected) / abs(expected)
        if not errors[name] <= STEP_TOLERANCE:  # NaN is not
            reasons.append(
                f"the first {name} differs from the CPU's by {errors[name]:.1e}"
            )
    if not last["loss"] < first["loss"]:
        reasons.append("the loss has not fallen")
    return errors, reasons


def _first_step_on_cpu(
    train_steps: loop.TrainSteps, state: loop.State, tokens: jax.Array
) -> dict[str, float] | None:
    """Computes loss and gradient norm on the CPU; None if jax has no CPU backend."""
    try:
        (cpu, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:
        return None
    # The step donates the state, so the CPU gets a copy.
    state, tokens = jax.device_put((state, tokens), cpu, may_alias=False)
    _, metrics = train_steps(state, tokens, 1)
    return _numbers(metrics)


def _numbers(metrics: loop.Metrics) -> dict[str, float]:
    return {
        "loss": float(metrics.loss),
        "gradient norm": float(metrics.gradient_norm),
    }


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Replaces numbers that JSON does not have by None."""
    return {key: x if math.isfinite(x) else None for key, x in numbers.items()}
