"""RNNsearch, the encoder-decoder for translation that introduced attention.

    hⱼ = [→hⱼ ; ←hⱼ]                             a GRU over the source in each direction
    αᵢⱼ ∝ exp(v · tanh(W_a sᵢ₋₁ + U_a hⱼ)),   cᵢ = Σⱼ αᵢⱼ hⱼ
    sᵢ = GRU(sᵢ₋₁, [yᵢ₋₁ ; cᵢ]),   s₀ = tanh(W_s ←h₁)
    p(yᵢ) ∝ exp(W_o maxout(U_o sᵢ + V_o yᵢ₋₁ + C_o cᵢ))

x₁, x₂, … are the embedded tokens of the source, which the GRUs of the encoder read, and
y₁, y₂, … those of the target. Bahdanau et al., 2015, arXiv:1409.0473, section 3 and
appendix A. The output layer reads sᵢ, following equation 4; the appendix prints sᵢ₋₁.
The paper's update gate is 1 - z in terms of `models.recurrent`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from attention import additive, numerics
from models import layers, recurrent


class Encoded(NamedTuple):
    """The encoder's output for a batch of source sentences.

    Attributes:
      annotations: hⱼ, the states of both directions, C = 2 M.
      keys: U_a hⱼ, the keys of the attention.
      token_mask: False at padding of the source; None: there is none.
      state: s₀, the decoder's initial state.
    """

    annotations: Float[Array, "B S C"]
    keys: Float[Array, "B S H"]
    token_mask: Bool[Array, "B S"] | None
    state: Float[Array, "B M"]


class RNNsearch(nn.Module):
    """A bidirectional encoder and a decoder, connected by additive attention.

    Attributes:
      source_size: V of the source vocabulary.
      target_size: V of the target vocabulary.
      width: E of both embeddings; 620 in the paper.
      state_size: M of each GRU; 1000 in the paper.
      score_width: H, the width of queries and keys; 1000 in the paper.
      output_width: number of pairs of units in the maxout layer; 500 in the paper.
      dtype: dtype of the computation; None: inferred from the parameters.
    """

    source_size: int
    target_size: int
    width: int
    state_size: int
    score_width: int
    output_width: int
    dtype: Any = None

    def setup(self) -> None:
        """Creates the layers.

        The score vector v is initialized to 0, following the paper's appendix B.1, so
        that attention starts as the plain mean of the annotations.
        """

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
        """Scores the next target token at every position, with teacher forcing.

        Args:
          source: ids of the source sentence.
          target: ids y₀, y₁, … of the true target sentence, y₀ being a start token.
          source_mask: the token mask of the source; False marks padding, on either
            side, which has no effect on the logits.
          target_mask: the token mask of the target; False marks padding, on either
            side, which has no effect on the logits of real tokens.
          sow_weights: whether to sow αᵢⱼ [B 1 T_out S] as 'attention_weights' in
            'intermediates'.

        Returns:
          float32 logits (float64 for float64); those at padding are arbitrary.

        Raises:
          ValueError: if shapes do not fit.
        """
        encoded = self.encode(source, source_mask)
        logits, _ = self.decode(
            encoded, target, token_mask=target_mask, sow_weights=sow_weights
        )
        return logits

    def encode(
        self, source: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None = None
    ) -> Encoded:
        """Encodes the source sentences.

        Args:
          source: ids of the source sentences.
          token_mask: False marks padding, on either side; None: there is none.

        Returns:
          What `decode` needs of the source.

        Raises:
          ValueError: if shapes do not fit.
        """
        x = self._embed(self.source_embedding, source, token_mask)
        forward, _ = self.forward_gru(x, token_mask=token_mask)
        backward, first = self.backward_gru(x, token_mask=token_mask)
        annotations = jnp.concatenate([forward, backward], axis=-1)
        return Encoded(
            annotations,
            self.key(annotations),
            token_mask,
            jnp.tanh(self.first_state(first)).astype(first.dtype),
        )

    def decode(
        self,
        encoded: Encoded,
        target: Int[Array, "B T_out"],
        state: Float[Array, "B M"] | None = None,
        *,
        token_mask: Bool[Array, "B T_out"] | None = None,
        sow_weights: bool = False,
    ) -> tuple[Float[Array, "B T_out V"], Float[Array, "B M"]]:
        """Scores the token after each of the next target tokens.

        Args:
          encoded: the result of `encode`.
          target: ids of the next target tokens, of any number T_out; the first ids of a
            sentence begin with the start token y₀.
          state: the state that `decode` returned for the tokens before; None: s₀.
          token_mask: False marks padding, on either side, which changes no state.
          sow_weights: whether to sow αᵢⱼ [B 1 T_out S] as 'attention_weights' in
            'intermediates'.

        Returns:
          float32 logits (float64 for float64), arbitrary at padding; and the state
          after the last token.

        Raises:
          ValueError: if shapes do not fit.
        """
        y = self._embed(self.target_embedding, target, token_mask)

        def one(
            self: RNNsearch, state: Array, token: tuple[Array, Array | None]
        ) -> tuple[Array, tuple[Array, Array, Array]]:
            y, real = token
            query = self.query(state)
            context = additive.attention(
                query[:, None, None],
                encoded.keys[:, :, None],
                encoded.annotations[:, :, None],
                self.score_vector,
                token_mask=encoded.token_mask,
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
        )(self, encoded.state if state is None else state, (y, token_mask))
        if sow_weights:
            weights = additive.weights(
                queries[:, :, None],
                encoded.keys[:, :, None],
                self.score_vector,
                token_mask=encoded.token_mask,
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
        """Embeds the tokens; 0 at padding, whatever its ids are."""
        x = embedding(tokens)
        if token_mask is not None:
            if token_mask.shape != tokens.shape:
                raise ValueError(
                    f"the mask of the tokens must be {list(tokens.shape)}, "
                    f"got {list(token_mask.shape)}"
                )
            x = jnp.where(token_mask[..., None], x, 0)
        return x if self.dtype is None else x.astype(self.dtype)
