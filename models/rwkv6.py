"""RWKV-6's time mixing, whose states are matrices and whose decays depend on the data.

    lerp_μ(x)ₜ   = xₜ + (xₜ₋₁ - xₜ) μ
    lora_□(x)    = λ_□ + tanh(x A_□) B_□
    ddlerp_□(x)ₜ = xₜ + (xₜ₋₁ - xₜ) lora_□(lerp_μ(x)ₜ)
    r, k, v, g   = ddlerp_□(x) W_□                             □ each of r, k, v, g
    log w        = -exp(lora_d(ddlerp_w(x)))
    output       = W_o (silu(g) · norm(wkv(r, k, v, w, u)))    norm within each head

Peng et al., 2024, arXiv:2404.05892, section 4.2; the initial values follow the authors'
implementation. `attention.rwkv6` computes wkv.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from attention import heads, numerics, rwkv6
from models import layers, rwkv


class TimeMixing(layers.Mixer):
    """Mixes tokens by a decaying sum of key-value products in every head.

    Attributes:
      num_heads: N, a divisor of the width E.
      mix_rank: rank of the maps lora_□ that compute how a token mixes with the one
        before it.
      decay_rank: rank of the map lora_d that computes the decays.
      layer: index of the layer, from 0; the initial decays and mixes depend on it.
      num_layers: L, the number of layers of the model.
      norm_epsilon: epsilon of the norm within heads, added to the variance.

    Reference: Peng et al., 2024, arXiv:2404.05892, section 4.2.
    """

    num_heads: int
    mix_rank: int = 32
    decay_rank: int = 64
    layer: int = 0
    num_layers: int = 1
    norm_epsilon: float = 64e-5

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Shifts the tokens, computes wkv, normalizes, gates and projects it."""
        batch, _, width = x.shape
        deep, early = rwkv.depth(self.layer, self.num_layers)
        x, before = rwkv.TokenShift(decode=self.decode, name="shift")(x, token_mask)
        back = before - x
        weight = self.param("mix", _complement(early), (width,), jnp.float32)
        first = x + back * weight.astype(x.dtype)[None, None]

        def mixed(name: str, exponent: float, plus: float = 0.0) -> Array:
            init = _complement(exponent, plus)
            return x + back * LoRA(self.mix_rank, init, self.dtype, name=name)(first)

        receptance = self.project(
            "receptance", mixed("mix_receptance", early / 2), width
        )
        key = self.project("key", mixed("mix_key", early), width)
        value = self.project("value", mixed("mix_value", early, 0.3 * deep), width)
        gate = self.project("gate", mixed("mix_gate", early / 2), width)
        init = rwkv.log_rates(-6, 5, deep)
        log_rate = LoRA(self.decay_rank, init, self.dtype, name="decay")(
            mixed("mix_decay", early)
        )
        bonus = self.param("bonus", _bonus(deep), (width,), jnp.float32)
        dtype = numerics.accumulation_dtype(value.dtype)
        size = heads.head_width(width, self.num_heads)
        shape = batch, self.num_heads, size, size
        state, keep = layers.carried(self, "state", lambda: jnp.zeros(shape, dtype))
        after, x = rwkv6.wkv(
            heads.split(receptance, self.num_heads),
            heads.split(key, self.num_heads),
            heads.split(value, self.num_heads),
            heads.split(-jnp.exp(log_rate.astype(dtype)), self.num_heads),
            heads.split(bonus, self.num_heads),
            token_mask=token_mask,
            state=state,
        )
        keep(after)
        x = nn.LayerNorm(
            self.norm_epsilon, feature_axes=(-2, -1), dtype=self.dtype, name="norm"
        )(x)
        return self.project_back("output", nn.silu(gate) * heads.merge(x), width)


class LoRA(nn.Module):
    """A vector plus a low-rank function of the token: λ + tanh(x A) B.

    Attributes:
      rank: number of columns of A and rows of B.
      offset_init: initializer of λ [E].
      dtype: dtype of the computation; None: inferred from x and the parameters.
    """

    rank: int
    offset_init: nn.initializers.Initializer
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Computes λ + tanh(x A) B, which is λ at initialization, where A = 0."""
        inner = layers.Projection(
            features=(self.rank,),
            use_bias=False,
            kernel_init=nn.initializers.zeros_init(),
            dtype=self.dtype,
            name="down",
        )(x)
        return layers.Projection(
            features=x.shape[-1:],
            kernel_init=_small,
            bias_init=self.offset_init,
            dtype=self.dtype,
            name="up",
        )(nn.tanh(inner))


def _complement(exponent: float, plus: float = 0.0) -> nn.initializers.Initializer:
    """An initializer of 1 - μ, the weight of the previous token, with RWKV-4's μ."""
    init = rwkv.powers(exponent, plus)

    def complement(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return 1 - init(rng, shape, dtype)

    return complement


def _small(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.uniform(rng, shape, dtype, -0.01, 0.01)


def _bonus(deep: float) -> nn.initializers.Initializer:
    """An initializer of the bonus u, which is larger in deeper layers.

    It falls over the channels from `deep` to 0, plus 0.1, 0 or -0.1, so that
    neighbouring channels differ.
    """

    def init(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del rng
        i = jnp.arange(shape[0])
        zigzag = 0.1 * ((i + 1) % 3 - 1).astype(dtype)
        return deep * (1 - i.astype(dtype) / max(shape[0] - 1, 1)) + zigzag

    return init
