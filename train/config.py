"""What makes a run, as frozen dataclasses, and how config files become them.

A config file (`configs/`) returns an `ml_collections.ConfigDict` that holds every
value; `from_config_dict` checks names and types and builds the `Config`. The second
half of each annotation is the field's help text, which `--help` prints.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from ml_collections import config_dict

from models import config as model_config
from train.text import tokenizers

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text and its tokens."""

    path: Annotated[str | None, "UTF-8 text file; none = Python's language reference"]
    tokenizer: Annotated[str, f"one of {', '.join(tokenizers.TOKENIZERS)}"]

    def __post_init__(self) -> None:
        """Raises ValueError for an empty path or an unknown tokenizer."""
        if self.path == "":
            raise ValueError("path must be a file or none, got ''")
        model_config.one_of(self, "tokenizer", tokenizers.TOKENIZERS)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW under linear warmup and cosine decay."""

    peak_lr: Annotated[float, "learning rate after the warmup"]
    min_lr: Annotated[float, "learning rate at the end of the cosine"]
    warmup_steps: Annotated[int, "steps of linear warmup from 0"]
    b1: Annotated[float, "decay of Adam's mean of gradients"]
    b2: Annotated[float, "decay of Adam's mean of squared gradients"]
    weight_decay: Annotated[float, "of matrices, times the learning rate; 0 = off"]
    clip_norm: Annotated[
        float | None, "largest norm of all gradients together; none = off"
    ]

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range."""
        model_config.at_least(
            self, 0, "peak_lr", "min_lr", "warmup_steps", "weight_decay"
        )
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(
                f"clip_norm must be positive or none, got {self.clip_norm}"
            )
        model_config.fraction(self, "b1", "b2")
        if self.min_lr > self.peak_lr:
            raise ValueError(
                f"min_lr must be at most peak_lr, got {self.min_lr} and {self.peak_lr}"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: Annotated[
        int, "steps in all; each updates unless its gradient is not finite"
    ]
    batch_size: Annotated[int, "B, sequences of a micro-batch"]
    accumulation: Annotated[int, "micro-batches of one update"]
    log_every: Annotated[int, "steps between lines of metrics.jsonl"]
    checkpoint_every: Annotated[int, "steps between checkpoints; one more at the end"]

    def __post_init__(self) -> None:
        """Raises ValueError unless all are positive, and steps fit an int32."""
        model_config.at_least(self, 1, *(f.name for f in dataclasses.fields(self)))
        if self.steps >= 2**31:
            raise ValueError(f"steps must be below 2**31, got {self.steps}")


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """The proofs of causality."""

    steps: Annotated[int, "updates of the learning proof, on uniform random tokens"]
    eval_sequences: Annotated[int, "fresh sequences that its loss is measured on"]
    replacements: Annotated[int, "other tokens tried at each edited position"]

    def __post_init__(self) -> None:
        """Raises ValueError unless all are positive."""
        model_config.at_least(self, 1, *(f.name for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that `train.main` needs."""

    seed: Annotated[int, "of parameters, batches and dropout"]
    model: model_config.CausalLMConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    audit: AuditConfig

    def __post_init__(self) -> None:
        """Raises ValueError unless the seed fits 32 bits, all that a key holds."""
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")


class Field(NamedTuple):
    """One leaf of a tree of dataclasses."""

    path: str  # from the root, with dots: 'model.width'
    type: type  # int, float, bool or str
    optional: bool  # whether None is a value too
    help: str


def fields(cls: type) -> Iterator[Field]:
    """All leaves of a tree of dataclasses, in order.

    Args:
      cls: a dataclass whose fields are dataclasses, `Annotated[type, help]` or
        `Annotated[type | None, help]`.

    Yields:
      Each leaf.
    """
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            for leaf in fields(typing.cast(type, hint)):
                yield leaf._replace(path=f"{name}.{leaf.path}")
        else:
            leaf, text = typing.get_args(hint)
            yield Field(name, *_split(leaf), text)


def from_config_dict(values: config_dict.ConfigDict, cls: type[T]) -> T:
    """Builds the dataclass that a config file describes.

    Args:
      values: a value for every field of `cls`, and nothing else.
      cls: a dataclass as in `fields`, such as `Config`.

    Returns:
      An instance of `cls`. An int where a float belongs becomes one; None stays None
      where the annotation allows it.

    Raises:
      ValueError: an unknown or missing field, a value of another type (a bool is no
        int), or one that the dataclass refuses; the message names the field.
    """
    return _build(cls, values.to_dict(), "config")


def to_json(config: object) -> str:
    """The text of a workdir's config.json."""
    return json.dumps(dataclasses.asdict(typing.cast(Any, config)), indent=2) + "\n"


def from_dict(values: Mapping[str, Any], cls: type[T]) -> T:
    """Builds what `to_json` wrote, once read; errors as in `from_config_dict`."""
    return _build(cls, values, "config")


def _build(cls: Any, values: Any, path: str) -> Any:
    """Builds the dataclass `cls`, which stands at `path`, from a mapping."""
    hints = typing.get_type_hints(cls)
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} must hold {', '.join(hints)}, got {values!r}")
    for name in values:
        if name not in hints:
            raise ValueError(f"{path}.{name} is unknown; known: {', '.join(hints)}")
    for name in hints:
        if name not in values:
            raise ValueError(f"{path}.{name} is missing")
    children = {
        name: (_build if dataclasses.is_dataclass(hint) else _leaf)(
            hint, values[name], f"{path}.{name}"
        )
        for name, hint in hints.items()
    }
    try:
        return cls(**children)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _leaf(hint: Any, value: Any, path: str) -> Any:
    cls, optional = _split(hint)
    if value is None and optional:
        return None
    if cls is float and type(value) is int:
        return float(value)
    if type(value) is not cls:
        wanted = f"{cls.__name__} or none" if optional else cls.__name__
        raise ValueError(
            f"{path} must be of type {wanted}, got {value!r} of type "
            f"{type(value).__name__}"
        )
    return value


def _split(hint: Any) -> tuple[type, bool]:
    """Returns the type of a leaf, and whether its annotation is `type | None`."""
    arms = typing.get_args(hint) or (hint,)
    (leaf,) = (arm for arm in arms if arm is not types.NoneType)
    return leaf, len(arms) > 1
