"""The language model's configuration.

Config files hold every value, once, so the dataclass carries no defaults. The second
half of each annotation is the field's help text, which `--help` prints.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Annotated

from attention import dot_product, heads
from models import positional

POSITIONS = tuple(positional.SCHEMES)
ATTENTION = ("softmax", "window", "longformer", "bigbird")
RECURRENT = ("linear", "performer", "retention", "rwkv", "rwkv6", "mamba", "gru")
MIXERS = (*ATTENTION, *RECURRENT, "zero")
DTYPES = ("float32", "bfloat16")
IMPLEMENTATIONS = ("auto", *dot_product.IMPLEMENTATIONS)


@dataclasses.dataclass(frozen=True)
class SharedConfig:
    """What language models of several widths and mixers can have in common."""

    num_layers: Annotated[int, "L, blocks"]
    num_heads: Annotated[int, "N, query heads; divides width"]
    num_kv_heads: Annotated[
        int | None, "K, key/value heads; divides num_heads; none = num_heads"
    ]
    positions: Annotated[
        str,
        f"one of {', '.join(POSITIONS)}; "
        f"{', '.join(positional.IN_ATTENTION)} act in attention only",
    ]
    convolution: Annotated[
        int | None,
        "width of a causal depthwise convolution before each mixer; none = off",
    ]
    window: Annotated[int, "nearest keys that window, longformer and bigbird see"]
    global_tokens: Annotated[int, "longformer: positions, bigbird: blocks seen by all"]
    block_size: Annotated[int, "bigbird: positions of a block"]
    random_blocks: Annotated[int, "bigbird: blocks that a query block sees at random"]
    features: Annotated[int, "M, performer: random features of a head"]
    state_size: Annotated[int, "M, mamba: numbers of state in each channel"]
    scale: Annotated[float | None, "factor of the scores; none = 1 / sqrt(head width)"]
    use_bias: Annotated[bool, "biases in projections and MLP"]
    tie_embeddings: Annotated[bool, "the output layer is the embedding, transposed"]
    dropout_rate: Annotated[float, "chance that training drops a value, in [0, 1)"]
    dtype: Annotated[str, f"of the computation, not of parameters: {', '.join(DTYPES)}"]
    implementation: Annotated[str, f"of attention: {', '.join(IMPLEMENTATIONS)}"]


@dataclasses.dataclass(frozen=True)
class CausalLMConfig(SharedConfig):
    """A decoder-only language model.

    Raises:
      ValueError: a value out of range, or values that do not fit each other.
    """

    width: Annotated[int, "E, model width"]
    mlp_width: Annotated[int, "F, hidden width of a block's MLP"]
    context: Annotated[int, "T, tokens that the model sees at once"]
    mixers: Annotated[str, f"of the layers, repeated in turn: {', '.join(MIXERS)}"]

    def __post_init__(self) -> None:
        """Checks each value, then values against each other."""
        at_least(self, 1, "num_layers", "num_heads", "width", "mlp_width", "context")
        at_least(self, 1, "window", "block_size", "features", "state_size")
        at_least(self, 0, "global_tokens", "random_blocks")
        at_least(self, 1, "num_kv_heads", "convolution", or_none=True)
        at_least(self, 0, "scale", or_none=True)
        for name in self.mixers.split(","):
            if name not in MIXERS:
                raise ValueError(
                    f"mixers must be names out of {', '.join(MIXERS)}, with commas "
                    f"between them, got {name!r}"
                )
        fraction(self, "dropout_rate")
        one_of(self, "positions", POSITIONS)
        one_of(self, "dtype", DTYPES)
        one_of(self, "implementation", IMPLEMENTATIONS)
        heads.head_width(self.width, self.num_heads)
        heads.group_size(self.num_heads, self.num_kv_heads or self.num_heads)
        positional.SCHEMES[self.positions].check(self.width, self.num_heads)

    def mixer(self, layer: int) -> str:
        """The name of the mixer of a layer."""
        names = self.mixers.split(",")
        return names[layer % len(names)]

    def is_attention(self, layer: int) -> bool:
        """Whether a layer's mixer is softmax attention, under whatever mask."""
        return self.mixer(layer) in ATTENTION

    def convolution_of(self, layer: int) -> int | None:
        """Width of the convolution of what a layer's mixer reads; 'zero' reads none."""
        return None if self.mixer(layer) == "zero" else self.convolution

    @property
    def head_width(self) -> int:
        """H, the width of a query/key head."""
        return heads.head_width(self.width, self.num_heads)


def at_least(
    config: object, minimum: float, *names: str, or_none: bool = False
) -> None:
    """Raises ValueError unless each named field is finite and >= `minimum`.

    Args:
      config: a dataclass.
      minimum: the least value that is allowed.
      *names: its fields.
      or_none: whether None is allowed as well.
    """
    for name in names:
        value = getattr(config, name)
        if value is None and or_none:
            continue
        if not minimum <= value < math.inf:
            bound = f"{minimum} or none" if or_none else f"{minimum}"
            raise ValueError(f"{name} must be at least {bound}, got {value}")


def fraction(config: object, *names: str) -> None:
    """Raises ValueError unless each named field lies in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")


def one_of(config: object, name: str, known: Iterable[str]) -> None:
    """Raises ValueError, listing the known names, unless the field holds one."""
    value = getattr(config, name)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
