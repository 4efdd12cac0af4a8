"""How a layer mixes positions: one literal table, from names to modules.

A new mixer is its module and one row here: the names that configurations accept, the
programs, the studies and the tests of every mixer derive from the table.

Every mixer is causal and maps x [B T E] to [B T E] under one signature:

    mixer(x, *, deterministic, token_mask=None, token_positions=None, sow_weights=False)

token_mask [B T] is False at padding, on either side, which no position sees and which
changes no state. A mixer without a use for positions, or without weights to sow, leaves
these two alone.

The table also says what one layer lets each query see: `proofs.dependence` holds the
whole model to it; and what it carries from token to token, which tells softmax
attention, recurrences and 'zero' apart.
"""

import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import linear as linear_attention
from attention import masks, random_features
from models import (
    layer_config,
    layers,
    linear,
    mamba,
    multihead,
    positional,
    recurrent,
    retention,
    rwkv,
    rwkv6,
)

Config = layer_config.LayerConfig
FeatureMap = linear_attention.FeatureMap
# From one token to the next: keys and values of the tokens still seen; matrices,
# which are sums of products of both; vectors, a few numbers in each channel; nothing.
Carries = Literal["keys and values", "matrices", "vectors", "nothing"]


class SelfAttention(nn.Module):
    """Softmax attention of a language model's layer, under a mask of its own.

    Attributes:
      config: of the layer.
      mask: what a query may see.
      absolute: whether the mask knows some positions by their numbers. They are counted
        from the first real token, so behind padding it is evaluated at T x T places.
    """

    config: Config
    mask: masks.Mask
    absolute: bool

    def setup(self) -> None:
        """Creates the attention, whose parameters stand in this module's place."""
        config = self.config
        kernel_init, out_kernel_init = layers.kernel_inits(config.num_layers)
        self.attention = multihead.MultiHeadAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dtype=config.dtype,
            dropout_rate=config.dropout_rate,
            broadcast_dropout=False,
            use_bias=config.use_bias,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            position_encoding=(
                config.positions
                if config.positions in positional.IN_ATTENTION
                else "none"
            ),
            scale=config.scale,
            implementation=(
                None if config.implementation == "auto" else config.implementation
            ),
        )
        nn.share_scope(self, self.attention)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        *,
        deterministic: bool,
        token_mask: Bool[Array, "B T"] | None = None,
        token_positions: Int[Array, "B T"] | Int[Array, "T"] | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T E"]:
        """Attends to what the mask shows of the tokens that are no padding."""
        mask = self.mask
        if self.absolute and token_positions is not None:
            mask = masks.dense(mask.at(token_positions, token_positions))
        if token_mask is not None:
            mask &= masks.dense(token_mask[:, None, None, :])
        return self.attention(
            x,
            mask=mask,
            query_positions=token_positions,
            deterministic=deterministic,
            sow_weights=sow_weights,
        )


class Zero(nn.Module):
    """Mixes nothing: what a model does without its mixers."""

    def __call__(
        self,
        x: Float[Array, "B T E"],
        *,
        deterministic: bool,
        token_mask: Bool[Array, "B T"] | None = None,
        token_positions: Int[Array, "B T"] | Int[Array, "T"] | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T E"]:
        """Zeros."""
        del deterministic, token_mask, token_positions, sow_weights
        return jnp.zeros_like(x)


class Mixer(NamedTuple):
    """A row of the table.

    Attributes:
      mask: what a query of a layer sees, given its index.
      make: the module of a layer, given its index.
      carries: what it carries from one token to the next.
    """

    mask: Callable[[Config, int], masks.Mask]
    make: Callable[[Config, int], nn.Module]
    carries: Carries

    @property
    def is_attention(self) -> bool:
        """Whether it is softmax attention, under whatever mask."""
        return self.carries == "keys and values"

    @property
    def is_recurrent(self) -> bool:
        """Whether `decode=True` makes a state of constant size in 'cache'."""
        return self.carries in ("matrices", "vectors")

    def state_size(self, config: Config, layer: int, length: int) -> int:
        """How many numbers are carried from one token of a row to the next.

        Attention: keys and values of those tokens that a later one still sees. All
        others: the state in the 'cache' collection.

        Args:
          config: of the layer.
          layer: index of the layer.
          length: tokens so far; as many may follow.
        """
        if self.is_attention:
            seen = self.mask(config, layer).materialize(2 * length, 2 * length)[0, 0]
            num_kv_heads = config.num_kv_heads or config.num_heads
            kept = int(jnp.sum(jnp.any(seen[length:, :length], axis=0)))
            return 2 * num_kv_heads * config.head_width * kept
        module = self.make(config, layer)
        if self.is_recurrent:
            module = module.clone(decode=True)
        x = jax.ShapeDtypeStruct((1, 1, config.width), config.dtype)
        init = functools.partial(module.init, deterministic=True)
        shapes = jax.eval_shape(init, jax.random.key(0), x)
        return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes.get("cache", {})))


def _causal(config: Config, layer: int) -> masks.Mask:
    del config, layer
    return masks.causal()


def _window(config: Config, layer: int) -> masks.Mask:
    del layer
    return masks.sliding_window(config.window)


def _longformer(config: Config, layer: int) -> masks.Mask:
    del layer
    return masks.longformer(config.window - 1, range(config.global_tokens), causal=True)


def _bigbird(config: Config, layer: int) -> masks.Mask:
    return masks.bigbird(
        config.block_size,
        -(-config.window // config.block_size),
        config.global_tokens,
        config.random_blocks,
        seed=layer,
        causal=True,
    )


def _itself(config: Config, layer: int) -> masks.Mask:
    del config, layer
    return masks.window(0, 0)


def _attention(
    mask: Callable[[Config, int], masks.Mask], *, absolute: bool = False
) -> Mixer:
    def make(config: Config, layer: int) -> nn.Module:
        return SelfAttention(config, mask(config, layer), absolute)

    return Mixer(mask, make, "keys and values")


def _shared(config: Config) -> dict[str, Any]:
    """What the modules of all other mixers are made with."""
    kernel_init, out_kernel_init = layers.kernel_inits(config.num_layers)
    return {
        "kernel_init": kernel_init,
        "out_kernel_init": out_kernel_init,
        "dtype": config.dtype,
    }


def _linear(config: Config, layer: int) -> nn.Module:
    del layer
    return _linear_attention(config, linear_attention.elu_plus_one)


def _performer(config: Config, layer: int) -> nn.Module:
    # Drawn while tracing: a constant of the program, another one in each layer.
    with jax.ensure_compile_time_eval():
        projection = random_features.gaussian(
            jax.random.key(layer), config.features, config.head_width
        )
    return _linear_attention(config, random_features.positive(projection))


def _linear_attention(config: Config, feature_map: FeatureMap) -> nn.Module:
    return linear.LinearAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        feature_map=feature_map,
        use_bias=config.use_bias,
        **_shared(config),
    )


def _retention(config: Config, layer: int) -> nn.Module:
    del layer
    return retention.Retention(
        num_heads=config.num_heads, use_bias=config.use_bias, **_shared(config)
    )


def _rwkv(config: Config, layer: int) -> nn.Module:
    return rwkv.TimeMixing(layer=layer, num_layers=config.num_layers, **_shared(config))


def _rwkv6(config: Config, layer: int) -> nn.Module:
    return rwkv6.TimeMixing(
        num_heads=config.num_heads,
        layer=layer,
        num_layers=config.num_layers,
        **_shared(config),
    )


def _mamba(config: Config, layer: int) -> nn.Module:
    del layer
    return mamba.MambaMixer(
        state_size=config.state_size, use_bias=config.use_bias, **_shared(config)
    )


def _gru(config: Config, layer: int) -> nn.Module:
    del layer
    return recurrent.GRUMixer(use_bias=config.use_bias, **_shared(config))


def _zero(config: Config, layer: int) -> nn.Module:
    del config, layer
    return Zero()


MIXERS: Mapping[str, Mixer] = types.MappingProxyType(
    {
        "softmax": _attention(_causal),
        "window": _attention(_window),
        "longformer": _attention(_longformer, absolute=True),
        "bigbird": _attention(_bigbird, absolute=True),
        "linear": Mixer(_causal, _linear, "matrices"),
        "performer": Mixer(_causal, _performer, "matrices"),
        "retention": Mixer(_causal, _retention, "matrices"),
        "rwkv": Mixer(_causal, _rwkv, "vectors"),
        "rwkv6": Mixer(_causal, _rwkv6, "matrices"),
        "mamba": Mixer(_causal, _mamba, "vectors"),
        "gru": Mixer(_causal, _gru, "vectors"),
        "zero": Mixer(_itself, _zero, "nothing"),
    }
)
ATTENTION = tuple(name for name, mixer in MIXERS.items() if mixer.is_attention)
RECURRENT = tuple(name for name, mixer in MIXERS.items() if mixer.is_recurrent)
