"""Multi-head attention: project, attend in every head, project back.

    headₙ  = attention(x_q W_qⁿ, x_k W_kⁿ, x_v W_vⁿ)
    output = Σₙ headₙ W_oⁿ

Vaswani et al., 2017, arXiv:1706.03762. Parameters, constructor and call are those of
`flax.linen.MultiHeadDotProductAttention`, so a checkpoint of one loads into the other.
This module adds grouped key/value heads, rotary and ALiBi positions, lazy masks, and
every implementation of `attention.dot_product_attention`.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import dtypes
from jax import lax
from jaxtyping import Array, Float, Int

import attention
from attention import heads, masks, softmax
from models import layers, positional


class MultiHeadAttention(nn.Module):
    """Multi-head, grouped or multi-query attention; self-attention or cross-attention.

    Attributes:
      num_heads: N, the number of query heads.
      dtype: dtype of the computation; None: inferred from inputs and parameters.
      param_dtype: dtype of the parameters.
      qkv_features: N · H, the width of all query heads together; None: the width of
        `inputs_q`.
      out_features: width of the output; None: the width of `inputs_q`.
      broadcast_dropout: whether to drop the same weights in every row and head, which
        is flax's default.
      dropout_rate: probability of dropping an attention weight.
      deterministic: True disables dropout; None: the call decides.
      precision: precision of the matrix products.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; None: `kernel_init`.
      bias_init: initializer of the biases.
      out_bias_init: initializer of the output's bias; None: `bias_init`.
      use_bias: whether the four projections have biases.
      normalize_qk: whether to apply a LayerNorm to queries and keys (Dehghani et al.,
        2023, arXiv:2302.05442).
      force_fp32_for_softmax: whether to sow the weights in float32 rather than in the
        dtype of the computation; the softmax is computed in float32 or float64 in
        either case.
      num_kv_heads: K, the number of key/value heads, a divisor of N; None: N.
      position_encoding: 'rotary' rotates queries and keys by their positions, 'alibi'
        lowers scores in proportion to the distance, 'none' does nothing.
      scale: multiplies q·k; None: 1/√H.
      implementation: a name of `attention.IMPLEMENTATIONS`; None: chosen by platform,
        sizes and arguments.
    """

    num_heads: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: lax.PrecisionLike = None
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    out_bias_init: nn.initializers.Initializer | None = None
    use_bias: bool = True
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    num_kv_heads: int | None = None
    position_encoding: str = "none"
    scale: float | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*B T E"],
        inputs_k: Float[Array, "*B S E_k"] | None = None,
        inputs_v: Float[Array, "*B S E_v"] | None = None,
        *,
        inputs_kv: Float[Array, "*B S E_k"] | None = None,
        mask: masks.Mask | Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
        query_positions: Int[Array, "*#B T"] | None = None,
        key_positions: Int[Array, "*#B S"] | None = None,
    ) -> Float[Array, "*B T E_out"]:
        """Computes Σₙ attention(x_q W_qⁿ, x_k W_kⁿ, x_v W_vⁿ) W_oⁿ.

        Args:
          inputs_q: x_q, the input of the query projection.
          inputs_k: x_k, the input of the key projection; None: `inputs_q`, which is
            self-attention.
          inputs_v: x_v, the input of the value projection; None: `inputs_k`.
          inputs_kv: flax's deprecated argument for `inputs_k` and `inputs_v` at once.
          mask: True = may attend: a `masks.Mask`, whose arrays index the flattened
            batch, or an array that broadcasts from the right against [*B N T S] and is
            boolean or, following flax, of the numbers 0 and 1.
          deterministic: True disables dropout; None: the attribute decides. With a
            dropout rate above 0 exactly one of the two must be set.
          dropout_rng: a random key; None: the 'dropout' stream, if there is dropout.
          sow_weights: whether to sow the weights [*B N T S], before dropout, as
            'attention_weights' in the 'intermediates' collection.
          query_positions: positions of the queries, for 'rotary' and 'alibi'; None:
            0 … T-1.
          key_positions: positions of the keys, for 'rotary' and 'alibi'; None: the
            query positions in self-attention, else 0 … S-1.

        Returns:
          [*B T out_features].

        Raises:
          TypeError: if the mask is an array of other numbers than 0 and 1.
          ValueError: if widths, heads or shapes do not fit, or `deterministic` is
            needed and set nowhere or twice.
        """
        if inputs_k is None and inputs_kv is None and key_positions is None:
            key_positions = query_positions
        inputs_k, inputs_v = _key_and_value_inputs(
            inputs_q, inputs_k, inputs_v, inputs_kv
        )
        num_kv_heads = self.num_kv_heads
        if num_kv_heads is None:
            num_kv_heads = self.num_heads
        qkv_features = self.qkv_features or inputs_q.shape[-1]
        head_width = heads.head_width(qkv_features, self.num_heads)
        heads.group_size(self.num_heads, num_kv_heads)

        def project(name: str, x: Array, num_heads: int) -> Array:
            return layers.Projection(
                features=(num_heads, head_width),
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                name=name,
            )(x)

        query = project("query", inputs_q, self.num_heads)
        key = project("key", inputs_k, num_kv_heads)
        value = project("value", inputs_v, num_kv_heads)
        if self.normalize_qk:
            query, key = (
                nn.LayerNorm(
                    use_bias=False,
                    dtype=self.dtype,
                    param_dtype=self.param_dtype,
                    name=name,
                )(x)
                for name, x in (("query_ln", query), ("key_ln", key))
            )
        query, key, value = dtypes.promote_dtype(query, key, value, dtype=self.dtype)
        query, key, score_mod = _with_positions(
            self.position_encoding, query, key, query_positions, key_positions
        )
        mask = _as_mask(mask)
        if sow_weights:
            weights = attention.attention_weights(
                query,
                key,
                mask=mask,
                scale=self.scale,
                score_mod=score_mod,
                precision=self.precision,
            )
            if not self.force_fp32_for_softmax:
                weights = weights.astype(query.dtype)
            self.sow("intermediates", "attention_weights", weights)
        dropout_rate = 0.0
        if self.dropout_rate > 0 and not nn.merge_param(
            "deterministic", self.deterministic, deterministic
        ):
            dropout_rate = self.dropout_rate
            if dropout_rng is None:
                dropout_rng = self.make_rng("dropout")
        x = attention.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=self.scale,
            score_mod=score_mod,
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
            broadcast_dropout=self.broadcast_dropout,
            precision=self.precision,
            implementation=self.implementation,
        )
        return layers.Projection(
            features=(self.out_features or inputs_q.shape[-1],),
            contracted=2,
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            name="out",
        )(x)


def _key_and_value_inputs(
    inputs_q: Array,
    inputs_k: Array | None,
    inputs_v: Array | None,
    inputs_kv: Array | None,
) -> tuple[Array, Array]:
    """Resolves the inputs of the key and value projections by flax's rules."""
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError(
                "If either `inputs_k` or `inputs_v` is not None, `inputs_kv` must be "
                "None."
            )
        warnings.warn(
            "The inputs_kv arg will be deprecated soon. Use inputs_k and inputs_v.",
            DeprecationWarning,
            stacklevel=3,
        )
        return inputs_kv, inputs_kv
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError("`inputs_k` cannot be None if `inputs_v` is not None.")
        inputs_k = inputs_q
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def _with_positions(
    encoding: str,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    query_positions: Int[Array, "*#B T"] | None,
    key_positions: Int[Array, "*#B S"] | None,
) -> tuple[Array, Array, softmax.ScoreMod | None]:
    """Rotates queries and keys, or makes a score modifier, by their positions."""
    known = (*positional.IN_ATTENTION, "none")
    if encoding not in known:
        raise ValueError(
            f"position_encoding must be one of {', '.join(known)}, got {encoding!r}"
        )
    scheme = positional.SCHEMES[encoding]
    score_mod = None
    if scheme.score_mod is not None:
        # A score modifier receives the index of the row in the flattened batch.
        flat = [
            p if p is None or p.ndim == 1 else p.reshape(-1, p.shape[-1])
            for p in (query_positions, key_positions)
        ]
        score_mod = scheme.score_mod(query.shape[-2], *flat)
    if scheme.rotate is not None:
        if query_positions is None:
            query_positions = jnp.arange(query.shape[-3], dtype=jnp.int32)
        if key_positions is None:
            key_positions = jnp.arange(key.shape[-3], dtype=jnp.int32)
        query = scheme.rotate(query, query_positions)
        key = scheme.rotate(key, key_positions)
    return query, key, score_mod


def _as_mask(mask: masks.Mask | Array | None) -> masks.Mask | Array | None:
    """Converts flax's masks of 0 and 1 to booleans; refuses other numbers."""
    if mask is None or isinstance(mask, masks.Mask) or mask.dtype == jnp.bool_:
        return mask
    if not isinstance(mask, jax.core.Tracer):
        numbers = np.asarray(mask)
        if not np.isin(numbers, (0, 1)).all():
            raise TypeError(
                f"mask must be boolean, or of the numbers 0 and 1 (True = may attend); "
                f"got {mask.dtype} with other values: an additive bias is no mask"
            )
    return mask != 0
