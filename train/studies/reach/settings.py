"""Configuration of the study of gradients over distance, filled by configs/reach.py."""

import dataclasses
from typing import Annotated

from models import config as model_config
from train import config as config_lib

# The two models, and the stages of training at which gradients are measured.
MODELS = ("attention", "GRU")
STAGES = ("before", "after")


@dataclasses.dataclass(frozen=True)
class TimingConfig:
    """Settings for timing a step of one layer with batch 1."""

    shortest: Annotated[int, "least length T; doubled up to the greatest"]
    longest: Annotated[int, "greatest length"]
    width: Annotated[int, "E of the layers that are timed; num_heads divides it"]
    rounds: Annotated[int, "measurements of each, at most"]
    seconds: Annotated[float, "after which a length ends, once measured three times"]

    def __post_init__(self) -> None:
        """Raises ValueError if a value is out of range."""
        model_config.at_least(self, 1, "shortest", "width", "rounds")
        model_config.at_least(self, self.shortest, "longest")
        model_config.at_least(self, 0, "seconds")

    @property
    def lengths(self) -> list[int]:
        """Every T that is timed."""
        doublings = (self.longest // self.shortest).bit_length()
        return [self.shortest * 2**i for i in range(doublings)]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that `train.reach` needs."""

    seed: Annotated[int, "of the first run; each further run has the next one"]
    runs: Annotated[int, "R, runs of each model"]
    model: model_config.CausalLMConfig
    gru_mlp_width: Annotated[int, "F of the GRU's model, for as many parameters"]
    data: config_lib.DataConfig
    optimizer: config_lib.OptimizerConfig
    steps: Annotated[int, "of training"]
    batch_size: Annotated[int, "B, sequences of a step"]
    rows: Annotated[int, "rows of validation text on which gradients are taken"]
    nearest: Annotated[int, "least distance k that the lines are fitted to"]
    timing: TimingConfig

    def __post_init__(self) -> None:
        """Raises ValueError for values out of range or that contradict each other."""
        model_config.at_least(self, 2, "runs")
        model_config.at_least(
            self, 1, "gru_mlp_width", "steps", "batch_size", "rows", "nearest"
        )
        if not 0 <= self.seed <= 2**32 - self.runs:
            raise ValueError(f"seed must be in [0, 2**32 - runs], got {self.seed}")
        if self.model.mixers != "softmax":
            raise ValueError(
                f"model.mixers must be softmax, got {self.model.mixers!r}: the GRU "
                "takes its place in the other model"
            )
        if self.nearest > self.model.context - 3:
            raise ValueError(
                "nearest must leave three distances below model.context="
                f"{self.model.context}, got {self.nearest}"
            )
        self.layer("attention")

    def models(self) -> dict[str, model_config.CausalLMConfig]:
        """Returns the configurations of both models by name."""
        gru = dataclasses.replace(
            self.model, mixers="gru", mlp_width=self.gru_mlp_width
        )
        return dict(zip(MODELS, (self.model, gru), strict=True))

    def layer(self, name: str) -> model_config.CausalLMConfig:
        """Returns the configuration of the model whose layer is timed."""
        return dataclasses.replace(self.models()[name], width=self.timing.width)
