"""n-gram baselines: what a loss means beside counting.

Each order is interpolated with the one below by a Dirichlet prior, down to uniform:

    p₀(c) = 1 / V
    pₙ(c | h) = (count(hc) + αₙ · pₙ₋₁(c | h′)) / (count(h) + αₙ)

where h is the n − 1 tokens before c, h′ is h without its oldest token, and count(h)
counts h where some token follows, so that pₙ sums to 1. Each αₙ is the one of a
logarithmic grid that predicts a held-out tail of the training split best, lower orders
first; the counts are then taken again over the whole training split.

MacKay and Peto, "A hierarchical Dirichlet language model", Natural Language
Engineering 1(3), 1995.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from train.text import tokenizers

NAMES = ("unigram", "bigram", "trigram")

# The loss is flat near its minimum: 8 points a decade cost less than 1e-4 nats.
_GRID = tuple(float(alpha) for alpha in np.logspace(-1, 6, 57))


def nats_per_token(
    train: Int[np.ndarray, "M"],
    validation: Int[np.ndarray, "M_validation"],
    *,
    vocab_size: int,
) -> dict[str, float]:
    """Mean loss of each baseline over all validation tokens but the first.

    Those are the targets of `data.windows`. A baseline sees validation tokens only
    before its target; where they are fewer than its order wants, it uses those.

    Args:
      train: training ids, from which everything is estimated.
      validation: ids to score.
      vocab_size: V.

    Returns:
      Nats per token of 'uniform' and of each of `NAMES`.

    Raises:
      ValueError: fewer than 5 training or 2 validation tokens, or an unknown id.
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
      train: training ids.
      vocab_size: V.

    Returns:
      The concentrations, in counts, lowest order first.

    Raises:
      ValueError: fewer than 5 tokens, or an unknown id.
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
    """Probability of each token but the first given those before it, at every order.

    Args:
      train: ids that are counted.
      tokens: ids to score.
      alphas: α₁ … αₙ, in counts.
      vocab_size: V.

    Returns:
      Row n holds pₙ; row 0 is uniform.

    Raises:
      ValueError: an unknown id.
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
    """count(hc) and count(h) in `train` for each of `tokens` but the first.

    Both are 0 where h would begin before `tokens` does, which makes pₙ = pₙ₋₁.
    """
    seen = _codes(train, order=order, vocab_size=vocab_size)
    wanted = _codes(tokens, order=order, vocab_size=vocab_size)
    counts = np.zeros((2, tokens.size), np.int64)
    counts[0, order - 1 :] = _occurrences(seen, wanted)
    counts[1, order - 1 :] = _occurrences(seen // vocab_size, wanted // vocab_size)
    return counts[0, 1:], counts[1, 1:]


def _codes(
    tokens: Int[np.ndarray, "M"], *, order: int, vocab_size: int
) -> Int[np.ndarray, "M-{order}+1"]:
    """Each run of `order` tokens as one integer in base V, the newest token last."""
    ids = tokenizers.check_ids(tokens, vocab_size)
    codes = np.zeros(max(ids.size - order + 1, 0), np.int64)
    for first in range(order):
        codes = codes * vocab_size + ids[first : first + codes.size]
    return codes


def _occurrences(
    seen: Int[np.ndarray, "M"], wanted: Int[np.ndarray, "M_wanted"]
) -> Int[np.ndarray, "M_wanted"]:
    """How often each wanted code stands among those seen."""
    codes, counts = np.unique(seen, return_counts=True)
    index = np.minimum(np.searchsorted(codes, wanted), codes.size - 1)
    return np.where(codes[index] == wanted, counts[index], 0)
