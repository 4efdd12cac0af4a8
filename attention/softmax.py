"""Scaled dot-product attention for one head: a soft dictionary lookup.

    sᵢⱼ = (scale · qᵢ)·kⱼ                                how well key j fits query i
    wᵢⱼ = mᵢⱼ exp(sᵢⱼ) / Σⱼ mᵢⱼ exp(sᵢⱼ)                  a distribution over the keys
    oᵢ  = Σⱼ wᵢⱼ vⱼ                                      the mean of the values under it

with scale = 1/√H, and mᵢⱼ ∈ {0, 1} the mask (True = may attend). As the scale grows
the lookup becomes the hard one of an ordinary dictionary, argmaxⱼ sᵢⱼ; at scale 0 it
is the plain mean. Vaswani et al., 2017, arXiv:1706.03762.

`attention.dot_product.reference` lifts these functions over heads and batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

ScoreMod = Callable[..., Array]


def masked_softmax(
    scores: Float[Array, "*A S"],
    mask: Bool[Array, "*#A #S"] | None = None,
    *,
    sink: Float[Array, ""] | None = None,
) -> Float[Array, "*A S"]:
    """Softmax over the last axis among the visible entries.

    wⱼ = mⱼ exp(sⱼ) / (Σⱼ mⱼ exp(sⱼ) + exp(sink))

    Args:
      scores: any floating dtype, computed in that dtype.
      mask: True = takes part; broadcastable to `scores`.
      sink: an extra, learned score that takes weight and has no value (OpenAI, 2025,
        arXiv:2508.10925); None: no sink.

    Returns:
      Weights: 0 exactly where masked, whatever the finite score; 0 in a row that sees
      nothing. Gradients are finite in both cases.
    """
    return masked_softmax_and_log_normalizer(scores, mask, sink=sink)[0]


@jax.named_scope("masked_softmax")
def masked_softmax_and_log_normalizer(
    scores: Float[Array, "*A S"],
    mask: Bool[Array, "*#A #S"] | None = None,
    *,
    sink: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "*A S"], Float[Array, "*A"]]:
    """Computes `masked_softmax`, and the logarithm of each row's divisor.

    Args:
      scores: any floating dtype, computed in that dtype.
      mask: True = takes part; broadcastable to `scores`.
      sink: an extra, learned score that takes weight and has no value; None: no sink.

    Returns:
      The weights, and log(Σⱼ mⱼ exp(sⱼ) + exp(sink)): -inf for an empty row that has
      no sink.
    """
    if mask is not None:
        # Before the maximum: a masked score of any size must not set a row's peak.
        scores = jnp.where(mask, scores, -jnp.inf)
    weights, log_normalizer = _normalize(scores, sink)
    return weights, log_normalizer[..., 0]


@jax.custom_jvp
def _normalize(
    scores: Float[Array, "*A S"], sink: Float[Array, ""] | None
) -> tuple[Float[Array, "*A S"], Float[Array, "*A 1"]]:
    """Weights and log-normalizer; a score of -inf is masked."""
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    if sink is not None:
        peak = jnp.maximum(peak, sink)
    # An empty row has peak -inf, and -inf - -inf would be NaN.
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    exponentials = jnp.exp(scores - peak)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - peak)
    empty = total == 0
    divisor = jnp.where(empty, 1, total)
    log_normalizer = jnp.where(empty, -jnp.inf, jnp.log(divisor) + peak)
    return exponentials / divisor, log_normalizer


@_normalize.defjvp
def _normalize_jvp(primals: Any, tangents: Any) -> Any:
    """∂ log Z = Σⱼ wⱼ ∂sⱼ,  ∂wⱼ = wⱼ (∂sⱼ - ∂ log Z); finite wherever w is."""
    (scores, sink), (d_scores, d_sink) = primals, tangents
    weights, log_normalizer = _normalize(scores, sink)
    d_log = jnp.sum(weights * d_scores, axis=-1, keepdims=True)
    if sink is not None:
        # Where there is nothing to see the sink may be -inf too.
        finite = jnp.where(log_normalizer == -jnp.inf, 0, log_normalizer)
        d_log += jnp.exp(sink - finite) * d_sink
    return (weights, log_normalizer), (weights * (d_scores - d_log), d_log)


@jax.named_scope("scores")
def scores(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    bias: Float[Array, "#T #S"] | None = None,
    *,
    scale: float | Float[Array, ""],
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    batch: int | Int[Array, ""] = 0,
    head: int | Int[Array, ""] = 0,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "T S"]:
    """Scores of one head, not yet masked: mod(cap((scale · q) kᵀ)) + bias.

    Args:
      query: queries.
      key: keys.
      bias: added last.
      scale: multiplies the products.
      softcap: c in c · tanh(s / c); None: no cap.
      score_mod: `score_mod(score, q_index, kv_index, *, batch, head)`, elementwise.
      batch: index of the row, an argument of `score_mod`.
      head: index of the query head, an argument of `score_mod`.
      precision: of the matrix product.

    Returns:
      One score for every query and key.
    """
    # Scaled before the product: after it, compilers contract the scaling with the
    # subtraction of the row's maximum, whose own entry then is no exact 0.
    products = jnp.matmul(query * scale, key.T, precision=precision)
    return modified(
        products, bias, softcap=softcap, score_mod=score_mod, batch=batch, head=head
    )


@jax.named_scope("modified_scores")
def modified(
    products: Float[Array, "T S"],
    bias: Float[Array, "#T #S"] | None = None,
    *,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    batch: int | Int[Array, ""] = 0,
    head: int | Int[Array, ""] = 0,
    start: tuple[int | Int[Array, ""], int | Int[Array, ""]] = (0, 0),
) -> Float[Array, "T S"]:
    """Scores of one head, from the products of its queries and keys.

    Args:
      products: scaled, of the queries and keys from `start` on.
      bias: added last.
      softcap: c in c · tanh(s / c) (Gemma 2, 2024, arXiv:2408.00118); None: no cap.
      score_mod: `score_mod(score, q_index, kv_index, *, batch, head)`, elementwise;
        the int32 indices [T 1] and [1 S] broadcast against the score [T S].
      batch: index of the row, an argument of `score_mod`.
      head: index of the query head, an argument of `score_mod`.
      start: index of the first query, and of the first key.

    Returns:
      mod(cap(products)) + bias.
    """
    s = products
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if score_mod is not None:
        q_index = start[0] + lax.broadcasted_iota(jnp.int32, (s.shape[0], 1), 0)
        kv_index = start[1] + lax.broadcasted_iota(jnp.int32, (1, s.shape[1]), 1)
        s = score_mod(s, q_index, kv_index, batch=batch, head=head)
    if bias is not None:
        s += bias
    return s


@jax.named_scope("entropy")
def entropy(weights: Float[Array, "*A S"]) -> Float[Array, "*A"]:
    """Entropy of attention weights, -Σⱼ wⱼ log wⱼ, in nats.

    Between 0 (one key takes all) and log S (uniform). 0 log 0 counts as 0, and the
    gradient is finite there too: no log(w + ε), which is NaN in float16.
    """
    visible = weights > 0
    logs = jnp.log(jnp.where(visible, weights, 1))
    return -jnp.sum(jnp.where(visible, weights * logs, 0), axis=-1)
