"""The loss of a trained model on a split, token by token.

    ℓ[w, t] = -log p(y[w, t] | x[w, 0 … t]),   mean = Σ mask · ℓ ÷ Σ mask

The mean is over targets, never over batches, so it does not depend on their size.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, Bool, Float, Int

from train.lm import loss


def evaluate(
    model: nn.Module,
    params: optax.Params,
    tokens: Int[np.ndarray, "W T_and_next"],
    mask: Bool[np.ndarray, "W T"],
    *,
    batch_size: int,
) -> float:
    """Mean loss over all targets of a split, summed in float64.

    Args:
      model: maps tokens [B T] to logits [B T V].
      params: its parameters.
      tokens: windows of the split.
      mask: which of their targets count.
      batch_size: windows at a time.

    Returns:
      Nats per target; 0, with a warning, if there is none.
    """
    if not mask.any():
        logging.warning("no targets to evaluate on")
        return 0.0
    losses = token_losses(model, params, tokens, loss.next_token, batch_size=batch_size)
    return float(np.mean(losses, where=mask, dtype=np.float64))


def token_losses(
    model: nn.Module,
    params: optax.Params,
    tokens: Int[np.ndarray, "W T_and_next"],
    examples: loss.Examples,
    *,
    batch_size: int,
) -> Float[np.ndarray, "W T"]:
    """Loss of every target, without dropout.

    Args:
      model: maps tokens [B T] to logits [B T V].
      params: its parameters.
      tokens: rows of T + 1 tokens.
      examples: `loss.next_token`, or what else makes inputs and targets of tokens.
      batch_size: rows at a time; compiled once for equal shapes.

    Returns:
      Nats.
    """
    rows = len(tokens)
    padded = np.pad(tokens, ((0, -rows % batch_size), (0, 0)))
    batches = padded.reshape(-1, batch_size, padded.shape[1])
    losses = _losses(model, params, batches, examples)
    return np.asarray(losses).reshape(-1, losses.shape[-1])[:rows]


@functools.partial(jax.jit, static_argnames=("model", "examples"))
def _losses(
    model: nn.Module,
    params: optax.Params,
    batches: Int[Array, "batches B T_and_next"],
    examples: loss.Examples,
) -> Float[Array, "batches B T"]:
    def batch_losses(tokens: Array) -> Array:
        inputs, targets = examples(tokens)
        logits: Any = model.apply({"params": params}, inputs, deterministic=True)
        return loss.negative_log_likelihood(logits, targets)

    return jax.lax.map(batch_losses, batches)
