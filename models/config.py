"""The language model's configuration: that of its layers, and what they are put into.

`models.layer_config` has what the layers share, and says how fields are written.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Annotated

from attention import heads
from models import layer_config, positional
from models import mixers as mixers_lib


@dataclasses.dataclass(frozen=True)
class CausalLMConfig(layer_config.LayerConfig):
    """A decoder-only language model.

    Raises:
      ValueError: a value out of range, or values that do not fit each other.
    """

    mlp_width: Annotated[int, "F, hidden width of a block's MLP"]
    context: Annotated[int, "T, tokens that the model sees at once"]
    mixers: Annotated[
        str, f"of the layers, repeated in turn: {', '.join(mixers_lib.MIXERS)}"
    ]

    def __post_init__(self) -> None:
        """Checks each value, then values against each other."""
        at_least(self, 1, "num_layers", "num_heads", "width", "mlp_width", "context")
        at_least(self, 1, "window", "block_size", "features", "state_size")
        at_least(self, 0, "global_tokens", "random_blocks")
        at_least(self, 1, "num_kv_heads", "convolution", or_none=True)
        at_least(self, 0, "scale", or_none=True)
        for name in self.mixers.split(","):
            if name not in mixers_lib.MIXERS:
                raise ValueError(
                    f"mixers must be names out of {', '.join(mixers_lib.MIXERS)}, with "
                    f"commas between them, got {name!r}"
                )
        fraction(self, "dropout_rate")
        one_of(self, "positions", layer_config.POSITIONS)
        one_of(self, "dtype", layer_config.DTYPES)
        one_of(self, "implementation", layer_config.IMPLEMENTATIONS)
        heads.head_width(self.width, self.num_heads)
        heads.group_size(self.num_heads, self.num_kv_heads or self.num_heads)
        positional.SCHEMES[self.positions].check(self.width, self.num_heads)

    def mixer(self, layer: int) -> mixers_lib.Mixer:
        """The row of `models.mixers` that a layer is made by."""
        names = self.mixers.split(",")
        return mixers_lib.MIXERS[names[layer % len(names)]]

    def is_attention(self, layer: int) -> bool:
        """Whether a layer's mixer is softmax attention, under whatever mask."""
        return self.mixer(layer).is_attention

    def convolution_of(self, layer: int) -> int | None:
        """Width of the convolution of what a layer's mixer reads; 'zero' reads none."""
        return None if self.mixer(layer).carries == "nothing" else self.convolution


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
