"""A sample of text from a language model, token by token.

    xₜ₊₁ ~ softmax(zₜ / temperature)

The model reads the last `context` tokens anew for every token that it adds: plain, and
good enough for the few lines at the end of a run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Int


@functools.partial(jax.jit, static_argnames=("model", "context", "length"))
def sample(
    model: nn.Module,
    params: dict[str, Any],
    prompt: Int[Array, "P"],
    rng: Array,
    *,
    context: int,
    length: int,
    temperature: float | Array,
) -> Int[Array, "length"]:
    """Continues a prompt.

    Args:
      model: maps tokens [B T] to logits [B T V].
      params: its parameters.
      prompt: at least one token; the last `context` of them are read.
      rng: key.
      context: T, tokens that the model reads at once.
      length: tokens to add.
      temperature: above 0; 1 samples from the model's own distribution.

    Returns:
      The tokens that follow the prompt.
    """
    prompt = prompt[-context:]
    padding = context - prompt.shape[0]
    window = jnp.pad(prompt, (padding, 0))
    known = jnp.arange(context) >= padding

    def step(carry: tuple[Array, Array], rng: Array) -> tuple[Any, Array]:
        window, known = carry
        logits: Any = model.apply(
            {"params": params},
            window[None],
            token_mask=known[None],
            deterministic=True,
        )
        token = jax.random.categorical(rng, logits[0, -1] / temperature)
        token = token.astype(window.dtype)
        window = jnp.concatenate([window[1:], token[None]])
        known = jnp.concatenate([known[1:], jnp.ones(1, bool)])
        return (window, known), token

    _, tokens = jax.lax.scan(step, (window, known), jax.random.split(rng, length))
    return tokens
