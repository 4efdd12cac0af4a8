"""AdamW with warm-up, cosine decay and clipping; weight decay on matrices only.

Update number n = 1, 2, …, N of the gradient g, with warm-up over W updates:

    η(n) = ηₘₐₓ n / W                                               n ≤ W
    η(n) = ηₘᵢₙ + (ηₘₐₓ − ηₘᵢₙ) (1 + cos π (n − W) / (N − W)) / 2   n ≤ N
    g ← g min(1, c / ‖g‖)
    θ ← θ − η(n) (m̂ / (√v̂ + ε) + λ θ)

with m̂ and v̂ Adam's means of g and g². Updates are counted from 1: counted from 0, the
first one would have rate 0 and be lost.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019 (AdamW) and SGDR:
Stochastic Gradient Descent with Warm Restarts, 2017 (cosine); Pascanu et al., On the
difficulty of training recurrent neural networks, 2013 (clipping by the global norm).
"""

from typing import Any

import jax
import optax

from train import config

# By name, not by rank: flax keeps the bias of a head projection as a matrix [N H], and
# a table of relative biases is one too.
DECAYED = ("kernel", "embedding")


def schedule(optimizer: config.OptimizerConfig, steps: int) -> optax.Schedule:
    """Makes the learning rate as a function of the update's number.

    Args:
      optimizer: rates and the length W of the warm-up.
      steps: N, updates in all. A run with N ≤ W ends inside its warm-up.

    Returns:
      A function of n, counted from 1 and possibly traced. Past N it stays at the
      minimum.
    """
    warmup = optimizer.warmup_steps
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=optimizer.peak_lr,
        warmup_steps=warmup,
        # The decay must have a length even where the run ends before it.
        decay_steps=max(steps, warmup + 1),
        end_value=optimizer.min_lr,
    )


def decayed(params: Any) -> Any:
    """Says which parameters weight decay acts on.

    Args:
      params: tree of nested dictionaries.

    Returns:
      The same tree of bools: True for kernels and embeddings, False for biases, scales
      of norms and everything else.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in DECAYED, params
    )


def make(optimizer: config.OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Makes the optimiser.

    Args:
      optimizer: rates, Adam's b1 and b2, weight decay λ, and the norm c to which
        gradients are clipped; None: they are not.
      steps: N, as for `schedule`.

    Returns:
      The transformation of gradients into updates. It is silent about gradients that
      are not finite: the training loop keeps those away.
    """
    rate = schedule(optimizer, steps)
    adamw = optax.adamw(
        lambda count: rate(count + 1),
        b1=optimizer.b1,
        b2=optimizer.b2,
        weight_decay=optimizer.weight_decay,
        mask=decayed,
    )
    if optimizer.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), adamw)
