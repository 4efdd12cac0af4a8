"""n-gram baselines, with which the loss of a model is compared.

Each order is smoothed by a Dirichlet prior at the order below, down to uniform:

    p₀(c) = 1 / V
    pₙ(c | h) = (count(hc) + αₙ · pₙ₋₁(c | h′)) / (count(h) + αₙ)

where h is the n − 1 tokens before c, h′ is h without its oldest token, and count(h)
counts the occurrences of h that are followed by a token, so that pₙ sums to 1. Each αₙ
is the value on a logarithmic grid with the lowest loss on a held-out tail of the
training split; lower orders are chosen first. The final counts are those of the whole
training split.

MacKay and Peto, "A hierarchical Dirichlet language model", Natural Language
Engineering 1(3), 1995.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from train.text import tokenizers

NAMES = ("unigram", "bigram", "trigram")

# 8 values per decade: the loss at the best one is within 1e-4 nats of the minimum.
_GRID = tuple(float(alpha) for alpha in np.logspace(-1, 6, 57))


def nats_per_token(
    train: Int[np.ndarray, "M"],
    validation: Int[np.ndarray, "M_validation"],
    *,
    vocab_size: int,
) -> dict[str, float]:
    """Mean loss of each baseline over all validation tokens except the first.

    These are the targets that the language model is evaluated on. A baseline reads the
    validation tokens before its target; near the start, where there are fewer of them
    than its order uses, it reads those.

    Args:
      train: token ids of the training split, which are counted.
      validation: token ids of the validation split, which are scored.
      vocab_size: V, the number of token ids.

    Returns:
      Nats per token of 'uniform' and of each of `NAMES`.

    Raises:
      ValueError: if there are fewer than 5 training or 2 validation tokens, or an id is
        outside 0 … V-1.

    Reference: MacKay and Peto, 1995.
    """
    if validation.size < 2:
        raise ValueError(f"baselines need 2 validation tokens, got {validation.size}")
    alphas = tune(train, vocab_size=vocab_size)
    rows = probabilities(train, validation, alphas=alphas, vocab_size=vocab_size)
    return {
        name: _nats(row) for name, row in zip(("uniform", *NAMES), rows, strict=True)
    }


def tune(train: Int[np.ndarray, "M"], *, vocab_size: int) -> list[float]:
    """Chooses αₙ for the orders of `NAMES` on the last tenth of the training split.

    Args:
      train: token ids of the training split.
      vocab_size: V, the number of token ids.

    Returns:
      α₁, α₂ and α₃, in units of counts.

    Raises:
      ValueError: if there are fewer than 5 tokens, or an id is outside 0 … V-1.
    """
    if train.size < 5:
        raise ValueError(f"baselines need 5 training tokens, got {train.size}")
    cut = train.size - max(2, train.size // 10)
    head, tail = train[:cut], train[cut:]
    alphas: list[float] = []
    prior = np.full(tail.size - 1, 1 / vocab_size)
    for order in range(1, len(NAMES) + 1):
        joint, context = _counts(head, tail, order=order, vocab_size=vocab_size)
        losses = [_nats(_interpolate(joint, context, prior, alpha)) for alpha in _GRID]
        alphas.append(_GRID[int(np.argmin(losses))])
        prior = _interpolate(joint, context, prior, alphas[-1])
    return alphas


def probabilities(
    train: Int[np.ndarray, "M"],
    tokens: Int[np.ndarray, "M_scored"],
    *,
    alphas: Sequence[float],
    vocab_size: int,
) -> Float[np.ndarray, "orders M_scored-1"]:
    """Conditional probability pₙ(c | h) of each token except the first.

    Args:
      train: token ids of the training split, which are counted.
      tokens: token ids that are scored.
      alphas: α₁ … αₙ, in units of counts.
      vocab_size: V, the number of token ids.

    Returns:
      An array whose row n is pₙ; row 0 is uniform.

    Raises:
      ValueError: if an id is outside 0 … V-1.

    Reference: MacKay and Peto, 1995.
    """
    rows = [np.full(tokens.size - 1, 1 / vocab_size)]
    for order, alpha in enumerate(alphas, start=1):
        joint, context = _counts(train, tokens, order=order, vocab_size=vocab_size)
        rows.append(_interpolate(joint, context, rows[-1], alpha))
    return np.stack(rows)


def _interpolate(
    joint: Int[np.ndarray, "M"],
    context: Int[np.ndarray, "M"],
    prior: Float[np.ndarray, "M"],
    alpha: float,
) -> Float[np.ndarray, "M"]:
    return (joint + alpha * prior) / (context + alpha)


def _nats(probability: Float[np.ndarray, "M"]) -> float:
    return -float(np.mean(np.log(probability)))


def _counts(
    train: Int[np.ndarray, "M"],
    tokens: Int[np.ndarray, "M_scored"],
    *,
    order: int,
    vocab_size: int,
) -> tuple[Int[np.ndarray, "M_scored-1"], Int[np.ndarray, "M_scored-1"]]:
    """count(hc) and count(h) in `train` for each of `tokens` except the first.

    Both are 0 where h would start before the first of `tokens`, so that pₙ = pₙ₋₁.
    """
    counted = _codes(train, order=order, vocab_size=vocab_size)
    scored = _codes(tokens, order=order, vocab_size=vocab_size)
    counts = np.zeros((2, tokens.size), np.int64)
    counts[0, order - 1 :] = _occurrences(counted, scored)
    counts[1, order - 1 :] = _occurrences(counted // vocab_size, scored // vocab_size)
    return counts[0, 1:], counts[1, 1:]


def _codes(
    tokens: Int[np.ndarray, "M"], *, order: int, vocab_size: int
) -> Int[np.ndarray, "M-{order}+1"]:
    """Encodes each n-gram as an integer in base V; its last digit is the last token."""
    ids = tokenizers.check_ids(tokens, vocab_size)
    codes = np.zeros(max(ids.size - order + 1, 0), np.int64)
    for first in range(order):
        codes = codes * vocab_size + ids[first : first + codes.size]
    return codes


def _occurrences(
    counted: Int[np.ndarray, "M"], scored: Int[np.ndarray, "M_scored"]
) -> Int[np.ndarray, "M_scored"]:
    """How often each scored code occurs among the counted ones."""
    codes, counts = np.unique(counted, return_counts=True)
    index = np.minimum(np.searchsorted(codes, scored), codes.size - 1)
    return np.where(codes[index] == scored, counts[index], 0)
