"""How a model is told where its tokens stand: one literal table, from names to schemes.

A scheme acts at one point of the model, and is None at the remaining two:

    embedding          x ← x + p(position)                    learned, sinusoidal
    queries and keys   q, k ← R(position) q, R(position) k    rotary
    scores             s[i, j] ← s[i, j] - slope |i - j|      alibi

The second and the third act in layers of attention only. `attention.positions` and
`attention.score_mods` have the functions and their papers. A new scheme is one row
here: the names that configurations and `multihead.MultiHeadAttention` accept derive
from the table.
"""

import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from attention import positions, score_mods, softmax
from models import layers


class LearnedPositions(layers.Embedding):
    """A table of vectors, one for each position up to the model's context."""

    def __call__(self, ids: Int[Array, "*B T"]) -> Float[Array, "*B T E"]:
        """Looks the vectors of positions up.

        Raises:
          ValueError: if there are more tokens than vectors.
        """
        if ids.shape[-1] > self.size:
            raise ValueError(
                f"{ids.shape[-1]} tokens, but positions are learned for "
                f"context={self.size} only"
            )
        return super().__call__(ids)


class SinusoidalPositions(nn.Module):
    """Sines and cosines of every position; no parameters.

    Attributes:
      width: E.
    """

    width: int

    def __call__(self, ids: Int[Array, "*B T"]) -> Float[Array, "*B T E"]:
        """Computes the vectors of positions."""
        return positions.sinusoidal(ids, self.width)


class Scheme(NamedTuple):
    """A row of the table.

    Attributes:
      check: raises ValueError if the scheme does not fit the width E of a model and its
        number N of query heads.
      embedding: makes, for a context T and a width E, the module from positions [*B T]
        to the vectors [*B T E] that are added to those of the tokens.
      rotate: changes queries or keys [*B T N H] by their positions [*B T].
      score_mod: makes, for N query heads and for the positions of queries and of keys
        ([T], [B T], or None for 0 … T-1), what changes the scores.
    """

    check: Callable[[int, int], None] = lambda width, num_heads: None
    embedding: Callable[[int, int], nn.Module] | None = None
    rotate: Callable[[Array, Array], Array] | None = None
    score_mod: Callable[[int, Array | None, Array | None], softmax.ScoreMod] | None = (
        None
    )

    @property
    def acts_in_attention(self) -> bool:
        """Whether the scheme changes queries, keys or scores."""
        return self.rotate is not None or self.score_mod is not None


def _learned(context: int, width: int) -> nn.Module:
    return LearnedPositions(context, width, nn.initializers.normal(0.02))


def _sinusoidal(context: int, width: int) -> nn.Module:
    del context
    return SinusoidalPositions(width)


def _alibi(
    num_heads: int, query_positions: Array | None, key_positions: Array | None
) -> softmax.ScoreMod:
    slopes = jnp.asarray(score_mods.alibi_slopes(num_heads))
    return score_mods.alibi(slopes, query_positions, key_positions)


def _even_width(width: int, num_heads: int) -> None:
    del num_heads
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width, got width={width}")


def _even_head_width(width: int, num_heads: int) -> None:
    if width // num_heads % 2:
        raise ValueError(
            "rotary positions need an even head width, got width / num_heads = "
            f"{width} / {num_heads} = {width // num_heads}"
        )


SCHEMES: Mapping[str, Scheme] = types.MappingProxyType(
    {
        "learned": Scheme(embedding=_learned),
        "sinusoidal": Scheme(embedding=_sinusoidal, check=_even_width),
        "rotary": Scheme(rotate=positions.rotary, check=_even_head_width),
        "alibi": Scheme(score_mod=_alibi),
        "none": Scheme(),
    }
)
# The schemes that layers of attention apply, not the model's embedding.
IN_ATTENTION = tuple(
    name for name, scheme in SCHEMES.items() if scheme.acts_in_attention
)
