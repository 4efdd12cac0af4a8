"""What the mixer of one layer is configured by.

`models.mixers` reads it, and `models.config` makes a whole model's configuration of it.
Config files hold every value, once, so the dataclasses carry no defaults. The second
half of each annotation is the field's help text, which `--help` prints.
"""

import dataclasses
from typing import Annotated

from attention import dot_product, heads
from models import positional

POSITIONS = tuple(positional.SCHEMES)
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
class LayerConfig(SharedConfig):
    """What a mixer reads: all of it holds in every layer of a model."""

    width: Annotated[int, "E, model width"]

    @property
    def head_width(self) -> int:
        """H, the width of a query/key head."""
        return heads.head_width(self.width, self.num_heads)
