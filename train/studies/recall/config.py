"""Configuration of the study of mixers on a task, as frozen dataclasses.

Mixers and widths vary; the rest of the model is shared. The sweep trains seeds x
learning rates side by side in one program, and the report as many fresh seeds at the
rate that was chosen.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, TypeVar

from models import config as model_config
from models import layer_config
from models import mixers as mixers_lib
from train import config
from train.studies import tasks

Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True)
class ModelConfig(layer_config.SharedConfig):
    """What the models of a study share, whatever their mixer and width."""

    mlp_factor: Annotated[int, "hidden width of an MLP, in widths of the model"]

    def of(self, mixer: str, width: int, context: int) -> model_config.CausalLMConfig:
        """The model of one mixer and width; raises ValueError where it cannot be."""
        shared = dataclasses.asdict(self)
        return model_config.CausalLMConfig(
            mixers=mixer,
            width=width,
            mlp_width=shared.pop("mlp_factor") * width,
            context=context,
            **shared,
        )

    @property
    def window_reach(self) -> int:
        """Distance over which the windows of all layers see, without convolutions."""
        return self.num_layers * (self.window - 1)

    @property
    def reach(self) -> int:
        """Distance over which a model of windows sees, with its convolutions."""
        return self.window_reach + self.num_layers * ((self.convolution or 1) - 1)


@dataclasses.dataclass(frozen=True)
class RunsConfig:
    """Length of a run, number of runs, and how they are judged."""

    factors: Annotated[str, "learning rates swept, in peak_lr, with commas between"]
    seeds: Annotated[int, "of each rate; factors x seeds are reported at the best one"]
    steps: Annotated[int, "updates of a run, at most"]
    every: Annotated[int, "updates between two looks at the validation split"]
    goal: Annotated[float, "accuracy there at which a run stops, in (0, 1]"]
    batch_size: Annotated[int, "B, rows of an update"]
    rows: Annotated[int, "rows on which the validation split is judged"]
    test_batches: Annotated[int, "times as many rows judge the test split"]

    def __post_init__(self) -> None:
        """Raises ValueError if a value is out of range."""
        model_config.at_least(
            self, 1, "seeds", "steps", "every", "batch_size", "rows", "test_batches"
        )
        if not 0 < self.goal <= 1:
            raise ValueError(f"goal must be in (0, 1], got {self.goal}")
        if not all(0 < factor < math.inf for factor in self.swept):
            raise ValueError(f"factors must be positive, got {self.factors!r}")
        if self.count < 2:
            raise ValueError(
                "factors x seeds must be 2 or more: a mean of one run has no interval"
            )

    @property
    def swept(self) -> tuple[float, ...]:
        """The factors; raises ValueError if one is not a number."""
        return _numbers("factors", self.factors, float)

    @property
    def count(self) -> int:
        """R, the number of runs side by side."""
        return len(self.swept) * self.seeds


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """Everything that `train.study` needs."""

    seed: Annotated[int, "runs have the seeds that follow it"]
    task: Annotated[str, f"which one is studied: {', '.join(tasks.TASKS)}"]
    recall: tasks.Recall
    induction: tasks.Induction
    copy: tasks.Copy
    brackets: tasks.Brackets
    mixers: Annotated[str, f"of {', '.join(mixers_lib.MIXERS)}, each alone"]
    widths: Annotated[str, "E, model widths, ascending, with commas between"]
    model: ModelConfig
    optimizer: config.OptimizerConfig
    runs: RunsConfig

    def __post_init__(self) -> None:
        """Raises ValueError for values out of range, or for an impossible model."""
        model_config.one_of(self, "task", tasks.TASKS)
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in [0, 2**31), got {self.seed}")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"widths must ascend, got {self.widths!r}")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"mixers must differ, got {self.mixers!r}")
        for mixer, width in self.combinations:
            self.model.of(mixer, width, self.rows_of.length)

    @property
    def rows_of(self) -> tasks.Task:
        """The task that is studied."""
        task: tasks.Task = getattr(self, self.task)
        return task

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mixers."""
        return tuple(self.mixers.split(","))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The widths; raises ValueError if one is not an integer."""
        return _numbers("widths", self.widths, int)

    @property
    def combinations(self) -> tuple[tuple[str, int], ...]:
        """Pairs of mixer and width, in the order in which they are studied."""
        return tuple((name, width) for width in self.sizes for name in self.names)


def _numbers(name: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parses numbers with commas between; raises ValueError, naming the field."""
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError:
        raise ValueError(f"{name} must be numbers with commas, got {text!r}") from None
