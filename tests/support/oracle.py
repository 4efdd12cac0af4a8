"""Attention in float64 NumPy, one number at a time: the judge of everything else.

Written to be obviously right and for nothing else: loops over every batch row, head
and query, no broadcasting between them, no stabilising tricks beyond Python's own
range (scores below about 700).
"""

import math

import numpy as np


def attention(
    query,
    key,
    value,
    *,
    visible=None,
    scale=None,
    bias=None,
    softcap=None,
    score_mod=None,
    sinks=None,
    keep=None,
    dropout_rate=0.0,
    output_gradient=None,
):
    """Outputs, weights and (given dL/do) gradients of dot-product attention.

    Args:
      query: [B T N H].
      key: [B S K H].
      value: [B S K D].
      visible: bool [B N T S]; None: all.
      scale: None: 1/sqrt(H).
      bias: [B N T S], added last.
      softcap: c of c tanh(s / c).
      score_mod: f(score, i, j, b, n) -> (score, its derivative by the score).
      sinks: [N].
      keep: bool [B N T S]: weights that survive dropout.
      dropout_rate: their share is 1 - dropout_rate.
      output_gradient: [B T N D].

    Returns:
      A dict: out, weights, lse, and dq, dk, dv, dbias, dsinks.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    B, T, N, H = query.shape
    _, S, K, D = value.shape
    scale = 1 / math.sqrt(H) if scale is None else float(scale)
    found = {
        "out": np.zeros((B, T, N, D)),
        "weights": np.zeros((B, N, T, S)),
        "lse": np.full((B, T, N), -math.inf),
        "dq": np.zeros_like(query),
        "dk": np.zeros_like(key),
        "dv": np.zeros_like(value),
        "dbias": np.zeros((B, N, T, S)),
        "dsinks": np.zeros(N),
    }
    for b in range(B):
        for n in range(N):
            k = n // (N // K)
            for i in range(T):
                seen = [j for j in range(S) if visible is None or visible[b, n, i, j]]
                score, slope = {}, {}
                for j in seen:
                    s = scale * sum(
                        query[b, i, n, h] * key[b, j, k, h] for h in range(H)
                    )
                    slope[j] = 1.0
                    if softcap is not None:
                        slope[j] *= 1 - math.tanh(s / softcap) ** 2
                        s = softcap * math.tanh(s / softcap)
                    if score_mod is not None:
                        s, derivative = score_mod(s, i, j, b, n)
                        slope[j] *= derivative
                    if bias is not None:
                        s += float(bias[b, n, i, j])
                    score[j] = s
                total = sum(math.exp(score[j]) for j in seen)
                if sinks is not None:
                    total += math.exp(float(sinks[n]))
                if total == 0:
                    continue
                found["lse"][b, i, n] = math.log(total)
                for j in seen:
                    w = math.exp(score[j]) / total
                    found["weights"][b, n, i, j] = w
                    kept = (
                        1.0 if keep is None else keep[b, n, i, j] / (1 - dropout_rate)
                    )
                    for d in range(D):
                        found["out"][b, i, n, d] += kept * w * value[b, j, k, d]
                if output_gradient is None:
                    continue
                do = np.asarray(output_gradient, np.float64)[b, i, n]
                w = found["weights"][b, n, i]
                kept = {
                    j: 1.0 if keep is None else keep[b, n, i, j] / (1 - dropout_rate)
                    for j in seen
                }
                dw = {
                    j: kept[j] * sum(do[d] * value[b, j, k, d] for d in range(D))
                    for j in seen
                }
                mean = sum(w[j] * dw[j] for j in seen)
                for j in seen:
                    ds = w[j] * (dw[j] - mean)
                    found["dbias"][b, n, i, j] = ds
                    for d in range(D):
                        found["dv"][b, j, k, d] += kept[j] * w[j] * do[d]
                    for h in range(H):
                        by_product = ds * slope[j] * scale
                        found["dq"][b, i, n, h] += by_product * key[b, j, k, h]
                        found["dk"][b, j, k, h] += by_product * query[b, i, n, h]
                if sinks is not None:
                    found["dsinks"][n] -= math.exp(float(sinks[n])) / total * mean
    return found
