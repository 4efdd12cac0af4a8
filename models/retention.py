"""A layer of gated multi-scale retention.

    output = (swish(x W_g) ⊙ RMSNorm(retention(x W_q, x W_k, x W_v))) W_o

where the norm is taken within each head. Sun et al., 2023, arXiv:2307.08621, equation
8, without the rotation of queries and keys: the decay already depends on the distance.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from attention import heads, numerics, retention
from models import layers


class Retention(layers.Mixer):
    """Causal multi-scale retention.

    Attributes:
      num_heads: N, the number of heads; head n has the decay 1 - 2^(-5-n).
      use_bias: whether the projections have biases.
    """

    num_heads: int
    use_bias: bool = True

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Computes retention in every head, normalizes, gates and projects it.

        Raises:
          ValueError: if N does not divide E.
        """
        features = self.num_heads, heads.head_width(x.shape[-1], self.num_heads)
        query, key, value, gate = (
            self.project(name, x, *features, use_bias=self.use_bias)
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
        y *= nn.silu(gate)
        return self.project_back(
            "out", y, x.shape[-1], contracted=2, use_bias=self.use_bias
        )
