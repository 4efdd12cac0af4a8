"""A layer of multi-head linear attention.

    headₙ  = linear attention(x W_qⁿ, x W_kⁿ, x W_vⁿ) with feature map φ
    output = Σₙ headₙ W_oⁿ

`attention.linear` computes a head: Katharopoulos et al., 2020, arXiv:2006.16236. With
the random features of `attention.random_features` this is a layer of Performer:
Choromanski et al., 2021, arXiv:2009.14794.
"""

from jaxtyping import Array, Bool, Float

from attention import heads, linear
from models import layers


class LinearAttention(layers.Mixer):
    """Causal linear self-attention.

    Attributes:
      num_heads: N, the number of query heads, a divisor of the width E.
      num_kv_heads: K, the number of key/value heads, a divisor of N; None: N.
      feature_map: φ, which maps the last axis of queries and keys.
      use_bias: whether the four projections have biases.
    """

    num_heads: int
    num_kv_heads: int | None = None
    feature_map: linear.FeatureMap = linear.elu_plus_one
    use_bias: bool = True

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Computes linear attention in every head, and projects it to width E.

        Raises:
          ValueError: if N does not divide E, or K not N.
        """
        head_width = heads.head_width(x.shape[-1], self.num_heads)
        num_kv_heads = self.num_kv_heads
        if num_kv_heads is None:
            num_kv_heads = self.num_heads
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
            token_mask=token_mask,
        )
        keep(state)
        return self.project_back(
            "out", y, x.shape[-1], contracted=2, use_bias=self.use_bias
        )
