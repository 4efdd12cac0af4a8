"""RWKV-4: a recurrence in the place of attention, and channel mixing for an MLP.

    mix_μ(x)ₜ = μ xₜ + (1 - μ) xₜ₋₁                                    token shift
    time mixing      r, k, v = W_r mix(x), W_k mix(x), W_v mix(x)
                     output  = W_o (σ(r) · wkv(k, v))
    channel mixing   output  = σ(W_r mix(x)) · W_v relu(W_k mix(x))²

each mix with its own μ. Peng et al., 2023, arXiv:2305.13048, section 3.1; initial
values from the authors' code. `attention.rwkv` is the recurrence.
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import convolution, numerics, rwkv
from models import layers


class TimeMixing(layers.Mixer):
    """Mixes tokens by a mean that decays exponentially, channel by channel.

    Attributes:
      channels: of the recurrence; None: the width E.
      layer: which layer this is, from 0: initial decays and μ depend on the depth.
      num_layers: of how many.
    """

    channels: int | None = None
    layer: int = 0
    num_layers: int = 1

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Shifts, mixes by means that decay, and gates."""
        batch, _, width = x.shape
        channels = self.channels or width
        deep, early = depth(self.layer, self.num_layers)
        x, before = TokenShift(decode=self.decode, name="shift")(x, token_mask)
        for_receptance = Mix(powers(early / 2), name="mix_receptance")(x, before)
        for_key = Mix(powers(early), name="mix_key")(x, before)
        for_value = Mix(powers(early, 0.3 * deep), name="mix_value")(x, before)
        receptance = self.project("receptance", for_receptance, channels)
        key = self.project("key", for_key, channels)
        value = self.project("value", for_value, channels)
        log_rate = self.param("decay", log_rates(-5, 8, deep), (channels,), jnp.float32)
        bonus = self.param("bonus", _bonus, (channels,), jnp.float32)
        dtype = numerics.accumulation_dtype(value.dtype)
        state, keep = layers.carried(
            self, "sums", lambda: rwkv.empty(batch, channels, dtype=dtype)
        )
        after, x = rwkv.wkv(
            key,
            value,
            -jnp.exp(log_rate),
            bonus,
            token_mask=token_mask,
            state=state,
        )
        keep(after)
        return self.project_back("output", nn.sigmoid(receptance) * x, width)


class ChannelMixing(nn.Module):
    """RWKV's MLP: squared ReLU, a gate, and a look at the token before.

    Attributes:
      channels: F, of the layer between.
      layer: index of the layer, from 0: the initial μ depend on the depth.
      num_layers: L, of the model.
      dtype: of the computation; None: inferred.
      decode: keep the last token in the 'cache' collection, and continue from it.
    """

    channels: int
    layer: int = 0
    num_layers: int = 1
    dtype: Any = None
    decode: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T E"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T E"]:
        """Maps each token together with the real token before it."""
        width = x.shape[-1]
        _, early = depth(self.layer, self.num_layers)

        def project(name: str, features: int, x: Array) -> Array:
            return layers.Projection(
                features=(features,), use_bias=False, dtype=self.dtype, name=name
            )(x)

        x, before = TokenShift(decode=self.decode, name="shift")(x, token_mask)
        for_key = Mix(powers(early), name="mix_key")(x, before)
        for_receptance = Mix(powers(early), name="mix_receptance")(x, before)
        hidden = jnp.square(nn.relu(project("key", self.channels, for_key)))
        gate = nn.sigmoid(project("receptance", width, for_receptance))
        return gate * project("value", width, hidden)


class TokenShift(nn.Module):
    """The tokens, padding cleared, and the token before each; its state if decoding."""

    decode: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
        """Shifts by one real token."""
        if token_mask is not None:
            x = jnp.where(token_mask[..., None], x, 0)
        state, keep = layers.carried(self, "token", lambda: jnp.zeros_like(x[:, :1]))
        last, before = convolution.shift(x, token_mask=token_mask, state=state)
        keep(last)
        return x, before


class Mix(nn.Module):
    """μ x + (1 - μ) x', between each token and the one before it.

    Attributes:
      weight_init: initializer of μ [E].
    """

    weight_init: nn.initializers.Initializer

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T E"], before: Float[Array, "B T E"]
    ) -> Float[Array, "B T E"]:
        """Mixes in the dtype of x."""
        weight = self.param("weight", self.weight_init, x.shape[-1:], jnp.float32)
        weight = weight.astype(x.dtype)[None, None]
        return weight * x + (1 - weight) * before


class RWKVLM(nn.Module):
    """RWKV-4's language model.

    Attributes:
      vocab_size: V.
      width: E.
      num_layers: L.
      channels: of time mixing; None: E.
      mlp_width: F, of channel mixing; None: 4 E.
      norm_epsilon: added to variances by the LayerNorms.
      tie_embeddings: whether the output layer is the embedding, transposed.
      dtype: of the mixing; the stream is in float32.
      decode: keep the state in the 'cache' collection, and continue from it.
    """

    vocab_size: int
    width: int
    num_layers: int
    channels: int | None = None
    mlp_width: int | None = None
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    dtype: Any = jnp.float32
    decode: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Scores the next token at every position.

        Args:
          tokens: ids; one outside 0 … V-1 makes NaN of its row.
          token_mask: False marks padding, on any side.

        Returns:
          float32 logits; those at padding mean nothing.
        """
        init = nn.initializers.normal(0.02)
        norm = functools.partial(nn.LayerNorm, self.norm_epsilon, dtype=self.dtype)
        embedding = layers.Embedding(
            self.vocab_size, self.width, init, name="token_embedding"
        )
        x = norm(dtype=None, name="first_norm")(embedding(tokens))
        for i in range(self.num_layers):
            h = norm(name=f"time_norm_{i}")(x)
            h = TimeMixing(
                channels=self.channels,
                layer=i,
                num_layers=self.num_layers,
                dtype=self.dtype,
                decode=self.decode,
                name=f"time_mixing_{i}",
            )(h, token_mask=token_mask)
            x += h.astype(x.dtype)
            h = norm(name=f"channel_norm_{i}")(x)
            h = ChannelMixing(
                channels=self.mlp_width or 4 * self.width,
                layer=i,
                num_layers=self.num_layers,
                dtype=self.dtype,
                decode=self.decode,
                name=f"channel_mixing_{i}",
            )(h, token_mask=token_mask)
            x += h.astype(x.dtype)
        x = norm(name="final_norm")(x)
        if self.tie_embeddings:
            return embedding.attend(x)
        return layers.Embedding(
            self.vocab_size, self.width, init, name="unembedding"
        ).attend(x)


def depth(layer: int, num_layers: int) -> tuple[float, float]:
    """How deep a layer stands: 0 … 1, and 1 … 1/L, as the authors' code has it."""
    return layer / max(num_layers - 1, 1), 1 - layer / num_layers


def powers(exponent: float, plus: float = 0.0) -> nn.initializers.Initializer:
    """An initializer: (i / E)^exponent + plus."""

    def init(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del rng
        return (jnp.arange(shape[0], dtype=dtype) / shape[0]) ** exponent + plus

    return init


def log_rates(low: float, span: float, deep: float) -> nn.initializers.Initializer:
    """An initializer of log(-w): from slow decay to fast, slower in deeper layers."""

    def init(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del rng
        fraction = jnp.arange(shape[0], dtype=dtype) / max(shape[0] - 1, 1)
        return low + span * fraction ** (0.7 + 1.3 * deep)

    return init


def _bonus(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Log 0.3, and ½ up or down, so that neighbouring channels differ."""
    del rng
    return jnp.log(0.3) + 0.5 * ((jnp.arange(shape[0]) + 1) % 3 - 1).astype(dtype)
