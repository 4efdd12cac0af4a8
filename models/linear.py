"""A layer of linear attention: project, attend by features in every head, project back.

    headₙ  = linear attention(x W_qⁿ, x W_kⁿ, x W_vⁿ) under φ
    output = Σₙ headₙ W_oⁿ

See `attention.linear` for the mechanism; with the random features of
`attention.random_features` this is a layer of Performer.
"""

from jaxtyping import Array, Bool, Float

from attention import heads, linear
from models import layers


class LinearAttention(layers.Mixer):
    """Causal linear self-attention.

    Attributes:
      num_heads: N query heads.
      num_kv_heads: K key/value heads, a divisor of N; None: N.
      feature_map: φ, of the last axis of queries and keys.
      use_bias: whether the four projections have biases.
    """

    num_heads: int
    num_kv_heads: int | None = None
    feature_map: linear.FeatureMap = linear.elu_plus_one
    use_bias: bool = True

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Attends by features; ValueError if the heads do not divide the width."""
        head_width = heads.head_width(x.shape[-1], self.num_heads)
        num_kv_heads = self.num_kv_heads or self.num_heads
        query, key, value = (
            self.project(name, x, num_heads, head_width, use_bias=self.use_bias)
            for name, num_heads in (
                ("query", self.num_heads),
                ("key", num_kv_heads),
                ("value", num_kv_heads),
            )
        )
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
        return self.project_back(
            "out", y, x.shape[-1], contracted=2, use_bias=self.use_bias
        )
