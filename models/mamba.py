"""Mamba: a gated selective scan, which is the only layer of a block.

    x, z = W_in input
    x    = silu(conv(x))                          depthwise, causal, a few tokens wide
    δ, B, C = W_x x,   Δ = softplus(W_Δ δ + b_Δ)
    output = W_out (scan(x, Δ, A, B, C, D) · silu(z)),   A = -exp(A_log)

Gu and Dao, 2023, arXiv:2312.00752, section 3.4; the initial values follow the authors'
implementation. `attention.mamba` computes the scan.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import convolution, mamba, numerics
from models import layers

# The range of initial step sizes Δ, whose logarithm is uniform.
_STEP_SIZES = (0.001, 0.1)


class MambaMixer(layers.Mixer):
    """Mixes tokens by a gated selective scan: W_out (scan(x, …) · silu(z)).

    Attributes:
      state_size: M, the number of states of each channel.
      expand: ratio of the number of channels of the scan to the width E.
      conv_width: W, the number of tokens that the convolution sees.
      step_rank: width of δ; None: E / 16, rounded up.
      use_bias: whether W_in and W_out have biases.
      use_conv_bias: whether the convolution has a bias.

    Reference: Gu and Dao, 2023, arXiv:2312.00752, section 3.4.
    """

    state_size: int = 16
    expand: int = 2
    conv_width: int = 4
    step_rank: int | None = None
    use_bias: bool = False
    use_conv_bias: bool = True

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Convolves the tokens, scans, gates and projects to width E."""
        batch, _, width = x.shape
        channels, size = self.expand * width, self.state_size
        rank = self.step_rank or math.ceil(width / 16)
        if token_mask is not None:
            x = jnp.where(token_mask[..., None], x, 0)
        projected = self.project("in_proj", x, 2 * channels, use_bias=self.use_bias)
        x, gate = jnp.split(projected, 2, axis=-1)

        kernel = self.param(
            "conv_kernel", _conv_init, (self.conv_width, channels), jnp.float32
        )
        conv_bias = None
        if self.use_conv_bias:
            zeros = nn.initializers.zeros_init()
            conv_bias = self.param("conv_bias", zeros, (channels,), jnp.float32)
        log_rates = self.param("A_log", _log_rates, (channels, size), jnp.float32)
        ones = nn.initializers.ones_init()
        D = self.param("D", ones, (channels,), jnp.float32)

        dtype = numerics.accumulation_dtype(x.dtype)
        shape = batch, self.conv_width - 1, channels
        line, keep_line = layers.carried(
            self, "tokens", lambda: jnp.zeros_like(x, shape=shape)
        )
        state, keep_state = layers.carried(
            self, "state", lambda: jnp.zeros((batch, size, channels), dtype)
        )
        last, x = convolution.depthwise(
            x,
            kernel,
            conv_bias,
            token_mask=token_mask,
            state=line,
        )
        x = nn.silu(x)
        parts = self.project("x_proj", x, rank + 2 * size)
        step_size, B, C = jnp.split(parts, [rank, rank + size], axis=-1)
        step_size = layers.Projection(
            features=(channels,),
            kernel_init=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
            bias_init=_step_bias,
            dtype=self.dtype,
            name="dt_proj",
        )(step_size)
        after, x = mamba.selective_scan(
            x,
            nn.softplus(step_size.astype(dtype)),
            -jnp.exp(log_rates),
            B,
            C,
            D,
            token_mask=token_mask,
            state=state,
        )
        keep_line(last)
        keep_state(after)
        x *= nn.silu(gate)
        return self.project_back("out_proj", x, width, use_bias=self.use_bias)


class MambaLM(nn.Module):
    """A language model whose only layers are Mamba mixers.

        x ← embed(tokens)
        x ← x + mixer(norm(x))                     in L blocks
        logits = norm(x) · unembeddingᵀ

    Attributes:
      vocab_size: V, the number of token ids.
      width: E, the width of the residual stream.
      num_layers: L, the number of blocks.
      state_size: M, the number of states of each channel.
      expand: ratio of the number of channels of the scan to the width E.
      conv_width: W, the number of tokens that the convolution of a mixer sees.
      step_rank: width of δ; None: E / 16, rounded up.
      use_bias: whether W_in and W_out have biases.
      use_conv_bias: whether the convolution has a bias.
      norm_epsilon: epsilon of the RMSNorms, added to the mean square.
      tie_embeddings: whether the output layer is the transposed embedding.
      dtype: dtype of the mixers; the residual stream is in float32.
      decode: whether to continue from the state in the 'cache' collection, and to store
        the last state there.

    Reference: Gu and Dao, 2023, arXiv:2312.00752, section 3.4.
    """

    vocab_size: int
    width: int
    num_layers: int
    state_size: int = 16
    expand: int = 2
    conv_width: int = 4
    step_rank: int | None = None
    use_bias: bool = False
    use_conv_bias: bool = True
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = True
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
        embedding = layers.Embedding(
            self.vocab_size, self.width, init, name="token_embedding"
        )
        x = embedding(tokens)
        for i in range(self.num_layers):
            h = nn.RMSNorm(self.norm_epsilon, dtype=self.dtype, name=f"norm_{i}")(x)
            h = MambaMixer(
                state_size=self.state_size,
                expand=self.expand,
                conv_width=self.conv_width,
                step_rank=self.step_rank,
                use_bias=self.use_bias,
                use_conv_bias=self.use_conv_bias,
                dtype=self.dtype,
                decode=self.decode,
                name=f"mixer_{i}",
            )(h, token_mask=token_mask)
            x += h.astype(x.dtype)
        x = nn.RMSNorm(self.norm_epsilon, dtype=self.dtype, name="final_norm")(x)
        if self.tie_embeddings:
            return embedding.attend(x)
        return layers.Embedding(
            self.vocab_size, self.width, init, name="unembedding"
        ).attend(x)


# PyTorch's default for a depthwise convolution, whose fan-in is its width W.
_conv_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def _log_rates(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Initializes A to -1, -2, …, -M in every channel (S4D-Real), as log(-A)."""
    del rng
    rates = jnp.arange(1, shape[1] + 1, dtype=dtype)
    return jnp.broadcast_to(jnp.log(rates)[None], shape)


def _step_bias(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Initializes b_Δ to softplus⁻¹(Δ), where log Δ is uniform in the range above."""
    low, high = (math.log(size) for size in _STEP_SIZES)
    sizes = jnp.exp(jax.random.uniform(rng, shape, dtype, low, high))
    return sizes + jnp.log(-jnp.expm1(-sizes))
