"""A decoder-only language model: pre-norm blocks over one residual stream.

    x ← embed(tokens)
    x ← x + attention(norm(x))        every block, under the causal mask
    x ← x + mlp(norm(x))
    logits = norm(x) · embeddingᵀ

Radford et al., 2019 (GPT-2) for the shape; Xiong et al., 2020, arXiv:2002.04745 for
norms before the layers; Press and Wolf, 2017, arXiv:1608.05859 for tied embeddings;
Zhang and Sennrich, 2019, arXiv:1910.07467 for RMSNorm.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import masks, positions
from models import config as config_lib
from models import layers, multihead


class Block(nn.Module):
    """One pre-norm layer: attention over the past, then an MLP at each position."""

    config: config_lib.CausalLMConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T E"],
        *,
        mask: masks.Mask,
        token_positions: Int[Array, "B T"] | None,
        deterministic: bool,
        sow_weights: bool,
    ) -> Float[Array, "B T E"]:
        """Adds both layers' outputs to the residual stream."""
        config = self.config
        kernel_init, out_kernel_init = _kernel_inits(config)
        h = nn.RMSNorm(dtype=config.dtype, name="attention_norm")(x)
        h = multihead.MultiHeadAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads or None,
            dtype=config.dtype,
            dropout_rate=config.dropout_rate,
            broadcast_dropout=False,
            use_bias=config.use_bias,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            position_encoding=(
                config.positions if config.positions in ("rotary", "alibi") else "none"
            ),
            scale=config.scale or None,
            implementation=(
                None if config.implementation == "auto" else config.implementation
            ),
            name="attention",
        )(
            h,
            mask=mask,
            query_positions=token_positions,
            deterministic=deterministic,
            sow_weights=sow_weights,
        )
        x += nn.Dropout(config.dropout_rate)(h, deterministic=deterministic)
        h = nn.RMSNorm(dtype=config.dtype, name="mlp_norm")(x)
        h = layers.MLP(
            width=config.mlp_width,
            use_bias=config.use_bias,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            dtype=config.dtype,
            name="mlp",
        )(h)
        return x + nn.Dropout(config.dropout_rate)(h, deterministic=deterministic)


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
        if config.positions == "learned":
            self.position_embedding = layers.Embedding(
                config.context, config.width, init
            )
        self.dropout = nn.Dropout(config.dropout_rate)
        self.blocks = [Block(config) for _ in range(config.num_layers)]
        self.final_norm = nn.RMSNorm(dtype=config.dtype)
        if not config.tie_embeddings:
            self.unembedding = layers.Embedding(self.vocab_size, config.width, init)

    def mask(self) -> masks.Mask:
        """Which tokens a block may look at: the declared mask of one layer."""
        if self.config.window:
            return masks.sliding_window(self.config.window)
        return masks.causal()

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
        token_positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T E"]:
        """The vectors of the tokens, with those of their positions added if any are."""
        config = self.config
        x = self.token_embedding(tokens)
        length = tokens.shape[1]
        if token_positions is None:
            token_positions = jnp.arange(length, dtype=jnp.int32)[None]
        if config.positions == "learned":
            if length > config.context:
                raise ValueError(
                    f"{length} tokens, but positions are learned for "
                    f"context={config.context} only"
                )
            x += self.position_embedding(token_positions)
        elif config.positions == "sinusoidal":
            x += positions.sinusoidal(token_positions, config.width)
        return x.astype(config.dtype)

    def from_embeddings(
        self,
        x: Float[Array, "B T E"],
        *,
        deterministic: bool,
        token_mask: Bool[Array, "B T"] | None = None,
        token_positions: Int[Array, "B T"] | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T V"]:
        """The model after `embed`; arguments as at the call."""
        mask = self.mask()
        if token_mask is not None:
            mask &= masks.dense(token_mask[:, None, None, :])
        x = self.dropout(x, deterministic=deterministic)
        for block in self.blocks:
            x = block(
                x,
                mask=mask,
                token_positions=token_positions,
                deterministic=deterministic,
                sow_weights=sow_weights,
            )
        x = self.final_norm(x)
        if self.config.tie_embeddings:
            return self.token_embedding.attend(x)
        return self.unembedding.attend(x)


def _kernel_inits(
    config: config_lib.CausalLMConfig,
) -> tuple[nn.initializers.Initializer, nn.initializers.Initializer]:
    """Initializers of a block's inner kernels, and of those that add to the stream."""
    out_scale = 1 / (2 * config.num_layers)
    return (
        nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
        nn.initializers.variance_scaling(out_scale, "fan_in", "normal"),
    )
