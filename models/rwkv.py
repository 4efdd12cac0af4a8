"""RWKV-4: time mixing replaces attention, and channel mixing replaces the MLP.

    mix_μ(x)ₜ = μ xₜ + (1 - μ) xₜ₋₁                                    token shift
    time mixing      r, k, v = W_r mix(x), W_k mix(x), W_v mix(x)
                     output  = W_o (σ(r) · wkv(k, v))
    channel mixing   output  = σ(W_r mix(x)) · W_v relu(W_k mix(x))²

Every mix has a separate parameter μ. Peng et al., 2023, arXiv:2305.13048, section 3.1;
the initial values follow the authors' implementation. `attention.rwkv` computes wkv.
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import convolution, numerics, rwkv
from models import layers


class TimeMixing(layers.Mixer):
    """Mixes tokens by an exponentially decaying mean: W_o (σ(r) · wkv(k, v)).

    Attributes:
      channels: number of channels of the recurrence; None: the width E.
      layer: index of the layer, from 0; the initial decays and μ depend on it.
      num_layers: L, the number of layers of the model.

    Reference: Peng et al., 2023, arXiv:2305.13048, section 3.1.2.
    """

    channels: int | None = None
    layer: int = 0
    num_layers: int = 1

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Shifts the tokens, computes wkv, gates it and projects it to width E."""
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
    """RWKV's gated MLP, which also sees the previous token.

        output = σ(W_r mix(x)) · W_v relu(W_k mix(x))²

    Attributes:
      channels: F, the width of the hidden layer.
      layer: index of the layer, from 0; the initial μ depend on it.
      num_layers: L, the number of layers of the model.
      dtype: dtype of the computation; None: inferred from x and the parameters.
      decode: whether to continue from the last token in the 'cache' collection, and to
        store it there.

    Reference: Peng et al., 2023, arXiv:2305.13048, section 3.1.3.
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
        """Maps each token together with the real token before it.

        Args:
          x: the tokens.
          token_mask: False marks padding, on either side; None: there is none.

        Returns:
          The output for every token; it is arbitrary at padding.
        """
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
    """The token shift xₜ₋₁, which skips padding.

    Attributes:
      decode: whether to continue from the last token in the 'cache' collection, and to
        store it there.
    """

    decode: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
        """Returns x with padding set to 0, and the real token before each token."""
        if token_mask is not None:
            x = jnp.where(token_mask[..., None], x, 0)
        state, keep = layers.carried(self, "token", lambda: jnp.zeros_like(x[:, :1]))
        last, before = convolution.shift(x, token_mask=token_mask, state=state)
        keep(last)
        return x, before


class Mix(nn.Module):
    """Interpolates between each token and the one before it: μ xₜ + (1 - μ) xₜ₋₁.

    Attributes:
      weight_init: initializer of μ [E].
    """

    weight_init: nn.initializers.Initializer

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T E"], before: Float[Array, "B T E"]
    ) -> Float[Array, "B T E"]:
        """Returns μ x + (1 - μ) before, in the dtype of x."""
        weight = self.param("weight", self.weight_init, x.shape[-1:], jnp.float32)
        weight = weight.astype(x.dtype)[None, None]
        return weight * x + (1 - weight) * before


class RWKVLM(nn.Module):
    """RWKV-4's language model.

        x ← norm(embed(tokens))
        x ← x + time_mixing(norm(x)),   x ← x + channel_mixing(norm(x))     in L blocks
        logits = norm(x) · unembeddingᵀ

    Attributes:
      vocab_size: V, the number of token ids.
      width: E, the width of the residual stream.
      num_layers: L, the number of blocks.
      channels: number of channels of time mixing; None: E.
      mlp_width: F, the hidden width of channel mixing; None: 4 E.
      norm_epsilon: epsilon of the LayerNorms, added to the variance.
      tie_embeddings: whether the output layer is the transposed embedding.
      dtype: dtype of the mixing; the residual stream is in float32.
      decode: whether to continue from the state in the 'cache' collection, and to store
        the last state there.

    Reference: Peng et al., 2023, arXiv:2305.13048, section 3.1.
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
          tokens: ids; an id outside 0 … V-1 makes the logits of its row NaN.
          token_mask: False marks padding, on either side; None: there is none.

        Returns:
          float32 logits; those at padding are arbitrary.
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
    """The two measures of a layer's depth that the authors' implementation uses.

    Args:
      layer: index of the layer, from 0.
      num_layers: L, the number of layers.

    Returns:
      layer / (L - 1), which is 0 in the first layer and 1 in the last; and
      1 - layer / L, which is 1 in the first layer and 1 / L in the last.
    """
    return layer / max(num_layers - 1, 1), 1 - layer / num_layers


def powers(exponent: float, plus: float = 0.0) -> nn.initializers.Initializer:
    """An initializer that sets channel i to (i / E)^exponent + plus."""

    def init(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del rng
        return (jnp.arange(shape[0], dtype=dtype) / shape[0]) ** exponent + plus

    return init


def log_rates(low: float, span: float, deep: float) -> nn.initializers.Initializer:
    """An initializer of log(-w), which rises over the channels i = 0 … E - 1.

        log(-wᵢ) = low + span · (i / (E - 1))^(0.7 + 1.3 deep)

    Args:
      low: value of the first channel, which decays slowest.
      span: difference between the last channel and the first.
      deep: depth of the layer, from 0 to 1; deeper layers decay more slowly.

    Returns:
      The initializer.
    """

    def init(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del rng
        fraction = jnp.arange(shape[0], dtype=dtype) / max(shape[0] - 1, 1)
        return low + span * fraction ** (0.7 + 1.3 * deep)

    return init


def _bonus(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Initializes u to log 0.3 plus ½, 0 or -½, different in neighbouring channels."""
    del rng
    return jnp.log(0.3) + 0.5 * ((jnp.arange(shape[0]) + 1) % 3 - 1).astype(dtype)
