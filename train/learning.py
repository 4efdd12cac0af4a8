"""Proof 3 of causality: nothing is learned from tokens that cannot be predicted.

On uniformly random tokens over V ids, whatever pₜ the model states before it sees
token xₜ,

    E[V pₜ(xₜ)] = 1,   hence   E[-log pₜ(xₜ)] ≥ log V   and
    P(Σ (log V + log pₜ(xₜ)) ≥ log 1/α) ≤ α             (Markov; Ville, 1939)

for the sum over any number of independent rows and over the positions of a row. A
model that wins more than log 1/α nats against log V on fresh random tokens has seen
its targets. The bound holds for every sample size and every distribution of the
losses; a normal approximation does not (a model that states nearly 0 for one rare id
would often be accused).
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from attention import properties
from train import loss, proofs

# Probability that the learning proof accuses an honest model, all its tests together.
LEVEL = 1e-3
# Probability that it finds a leak of the size that it states as its smallest.
POWER = 0.99
# Standard errors below log V that the positive control must reach.
CONTROL_ERRORS = 10
# Nats by which a float32 log-softmax may err; allowed to every token in the bound.
ROUNDING = 1e-6

Fit = Callable[[Array, loss.Examples], Any]
PerTokenLosses = Callable[[Any, Array, loss.Examples], properties.AnyArray]


def prove(
    fit: Fit,
    per_token_losses: PerTokenLosses,
    *,
    vocab_size: int,
    context: int,
    corpus_size: int,
    fresh_rows: int,
    rng: PRNGKeyArray,
) -> proofs.Proof:
    """Proof 3: trained on random tokens, the model does not beat log V on fresh ones.

    The same is done with labels that are not shifted (the positive control), where a
    model and a loop that can learn at all must fall far below log V.

    Args:
      fit: (corpus int32 [M], examples) -> parameters; trains from nothing with the
        loss, data code and loop under test. `examples` turns a batch of tokens
        [B T+1] into (inputs, targets), both [B T].
      per_token_losses: (parameters, tokens int32 [R T+1], examples) -> losses in
        nats float32 [R T], without dropout.
      vocab_size: V.
      context: T.
      corpus_size: M. A corpus that training sees several times is learned by heart,
        which costs loss on fresh data and so hides small leaks.
      fresh_rows: R, rows of fresh data.
      rng: key of corpus and fresh data.

    Returns:
      Proof of `judge_losses`.
    """
    corpus_rng, fresh_rng = jax.random.split(rng)
    corpus = jax.random.randint(corpus_rng, (corpus_size,), 0, vocab_size)
    fresh = jax.random.randint(fresh_rng, (fresh_rows, context + 1), 0, vocab_size)

    def losses(examples: loss.Examples) -> np.ndarray:
        return np.asarray(per_token_losses(fit(corpus, examples), fresh, examples))

    return judge_losses(
        losses(loss.next_token), losses(loss.same_token), vocab_size=vocab_size
    )


def judge_losses(
    honest: Float[np.ndarray, "R T"],
    control: Float[np.ndarray, "R T"],
    *,
    vocab_size: int,
    level: float = LEVEL,
) -> proofs.Proof:
    """The statistics of proof 3, from the losses on fresh uniformly random tokens.

    The excess of a position is its mean loss minus log V; rows are independent, and
    the standard error of the overall mean is that of the mean over rows. T + 1 tests
    are made, one per position and one overall, each at level / (T + 1). A test fails
    if the mean gain over log V exceeds log((T + 1) / level) / n, n = R tokens at a
    position and R T overall. The intervals are for the reader: normal, two-sided,
    simultaneous over the same T + 1 means.

    Smallest leak = max(excess, 0) + bound + z · standard error: a leak that lowers
    the loss by this much is found with probability POWER.

    Args:
      honest: losses in nats under next-token labels, R rows of T positions.
      control: the same under labels that are not shifted.
      vocab_size: V.
      level: probability of accusing an honest model.

    Returns:
      Proof; passed only if no test fails, every smallest leak is below log V (so that
      a complete leak would show), and the control fell CONTROL_ERRORS standard errors
      below log V. Arrays, all [T], in nats: `excess`, `lower`, `upper`,
      `smallest_leak`, `control_excess`, `control_error`.

    Raises:
      ValueError: on losses that are not [R T] with at least two rows.
    """
    if honest.ndim != 2 or honest.shape[0] < 2 or control.shape != honest.shape:
        raise ValueError(
            "expected two arrays of losses [R T] with R >= 2, "
            f"got {list(honest.shape)} and {list(control.shape)}"
        )
    rows, length = honest.shape
    log_vocab = math.log(vocab_size)
    tests = length + 1
    normal = statistics.NormalDist()
    spread = normal.inv_cdf(1 - level / (2 * tests))

    def summary(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Excess and standard error of the T positions and, last, overall."""
        excess = losses.astype(np.float64) - log_vocab
        columns = np.column_stack([excess, excess.mean(axis=1)])
        return columns.mean(axis=0), columns.std(axis=0, ddof=1) / math.sqrt(rows)

    # A loss that is not finite is reported below.
    with np.errstate(invalid="ignore"):
        excess, error = summary(honest)
        control_excess, control_error = summary(control)
    counts = np.append(np.full(length, rows), rows * length)
    bound = math.log(tests / level) / counts + ROUNDING
    smallest = np.maximum(excess, 0) + bound + normal.inv_cdf(POWER) * error
    table = {
        "excess": excess,
        "lower": excess - spread * error,
        "upper": excess + spread * error,
        "smallest_leak": smallest,
        "control_excess": control_excess,
        "control_error": control_error,
    }
    worst = int(np.argmin(excess + bound))
    blindest = int(np.argmax(smallest))
    failure = None
    if not (np.isfinite(honest).all() and np.isfinite(control).all()):
        failure = "void: a loss is not finite"
    elif excess[worst] < -bound[worst]:
        place = "over all positions" if worst == length else f"at position {worst}"
        failure = (
            f"random tokens are predicted {place}: "
            f"{-excess[worst]:.4g} nats below log V"
        )
    elif not control_excess[-1] < -CONTROL_ERRORS * control_error[-1]:
        failure = "void: the control did not learn"
    elif smallest[blindest] >= log_vocab:
        failure = f"void: a complete leak at position {blindest} would not show"
    return proofs.Proof(
        name="learning",
        passed=failure is None,
        reason=failure
        or f"random tokens are not predicted: {excess[-1]:+.2g} nats over log V "
        f"({table['lower'][-1]:+.2g} to {table['upper'][-1]:+.2g}); "
        f"a leak of {smallest[-1]:.2g} nats over all positions "
        f"or of {smallest[:-1].max():.2g} at any one would show",
        figures={
            "log_vocab": log_vocab,
            "fresh_rows": rows,
            "level": level,
            "power": POWER,
            "overall": {
                key: proofs.finite(values[-1]) for key, values in table.items()
            },
            "positions": {
                key: [proofs.finite(value) for value in values[:-1]]
                for key, values in table.items()
            },
        },
        arrays={key: values[:-1] for key, values in table.items()},
    )
