"""Checks attention on the device at hand, in one run of less than five minutes.

    python -m train.device_check                  # on one GPU
    python -m train.device_check --preset=smoke   # the same code in small, anywhere

Four parts, each with a verdict per row:

correctness  every implementation against float64 on the CPU: output and gradients, in
             float32 at jax's default precision and at 'highest', bfloat16 and float16;
             causal, window, segments, lengths, grouped heads, a mask (4,1,1,32). An
             implementation that does not support a case is 'refused' there
masks        flash under a window and under packed documents, against cuDNN under the
             same dense masks
train_step   the configuration's training step: the first step equals the CPU's, the
             loss falls, and the time of a step
benchmark    the sweep of `train.benchmark --preset=gpu`, until the time is up

WORKDIR/report.json is written after every step, so an interrupted check keeps what is
done, and a part that breaks does not stop those after it.

Exit status: 0 nothing is wrong; 1 a result is wrong, or an implementation that supports
everything refused; 2 unusable arguments.
"""

import dataclasses
import itertools
import json
import pathlib
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import flags

# `python -m` searches the current folder first, where a user may have a models.py.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from train import cli, foreign, workdir
from train import config as config_lib
from train.device import checks, plans, speed, verdict
from train.report import machine, terminal
from train.text import data

sys.path.pop(0)

WORKDIR = "runs/device_check"
CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "tiny_lm.py"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of all parts.

    Attributes:
      plan: the sizes.
      config: configuration of the model that is trained.
      corpus: its text.
      until: value of `time.monotonic` after which no case of the benchmark is begun.
      announce: called with a description of the next step.
      note: called with remarks that are printed beside the rows.
    """

    plan: plans.Plan
    config: config_lib.Config
    corpus: data.Corpus
    until: float
    announce: Callable[[str], None]
    note: Callable[[str], None]


def _correctness(inputs: Inputs) -> Iterator[list[Row]]:
    plan = inputs.plan
    inputs.announce("every implementation against float64")
    rows = checks.check(plan.cases, length=plan.length, width=plan.width)
    for name, of_case in itertools.groupby(rows, lambda row: row["case"]):
        yield list(of_case)
        inputs.announce(f"{name}: done")


def _masks(inputs: Inputs) -> Iterator[list[Row]]:
    plan = inputs.plan
    yield from speed.against_dense(
        plan.sweep, length=plan.mask_length, peer=plan.peer, announce=inputs.announce
    )


def _train_step(inputs: Inputs) -> Iterator[list[Row]]:
    plan, model = inputs.plan, inputs.config.model
    inputs.announce("training")
    layers = plan.layers or model.num_layers
    config = dataclasses.replace(
        inputs.config, model=dataclasses.replace(model, num_layers=layers)
    )
    yield [speed.training(config, inputs.corpus, rounds=plan.rounds, steps=plan.steps)]


def _benchmark(inputs: Inputs) -> Iterator[list[Row]]:
    yield from speed.sweep(
        inputs.plan.sweep,
        until=inputs.until,
        announce=inputs.announce,
        note=inputs.note,
    )


# The benchmark is last, since it may be cut short.
PARTS: Mapping[str, Callable[[Inputs], Iterator[list[Row]]]] = types.MappingProxyType(
    {
        "correctness": _correctness,
        "masks": _masks,
        "train_step": _train_step,
        "benchmark": _benchmark,
    }
)


def check(
    inputs: Inputs, parts: Sequence[str], report: Row, keep: Callable[[], None]
) -> None:
    """Runs parts of the check, one after another.

    Args:
      inputs: the inputs of all parts.
      parts: names of `PARTS`.
      report: receives the rows and the seconds of each part, and why a part broke.
      keep: called after every change of the report.
    """
    for name in parts:
        rows = report["rows"][name] = []
        start = time.monotonic()
        try:
            for more in PARTS[name](inputs):
                rows += more
                keep()
        # Compilers and drivers: anything may go wrong, and the next part may still go.
        except Exception as error:
            traceback.print_exc()
            report["broken"][name] = foreign.blame(error)
        report["seconds"][name] = time.monotonic() - start
        keep()


def define_flags(values: flags.FlagValues) -> None:
    """Declares the program's flags."""
    flags.DEFINE_enum(
        "preset",
        None,
        list(plans.PRESETS),
        "what is checked; not given: gpu on a GPU, smoke elsewhere",
        flag_values=values,
    )
    flags.DEFINE_string("workdir", WORKDIR, "folder for the report", flag_values=values)
    flags.DEFINE_list("parts", list(PARTS), "which parts", flag_values=values)
    cli.define_config(values, config_lib.Config)
    values.set_default("config", str(CONFIG))


def main(values: flags.FlagValues) -> int:
    """Parses flags, checks, and reports."""
    start = time.monotonic()
    config = cli.read_config(values, config_lib.Config)
    platform = jax.default_backend()
    preset = values.preset or ("gpu" if platform == "gpu" else "smoke")
    with cli.usage_errors():
        unknown = [part for part in values.parts if part not in PARTS]
        if unknown or not values.parts:
            raise ValueError(
                f"--parts must be of {', '.join(PARTS)}, got {values.parts}"
            )
        if preset == "gpu" and platform != "gpu":
            raise ValueError(f"--preset=gpu needs a GPU, jax has a {platform}")
        corpus = workdir.load_corpus(config)
        path = pathlib.Path(values.workdir).absolute()
        if (path / workdir.CONFIG).exists():
            raise ValueError(f"{path} holds a run, whose report would be lost")
        path.mkdir(parents=True, exist_ok=True)
    console = terminal.console()
    plan = plans.PRESETS[preset]
    report: Row = {
        "what": "device_check",
        "preset": preset,
        "complete": False,
        "passed": False,
        "machine": machine.describe(),
        "seconds": {},
        "notes": [],
        "broken": {},
        "rows": {},
    }

    def keep() -> None:
        text = json.dumps(report, indent=2, allow_nan=False) + "\n"
        workdir.write(path / workdir.REPORT, text)

    def announce(words: str) -> None:
        console.print(f"{time.monotonic() - start:.0f} s  {words}")

    with cli.usage_errors():
        keep()
    note = report["notes"].append
    inputs = Inputs(plan, config, corpus, start + plan.seconds, announce, note)
    try:
        check(inputs, values.parts, report, keep)
        report["complete"] = True
        report["passed"] = verdict.passed(report)
        keep()
    finally:  # also when interrupted
        verdict.show(console, report)
        console.print(str(path / workdir.REPORT))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    cli.run(main, define_flags)
