"""A decoder-only language model: pre-norm blocks over one residual stream.

    x ← embed(tokens)
    x ← x + mixer(conv(norm(x)))      every block; attention, unless configured
    x ← x + mlp(norm(x))
    logits = norm(x) · embeddingᵀ

conv, a short causal convolution of each channel, is there only if configured.

Radford et al., 2019 (GPT-2) for the shape; Xiong et al., 2020, arXiv:2002.04745 for
norms before the layers; Press and Wolf, 2017, arXiv:1608.05859 for tied embeddings;
Zhang and Sennrich, 2019, arXiv:1910.07467 for RMSNorm.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import masks
from models import config as config_lib
from models import layers, mixers, positional


class Block(nn.Module):
    """One pre-norm layer: a mixer of the past, then an MLP at each position.

    Attributes:
      config: of the model.
      layer: which one this is, from 0.
    """

    config: config_lib.CausalLMConfig
    layer: int

    def setup(self) -> None:
        """Creates the layers."""
        config = self.config
        kernel_init, out_kernel_init = layers.kernel_inits(config.num_layers)
        self.mixer_norm = nn.RMSNorm(dtype=config.dtype)
        if config.is_convolved(self.layer):
            self.mixer_conv = layers.ShortConvolution(config.convolution)
        self.mixer = mixers.make(config, self.layer)
        self.mlp_norm = nn.RMSNorm(dtype=config.dtype)
        self.mlp = layers.MLP(
            width=config.mlp_width,
            use_bias=config.use_bias,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            dtype=config.dtype,
        )
        self.mixer_dropout = nn.Dropout(config.dropout_rate)
        self.mlp_dropout = nn.Dropout(config.dropout_rate)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        *,
        token_mask: Bool[Array, "B T"] | None,
        token_positions: Int[Array, "B T"] | Int[Array, "T"] | None,
        deterministic: bool,
        sow_weights: bool,
    ) -> Float[Array, "B T E"]:
        """Adds both layers' outputs to the residual stream."""
        h = self.mixer_norm(x)
        if self.config.is_convolved(self.layer):
            h = self.mixer_conv(h, token_mask=token_mask)
        h = self.mixer(
            h,
            deterministic=deterministic,
            token_mask=token_mask,
            token_positions=token_positions,
            sow_weights=sow_weights,
        )
        x += self.mixer_dropout(h, deterministic=deterministic)
        h = self.mlp(self.mlp_norm(x))
        return x + self.mlp_dropout(h, deterministic=deterministic)


class CausalLM(nn.Module):
    """Predicts the next token at every position from the tokens up to it.

    Attributes:
      config: sizes and choices.
      vocab_size: V.
    """

    config: config_lib.CausalLMConfig
    vocab_size: int

    def setup(self) -> None:
        """Creates the layers."""
        config = self.config
        init = nn.initializers.normal(0.02)
        self.token_embedding = layers.Embedding(self.vocab_size, config.width, init)
        embedding = positional.SCHEMES[config.positions].embedding
        if embedding is not None:
            self.position_embedding = embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.blocks = [Block(config, i) for i in range(config.num_layers)]
        self.final_norm = nn.RMSNorm(dtype=config.dtype)
        if not config.tie_embeddings:
            self.unembedding = layers.Embedding(self.vocab_size, config.width, init)

    def masks(self) -> tuple[masks.Mask, ...]:
        """Which tokens each layer may look at: a convolution, then its mixer."""
        config = self.config
        found: list[masks.Mask] = []
        for i in range(config.num_layers):
            if config.is_convolved(i):
                found.append(masks.sliding_window(config.convolution))
            found.append(mixers.mask(config, i))
        return tuple(found)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        deterministic: bool,
        token_mask: Bool[Array, "B T"] | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T V"]:
        """Scores the next token at every position.

        Args:
          tokens: ids; one outside 0 … V-1 makes NaN of its row.
          deterministic: if True, no dropout; else the 'dropout' stream is used.
          token_mask: False marks padding, on either side: it is seen by no token,
            and positions count real tokens only.
          sow_weights: sow each block's attention weights in 'intermediates'.

        Returns:
          float32 logits; those at padding mean nothing.

        Raises:
          ValueError: if there are more tokens than learned positions.
        """
        token_positions = None
        if token_mask is not None:
            token_positions = jnp.cumsum(token_mask, axis=1, dtype=jnp.int32) - 1
            token_positions = jnp.maximum(token_positions, 0)
        return self.from_embeddings(
            self.embed(tokens, token_positions),
            deterministic=deterministic,
            token_mask=token_mask,
            token_positions=token_positions,
            sow_weights=sow_weights,
        )

    def embed(
        self,
        tokens: Int[Array, "B T"],
        token_positions: Int[Array, "B T"] | Int[Array, "T"] | None = None,
    ) -> Float[Array, "B T E"]:
        """The vectors of the tokens, with those of their positions added if any are."""
        config = self.config
        x = self.token_embedding(tokens)
        if positional.SCHEMES[config.positions].embedding is not None:
            if token_positions is None:
                token_positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            x += self.position_embedding(token_positions)
        return x.astype(config.dtype)

    def from_embeddings(
        self,
        x: Float[Array, "B T E"],
        *,
        deterministic: bool,
        token_mask: Bool[Array, "B T"] | None = None,
        token_positions: Int[Array, "B T"] | Int[Array, "T"] | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T V"]:
        """The model after `embed`; arguments as at the call."""
        x = self.dropout(x, deterministic=deterministic)
        for block in self.blocks:
            x = block(
                x,
                token_mask=token_mask,
                token_positions=token_positions,
                deterministic=deterministic,
                sow_weights=sow_weights,
            )
        x = self.final_norm(x)
        if self.config.tie_embeddings:
            return self.token_embedding.attend(x)
        return self.unembedding.attend(x)
