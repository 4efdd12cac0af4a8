"""Cross-entropy of next-token prediction, as a sum over targets and their count.

Token t + 1 is the target of position t, and the loss is the negative log-likelihood

    ℒ = −∑ₜ mₜ log softmax(zₜ)[yₜ] ÷ ∑ₜ mₜ,   yₜ = xₜ₊₁

in nats per target. A mean of means would weigh a target by the size of its batch, so
sum and count are returned apart, and whoever joins batches adds both before dividing.

Shannon, A Mathematical Theory of Communication, 1948.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import numerics

# Tokens [B T+1] to inputs and targets [B T]: `next_token`, or the faulty `same_token`.
Examples = Callable[[Array], tuple[Array, Array]]


def next_token(
    tokens: Int[Array, "B T_and_next"],
) -> tuple[Int[Array, "B T_and_next-1"], Int[Array, "B T_and_next-1"]]:
    """Splits rows into inputs and the tokens that follow them.

    Args:
      tokens: ids of T + 1 consecutive tokens a row.

    Returns:
      Inputs (tokens 0 to T - 1) and targets (tokens 1 to T). No target crosses rows.
    """
    return tokens[:, :-1], tokens[:, 1:]


def same_token(
    tokens: Int[Array, "B T_and_next"],
) -> tuple[Int[Array, "B T_and_next-1"], Int[Array, "B T_and_next-1"]]:
    """Forgets the shift: every position is asked for the token that it already sees.

    This is the fault that a proof of causality by learning must be able to see: on
    random tokens its loss falls to 0 where that of `next_token` cannot leave log V.

    Args:
      tokens: as for `next_token`.

    Returns:
      Inputs (tokens 0 to T - 1), twice.
    """
    return tokens[:, :-1], tokens[:, :-1]


def negative_log_likelihood(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """The loss of each target.

    Args:
      logits: unnormalised log-probabilities. The loss is computed in float32, in
        float64 for float64.
      targets: ids. The loss of one outside 0 to V - 1 is NaN: inside a compiled program
        nothing can be raised, and a clamped id would train on another token.

    Returns:
      Nats.

    Raises:
      ValueError: the shapes do not fit.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits [B T V] and targets [B T] must agree in B and T, "
            f"got {logits.shape} and {targets.shape}"
        )
    logits = logits.astype(numerics.accumulation_dtype(logits.dtype))
    target_logits = jnp.take_along_axis(
        logits,
        targets[..., None],
        axis=-1,
        mode="fill",
        fill_value=jnp.nan,
        wrap_negative_indices=False,
    )
    return jax.nn.logsumexp(logits, axis=-1) - target_logits[..., 0]


def cross_entropy(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sums the loss of the targets that count.

    Args:
      logits: as for `negative_log_likelihood`.
      targets: as for `negative_log_likelihood`.
      mask: True = the target counts; None = all do.

    Returns:
      The sum in nats, and the int32 number of targets that count.

    Raises:
      ValueError: the shapes do not fit.
    """
    if mask is not None and mask.shape != targets.shape:
        raise ValueError(
            f"mask must have the shape {targets.shape} of targets, got {mask.shape}"
        )
    nats = negative_log_likelihood(logits, targets)
    if mask is None:
        return jnp.sum(nats), jnp.int32(targets.size)
    return jnp.sum(nats, where=mask), jnp.sum(mask, dtype=jnp.int32)
