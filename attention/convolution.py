"""The short causal depthwise convolution, and the shift by one token.

    yₜ = bias + Σ_w kernel_w x_{t-W+1+w}       every channel by itself, w = 0 … W-1
    shift(x)ₜ = xₜ₋₁

Of earlier tokens a layer needs the last W - 1 only: they are the state with which it
continues. Padding is no token: the one before a token is the last real one.

Gu and Dao, 2023, arXiv:2312.00752, section 3.4 (the convolution in Mamba); Peng et
al., 2023, arXiv:2305.13048, section 3.1.1 (token shift in RWKV).
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attention import checks, numerics, recurrence


@jax.named_scope("depthwise_convolution")
def depthwise(
    x: Float[ArrayLike, "B T E"],
    kernel: Float[ArrayLike, "W E"],
    bias: Float[ArrayLike, "E"] | None = None,
    *,
    token_mask: Bool[ArrayLike, "B T"] | None = None,
    state: Float[ArrayLike, "B W-1 E"] | None = None,
) -> tuple[Float[Array, "B W-1 E"], Float[Array, "B T E"]]:
    """Convolves every channel with its own kernel, over the present and the past.

    Args:
      x: tokens.
      kernel: its last row meets the present token, row W - 1 - i the i-th before it.
      bias: added to every token.
      token_mask: True = real; padding on any side.
      state: the W - 1 tokens before; None: zeros.

    Returns:
      The state to continue from, and y in the dtype of x, 0 at padding. Sums are in
      float32 at least.

    Raises:
      ValueError: if shapes do not fit.
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    if kernel.ndim != 2 or not len(kernel):
        raise ValueError(f"kernel must be [W E], W > 0, got {list(kernel.shape)}")
    state, taps = _taps(x, len(kernel), token_mask, state)
    dtype = numerics.accumulation_dtype(x.dtype)
    checks.shape("kernel", kernel, (len(kernel), x.shape[-1]))
    rows = kernel.astype(dtype)[:, None, None]
    terms = [row * tap.astype(dtype) for row, tap in zip(rows, taps, strict=True)]
    y = functools.reduce(operator.add, terms)
    if bias is not None:
        bias = jnp.asarray(bias, dtype)
        checks.shape("bias", bias, x.shape[-1:])
        y += bias[None, None]
    return state, checks.only_real(y, token_mask, 0).astype(x.dtype)


@jax.named_scope("token_shift")
def shift(
    x: Float[ArrayLike, "B T E"],
    *,
    token_mask: Bool[ArrayLike, "B T"] | None = None,
    state: Float[ArrayLike, "B 1 E"] | None = None,
) -> tuple[Float[Array, "B 1 E"], Float[Array, "B T E"]]:
    """The token before each token.

    Args:
      x: tokens.
      token_mask: True = real; padding on any side.
      state: the token before the first; None: zeros.

    Returns:
      The last token, which is the state to continue from, and the shifted tokens, 0
      at padding.

    Raises:
      ValueError: if shapes do not fit.
    """
    state, (before, _) = _taps(jnp.asarray(x), 2, token_mask, state)
    return state, checks.only_real(before, token_mask, 0)


def _taps(
    x: Float[Array, "B T E"],
    width: int,
    token_mask: Bool[ArrayLike, "B T"] | None,
    state: Float[ArrayLike, "B {width}-1 E"] | None,
) -> tuple[Float[Array, "B {width}-1 E"], list[Float[Array, "B T E"]]]:
    """The last W - 1 tokens; and for each token those W - 1, …, 1, 0 before it."""
    if x.ndim != 3:
        raise ValueError(f"x must be [B T E], got {list(x.shape)}")
    batch, _, channels = x.shape
    state = recurrence.state_or_zeros(state, (batch, width - 1, channels), x.dtype)
    if token_mask is None:
        return jax.vmap(_taps_of_all)(x, state)
    token_mask = jnp.asarray(token_mask)
    checks.token_mask(token_mask, x.shape[:2])
    return jax.vmap(_taps_of_real)(x, state, token_mask)


def _taps_of_all(
    x: Float[Array, "T E"], state: Float[Array, "M E"]
) -> tuple[Float[Array, "M E"], list[Float[Array, "T E"]]]:
    line = jnp.concatenate([state, x])
    return line[len(x) :], [line[i : i + len(x)] for i in range(len(state) + 1)]


def _taps_of_real(
    x: Float[Array, "T E"], state: Float[Array, "M E"], real: Bool[Array, "T"]
) -> tuple[Float[Array, "M E"], list[Float[Array, "T E"]]]:
    count = jnp.cumsum(real)
    # Real tokens line up after the state; padding goes past the end, and is dropped.
    index = jnp.where(real, len(state) + count - 1, len(state) + len(x))
    line = jnp.concatenate([state, jnp.zeros_like(x)]).at[index].set(x, mode="drop")
    first = jnp.maximum(count - 1, 0)
    taps = [line[first + i] for i in range(len(state) + 1)]
    return lax.dynamic_slice_in_dim(line, count[-1], len(state)), taps
