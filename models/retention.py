"""A layer of retention: project, retain in every head, normalize, gate, project back.

    output = (swish(x W_g) ⊙ RMSNorm(retention(x W_q, x W_k, x W_v))) W_o

the norm over each head by itself. Sun et al., 2023, arXiv:2307.08621, equation 8,
without its rotation of queries and keys: the decay tells positions apart.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import heads, numerics, retention
from models import layers


class Retention(nn.Module):
    """Causal multi-scale retention.

    Attributes:
      num_heads: N, each with a decay of its own.
      use_bias: whether the projections have biases.
      kernel_init: initializer of the projections of the input.
      out_kernel_init: initializer of the projection back.
      dtype: of the computation; None: inferred from inputs and parameters. States are
        never narrower than float32.
      decode: continue from the state in the 'cache' collection, and leave the last one
        there; any number of tokens at a time. Initializing leaves it 0.
    """

    num_heads: int
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: Any = None
    decode: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T E"],
        *,
        deterministic: bool = True,
        token_mask: Bool[Array, "B T"] | None = None,
        token_positions: Int[Array, "B T"] | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T E"]:
        """Mixes along T; the arguments are those of `models.mixers`.

        Raises:
          ValueError: if heads or shapes do not fit.
        """
        del deterministic, token_positions, sow_weights
        features = self.num_heads, heads.head_width(x.shape[-1], self.num_heads)
        query, key, value, gate = (
            layers.Projection(
                features=features,
                use_bias=self.use_bias,
                kernel_init=self.kernel_init,
                dtype=self.dtype,
                name=name,
            )(x)
            for name in ("query", "key", "value", "gate")
        )
        shape = x.shape[0], *features, features[1]
        dtype = numerics.accumulation_dtype(value.dtype)
        state, keep = layers.carried(self, "state", lambda: jnp.zeros(shape, dtype))
        decays = retention.log_decays(self.num_heads)
        state, y = retention.attention(
            query, key, value, decays, token_mask=token_mask, state=state
        )
        keep(state)
        y = nn.RMSNorm(dtype=self.dtype, name="norm")(y)
        return layers.Projection(
            features=(x.shape[-1],),
            contracted=2,
            use_bias=self.use_bias,
            kernel_init=self.out_kernel_init,
            dtype=self.dtype,
            name="out",
        )(nn.silu(gate) * y)
