"""A layer of linear attention: project, attend by features in every head, project back.

    headₙ  = linear attention(x W_qⁿ, x W_kⁿ, x W_vⁿ) under φ
    output = Σₙ headₙ W_oⁿ

See `attention.linear` for the mechanism; with the random features of
`attention.random_features` this is a layer of Performer.
"""

from typing import Any

from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import heads, linear
from models import layers


class LinearAttention(nn.Module):
    """Causal linear self-attention.

    Attributes:
      num_heads: N query heads.
      num_kv_heads: K key/value heads, a divisor of N; None: N.
      feature_map: φ, of the last axis of queries and keys.
      use_bias: whether the four projections have biases.
      kernel_init: initializer of the projections to queries, keys and values.
      out_kernel_init: initializer of the projection back.
      dtype: of the computation; None: inferred from inputs and parameters. Features and
        sums are never narrower than float32.
      decode: continue from the state in the 'cache' collection, and leave the last one
        there; any number of tokens at a time. Initializing leaves it empty.
    """

    num_heads: int
    num_kv_heads: int | None = None
    feature_map: linear.FeatureMap = linear.elu_plus_one
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
        head_width = heads.head_width(x.shape[-1], self.num_heads)

        def project(name: str, num_heads: int) -> Array:
            return layers.Projection(
                features=(num_heads, head_width),
                use_bias=self.use_bias,
                kernel_init=self.kernel_init,
                dtype=self.dtype,
                name=name,
            )(x)

        num_kv_heads = self.num_kv_heads or self.num_heads
        query = project("query", self.num_heads)
        key, value = (project(name, num_kv_heads) for name in ("key", "value"))
        empty = linear.empty(key, value, feature_map=self.feature_map)
        state, keep = layers.carried(self, "state", lambda: empty)
        state, y = linear.extend(
            empty if state is None else state,
            query,
            key,
            value,
            feature_map=self.feature_map,
            key_mask=token_mask,
        )
        keep(state)
        return layers.Projection(
            features=(x.shape[-1],),
            contracted=2,
            use_bias=self.use_bias,
            kernel_init=self.out_kernel_init,
            dtype=self.dtype,
            name="out",
        )(y)
