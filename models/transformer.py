"""A decoder-only language model: pre-norm blocks over one residual stream.

    x ← embed(tokens)
    x ← x + mixer(conv(norm(x)))      in every block; the mixer is configured by name
    x ← x + mlp(norm(x))
    logits = norm(x) · embeddingᵀ

conv is an optional short causal convolution of each channel.

Radford et al., 2019 (GPT-2) for the shape; Xiong et al., 2020, arXiv:2002.04745 for
norms before the layers; Press and Wolf, 2017, arXiv:1608.05859 for tied embeddings;
Zhang and Sennrich, 2019, arXiv:1910.07467 for RMSNorm.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import masks
from models import config as config_lib
from models import layers, positional


class Block(nn.Module):
    """One pre-norm block: x ← x + mixer(conv(norm(x))), then x ← x + mlp(norm(x)).

    Attributes:
      config: configuration of the model.
      layer: index of this block, from 0.
    """

    config: config_lib.CausalLMConfig
    layer: int

    def setup(self) -> None:
        """Creates the layers."""
        config = self.config
        kernel_init, out_kernel_init = layers.kernel_inits(config.num_layers)
        self.mixer_norm = nn.RMSNorm(dtype=config.dtype)
        convolution = config.convolution_of(self.layer)
        if convolution is not None:
            self.mixer_conv = layers.ShortConvolution(convolution)
        self.mixer = config.mixer(self.layer).make(config, self.layer)
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
        """Adds the outputs of the mixer and the MLP to the residual stream.

        Args:
          x: the residual stream.
          token_mask: False marks padding, which no token sees; None: there is none.
          token_positions: positions of the tokens in their sequence; None: 0 … T-1.
          deterministic: True disables dropout; False uses the 'dropout' stream.
          sow_weights: whether to sow attention weights in 'intermediates'.

        Returns:
          The residual stream after this block.
        """
        h = self.mixer_norm(x)
        if self.config.convolution_of(self.layer) is not None:
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
      config: sizes of the model, its mixers and its positional scheme.
      vocab_size: V, the number of token ids.
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
        """The mask of every layer that mixes tokens, from the first to the last.

        Returns:
          For each block the mask of its convolution, if it has one, and of its mixer.
        """
        config = self.config
        layer_masks: list[masks.Mask] = []
        for i in range(config.num_layers):
            convolution = config.convolution_of(i)
            if convolution is not None:
                layer_masks.append(masks.sliding_window(convolution))
            layer_masks.append(config.mixer(i).mask(config, i))
        return tuple(layer_masks)

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
          tokens: ids; an id outside 0 … V-1 makes the logits of its row NaN.
          deterministic: True disables dropout; False uses the 'dropout' stream.
          token_mask: False marks padding, on either side. No token sees padding, and
            positions count real tokens only.
          sow_weights: whether to sow each block's attention weights in 'intermediates'.

        Returns:
          float32 logits; those at padding are arbitrary.

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
        """Embeds the tokens, and adds position embeddings if the model has them.

        Args:
          tokens: ids; the vector of an id outside 0 … V-1 is NaN.
          token_positions: positions of the tokens in their sequence; None: 0 … T-1.

        Returns:
          The residual stream before the first block, in the model's dtype.

        Raises:
          ValueError: if there are more tokens than learned positions.
        """
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
        """Computes the logits from embedded tokens: the model after `embed`.

        Args:
          x: the result of `embed`.
          deterministic: True disables dropout; False uses the 'dropout' stream.
          token_mask: False marks padding, on either side, which no token sees.
          token_positions: positions of the tokens in their sequence; None: 0 … T-1.
          sow_weights: whether to sow each block's attention weights in 'intermediates'.

        Returns:
          float32 logits; those at padding are arbitrary.
        """
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
