"""RNNsearch translates while it aligns: the network that attention was invented for.

    hⱼ = [→hⱼ ; ←hⱼ]                             a GRU over the source in each direction
    αᵢⱼ ∝ exp(v · tanh(W_a sᵢ₋₁ + U_a hⱼ)),   cᵢ = Σⱼ αᵢⱼ hⱼ
    sᵢ = GRU(sᵢ₋₁, [yᵢ₋₁ ; cᵢ]),   s₀ = tanh(W_s ←h₁)
    p(yᵢ) ∝ exp(W_o maxout(U_o sᵢ + V_o yᵢ₋₁ + C_o cᵢ))

x₁ … are the embedded tokens of the source, y₁ … those of the target. Bahdanau et al.,
2015, arXiv:1409.0473, section 3 and appendix A. The output reads sᵢ, as equation 4
says; the appendix prints sᵢ₋₁ there. Its update gate is 1 - z of `models.recurrent`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import additive, numerics
from models import layers, recurrent


class Encoded(NamedTuple):
    """A source as the decoder reads it.

    Attributes:
      annotations: hⱼ, the states of both directions.
      keys: U_a hⱼ.
      mask: False at padding; None: there is none.
      state: s₀.
    """

    annotations: Float[Array, "B S C"]
    keys: Float[Array, "B S H"]
    mask: Bool[Array, "B S"] | None
    state: Float[Array, "B M"]


class RNNsearch(nn.Module):
    """A bidirectional encoder, additive attention, and a decoder that asks it.

    Attributes:
      source_size: V of the source.
      target_size: V of the target.
      width: E of both embeddings; 620 in the paper.
      state_size: M of each GRU; 1000 in the paper.
      score_width: H of the alignment; 1000 in the paper.
      output_width: pairs of units in the maxout layer; 500 in the paper.
      dtype: of the computation; None: inferred from the parameters.
    """

    source_size: int
    target_size: int
    width: int
    state_size: int
    score_width: int
    output_width: int
    dtype: Any = None

    def setup(self) -> None:
        """Creates the layers; v starts at 0, as in the paper: at the plain mean."""

        def projection(*features: int, use_bias: bool = True) -> layers.Projection:
            return layers.Projection(features, use_bias=use_bias, dtype=self.dtype)

        def embedding(size: int) -> layers.Embedding:
            return layers.Embedding(size, self.width, nn.initializers.normal(0.01))

        self.source_embedding = embedding(self.source_size)
        self.target_embedding = embedding(self.target_size)
        self.forward_gru = recurrent.GRU(self.state_size, dtype=self.dtype)
        self.backward_gru = recurrent.GRU(
            self.state_size, dtype=self.dtype, reverse=True
        )
        self.first_state = projection(self.state_size)
        self.decoder_gru = recurrent.GRU(self.state_size, dtype=self.dtype)
        self.query = projection(self.score_width)
        self.key = projection(self.score_width, use_bias=False)
        self.score_vector = self.param(
            "score_vector", nn.initializers.zeros_init(), (1, self.score_width)
        )
        self.maxout = projection(2, self.output_width)
        self.out = projection(self.target_size)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T_out"],
        *,
        source_mask: Bool[Array, "B S"] | None = None,
        target_mask: Bool[Array, "B T_out"] | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T_out V"]:
        """Scores the next token of the target at every position, told all before it.

        Args:
          source: ids of the sentence to read.
          target: ids y₀ … of the one to write, from a start token on: the true ones,
            whatever the model would have said (teacher forcing).
          source_mask: False marks padding, on either side: it reaches nothing.
          target_mask: the same for the target.
          sow_weights: sow αᵢⱼ [B 1 T S] as 'attention_weights' in 'intermediates'.

        Returns:
          float32 logits (float64 for float64); those at padding mean nothing.

        Raises:
          ValueError: if shapes do not fit.
        """
        encoded = self.encode(source, source_mask)
        logits, _ = self.decode(
            encoded, target, target_mask=target_mask, sow_weights=sow_weights
        )
        return logits

    def encode(
        self, source: Int[Array, "B S"], source_mask: Bool[Array, "B S"] | None = None
    ) -> Encoded:
        """Reads the source once; arguments as at the call."""
        x = self._embed(self.source_embedding, source, source_mask)
        forward, _ = self.forward_gru(x, token_mask=source_mask)
        backward, first = self.backward_gru(x, token_mask=source_mask)
        annotations = jnp.concatenate([forward, backward], axis=-1)
        return Encoded(
            annotations,
            self.key(annotations),
            source_mask,
            jnp.tanh(self.first_state(first)).astype(first.dtype),
        )

    def decode(
        self,
        encoded: Encoded,
        target: Int[Array, "B T_out"],
        state: Float[Array, "B M"] | None = None,
        *,
        target_mask: Bool[Array, "B T_out"] | None = None,
        sow_weights: bool = False,
    ) -> tuple[Float[Array, "B T_out V"], Float[Array, "B M"]]:
        """Writes any number of tokens.

        Args:
          encoded: what `encode` returned.
          target: as at the call.
          state: what an earlier call returned, to continue from; None: s₀.
          target_mask: as at the call.
          sow_weights: as at the call.

        Returns:
          Logits as at the call, and the state after the last token.
        """
        y = self._embed(self.target_embedding, target, target_mask)

        def one(
            self: RNNsearch, state: Array, own: tuple[Array, Array | None]
        ) -> tuple[Array, tuple[Array, Array, Array]]:
            y, real = own
            query = self.query(state)
            context = additive.attention(
                query[:, None, None],
                encoded.keys[:, :, None],
                encoded.annotations[:, :, None],
                self.score_vector,
                key_mask=encoded.mask,
            )[:, 0, 0]
            _, state = self.decoder_gru(
                jnp.concatenate([y, context], axis=-1)[:, None],
                state,
                token_mask=None if real is None else real[:, None],
            )
            return state, (state, context, query)

        last, (states, contexts, queries) = nn.scan(
            one,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )(self, encoded.state if state is None else state, (y, target_mask))
        if sow_weights:
            weights = additive.weights(
                queries[:, :, None],
                encoded.keys[:, :, None],
                self.score_vector,
                key_mask=encoded.mask,
            )
            self.sow("intermediates", "attention_weights", weights)
        units = self.maxout(
            jnp.concatenate([states.astype(y.dtype), y, contexts], axis=-1)
        )
        logits = self.out(jnp.max(units, axis=-2))
        return logits.astype(numerics.accumulation_dtype(logits.dtype)), last

    def _embed(
        self,
        embedding: layers.Embedding,
        tokens: Int[Array, "B T"],
        token_mask: Bool[Array, "B T"] | None,
    ) -> Float[Array, "B T E"]:
        """Vectors of the tokens; 0 at padding, whatever id stands there."""
        x = embedding(tokens)
        if token_mask is not None:
            if token_mask.shape != tokens.shape:
                raise ValueError(
                    f"the mask of the tokens must be {list(tokens.shape)}, "
                    f"got {list(token_mask.shape)}"
                )
            x = jnp.where(token_mask[..., None], x, 0)
        return x if self.dtype is None else x.astype(self.dtype)
