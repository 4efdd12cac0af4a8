"""Checks attention on the device at hand, in one run of less than five minutes.

    python -m train.device_check                  # on one GPU
    python -m train.device_check --preset=smoke   # the same code in small, anywhere

Four parts, each with a verdict per row:

correctness  every implementation against float64 on the CPU: output and gradients, in
             float32 at jax's default precision and at 'highest', bfloat16 and float16;
             causal, window, segments, lengths, grouped heads, a mask (4,1,1,32). An
             implementation that lacks something says so, and is 'refused'
masks        flash under a window and under packed documents, beside cuDNN under the
             same as a dense mask
train_step   the configuration's training step: the first as on the CPU; it learns; ms
benchmark    the sweep of `train.benchmark --preset=gpu`, as far as the time reaches

What is done is in WORKDIR/report.json after every step of it, also when interrupted,
and a part that breaks does not keep the others from running.

Exit status: 0 nothing is wrong; 1 a wrong result, or a refusal by what must not refuse;
2 unusable arguments.
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

# `python -m` looks in the current folder first: a stranger's models.py is not ours.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from train import cli, foreign, workdir
from train import config as config_lib
from train.bench import presets
from train.device import checks, speed, verdict
from train.report import machine, terminal
from train.text import data

sys.path.pop(0)

WORKDIR = "runs/device_check"
CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "tiny_lm.py"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is checked.

    Attributes:
      cases: for each name of `checks.CASES`, in what numbers.
      length: T of most of these cases.
      width: H of most of these cases.
      sweep: of the benchmark; its heads, dtype and rounds are those of the masks too.
      mask_length: T under masks.
      peer: jax.nn's implementation that is given dense masks.
      layers: L of the trained model; 0: as its configuration says.
      rounds: measurements of the training step.
      steps: training steps of one measurement.
      seconds: after which no further case of the benchmark is begun.
    """

    cases: Mapping[str, Sequence[checks.Variant]]
    length: int
    width: int
    sweep: presets.Plan
    mask_length: int
    peer: str
    layers: int
    rounds: int
    steps: int
    seconds: float


PRESETS: Mapping[str, Plan] = types.MappingProxyType(
    {
        "gpu": Plan(
            cases=dict.fromkeys(checks.CASES, checks.VARIANTS),
            length=256,
            width=64,
            # Who would only repeat one of these is left to the benchmark itself.
            sweep=dataclasses.replace(
                presets.PRESETS["gpu"],
                implementations=("flash", "cudnn", "jax.nn.xla", "torch"),
                seconds=1.0,
            ),
            mask_length=speed.MASK_LENGTH,
            peer="cudnn",
            layers=0,
            rounds=10,
            steps=20,
            seconds=220.0,
        ),
        "smoke": Plan(
            cases={
                "B030": (checks.BFLOAT16,),
                "B074": (checks.HIGHEST,),
                "grouped": (checks.FLOAT16,),
            },
            length=16,
            width=8,
            sweep=dataclasses.replace(
                presets.PRESETS["smoke"],
                implementations=("flash", "reference"),
                lengths=(16,),
                modes=("jit",),
                directions=presets.DIRECTIONS[1:],
                head_counts=(),
            ),
            mask_length=64,
            peer="xla",
            layers=1,
            rounds=3,
            steps=10,
            seconds=60.0,
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the parts are given.

    Attributes:
      plan: what is checked.
      config: of the model that is trained.
      corpus: its text.
      until: of `time.monotonic`, after which the benchmark begins nothing new.
      announce: told what comes next.
      note: told what should be known beside the rows.
    """

    plan: Plan
    config: config_lib.Config
    corpus: data.Corpus
    until: float
    announce: Callable[[str], None]
    note: Callable[[str], None]


def _correctness(given: Inputs) -> Iterator[list[Row]]:
    plan = given.plan
    given.announce("every implementation against float64")
    rows = checks.check(plan.cases, length=plan.length, width=plan.width)
    for name, of_case in itertools.groupby(rows, lambda row: row["case"]):
        yield list(of_case)
        given.announce(f"{name}: done")


def _masks(given: Inputs) -> Iterator[list[Row]]:
    plan = given.plan
    yield from speed.against_dense(
        plan.sweep, length=plan.mask_length, peer=plan.peer, announce=given.announce
    )


def _train_step(given: Inputs) -> Iterator[list[Row]]:
    plan, model = given.plan, given.config.model
    given.announce("training")
    layers = plan.layers or model.num_layers
    config = dataclasses.replace(
        given.config, model=dataclasses.replace(model, num_layers=layers)
    )
    yield [speed.training(config, given.corpus, rounds=plan.rounds, steps=plan.steps)]


def _benchmark(given: Inputs) -> Iterator[list[Row]]:
    yield from speed.sweep(
        given.plan.sweep, until=given.until, announce=given.announce, note=given.note
    )


# The benchmark is last: it is the one that may be cut short.
PARTS: Mapping[str, Callable[[Inputs], Iterator[list[Row]]]] = types.MappingProxyType(
    {
        "correctness": _correctness,
        "masks": _masks,
        "train_step": _train_step,
        "benchmark": _benchmark,
    }
)


def check(
    given: Inputs, parts: Sequence[str], report: Row, keep: Callable[[], None]
) -> None:
    """Runs these parts, one after another.

    Args:
      given: what they need.
      parts: names of `PARTS`.
      report: gets the rows and the seconds of each part, and what broke.
      keep: called after every change.
    """
    for name in parts:
        rows = report["rows"][name] = []
        start = time.monotonic()
        try:
            for more in PARTS[name](given):
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
        list(PRESETS),
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
    plan = PRESETS[preset]
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
    given = Inputs(plan, config, corpus, start + plan.seconds, announce, note)
    try:
        check(given, values.parts, report, keep)
        report["complete"] = True
        report["passed"] = verdict.passed(report)
        keep()
    finally:  # also when interrupted
        verdict.show(console, report)
        console.print(str(path / workdir.REPORT))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    cli.run(main, define_flags)
