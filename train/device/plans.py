"""The sizes of the check of a device: a plan, and the presets by name."""

import dataclasses
import types
from collections.abc import Mapping, Sequence

from train.bench import presets
from train.device import checks, speed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of all parts of the check.

    Attributes:
      cases: for each name of `checks.CASES` that is checked, its variants.
      length: T of most of these cases.
      width: H of most of these cases.
      sweep: plan of the benchmark; its heads, dtype and rounds hold for masks too.
      mask_length: T of the part masks.
      peer: implementation of jax.nn that takes dense masks.
      layers: L of the trained model; 0 for that of its configuration.
      rounds: number of measurements of the training step.
      steps: training steps of one measurement.
      seconds: time after which no further case of the benchmark is begun.
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
            # Those that call the same kernel as one of these are left out.
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
