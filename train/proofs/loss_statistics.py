"""The statistics of proof 3: do losses on random tokens accuse a model?

On uniformly random tokens over V ids, whatever pₜ the model states before it sees
token xₜ,

    E[V pₜ(xₜ)] = 1,   hence   E[-log pₜ(xₜ)] ≥ log V   and
    P(Σ (log V + log pₜ(xₜ)) ≥ log 1/α) ≤ α             (Markov; Ville, 1939)

for the sum over any number of independent rows and over the positions of a row. A
model that wins more than log 1/α nats against log V on fresh random tokens has seen
its targets. The bound holds for every sample size and every distribution of the
losses; a normal approximation does not (a model that states nearly 0 for one rare id
would often be accused).

A proof that accuses nobody says what it would have found: see `judge`.
"""

import math
import statistics

import numpy as np
from jaxtyping import Float

from train.proofs import dependence

# Probability that the learning proof accuses an honest model, all its tests together.
LEVEL = 1e-3
# Probability that it finds a leak of the size that it states as its smallest.
POWER = 0.99
# Standard errors, beyond the bound, below log V that the positive control must reach.
CONTROL_ERRORS = 10
# Nats by which a float32 log-softmax may err; allowed to every token in the bound.
ROUNDING = 1e-6


def judge(
    honest: Float[np.ndarray, "..."],
    control: Float[np.ndarray, "..."],
    *,
    vocab_size: int,
    level: float = LEVEL,
) -> dependence.Proof:
    """Judges the losses of a model on fresh uniformly random tokens.

    The excess of a position is its mean loss minus log V; rows are independent, and
    the standard error of the overall mean is that of the mean over rows. T + 1 tests
    are made, one per position and one overall, each at level / (T + 1). A test fails
    if the mean gain over log V exceeds log((T + 1) / level) / n, n = R tokens at a
    position and R T overall. The intervals are for the reader: normal, two-sided,
    simultaneous over the same T + 1 means.

    What would have shown. The size δ of a leak is how far it lowers the mean loss of
    the honest model. Two sizes are stated; a larger leak is found with probability
    POWER, over the samples that state the size and that find the leak:

        smallest even leak = k + z √(2 s²)
        smallest leak δ    = k + z √(2 s² + δ ℓ̄ / R)
        k = max(excess, 0) + bound + z² max(μ₃, 0) / (2 σ² R)

    with ℓ̄, σ² and μ₃ the mean, variance and third central moment of R honest losses (or
    means over rows), s² = σ² / R (twice: the excess errs too) and z the quantile of
    POWER. Where large losses are rare, a sample short of them has a small s: hence μ₃.
    An even leak is the same in all rows, or takes more from larger losses: it widens no
    spread. Others do, and s, 0 for a uniform prediction, knows nothing of that: the
    second size holds for any leak that takes a share of each loss, from nothing to all
    of it, in whatever rows, positions and tokens, provided which losses are lowered
    does not depend on their size. The variance is at most σ² + δ ℓ̄, and nearly that
    when few rows are revealed whole. The quantiles are normal: means over R rows must
    be nearly so.

    Args:
      honest: losses [R T] in nats of predicting the next token, R rows of T positions.
      control: losses [R T] of the positive control, a model that can learn its targets.
      vocab_size: number V of ids.
      level: probability of accusing an honest model.

    Returns:
      Proof: 'leak' if a test fails; else 'void' unless every smallest leak is below
      log V (so that a complete leak would show), and the control fell below log V by
      the bound and CONTROL_ERRORS standard errors. Arrays, all [T], in nats: `excess`,
      `lower`, `upper`, `bound` (that a gain must exceed), `smallest_leak`,
      `smallest_even_leak`, `control_excess`, `control_error`.

    Raises:
      ValueError: on losses that are not [R T] with at least two rows.
    """
    if honest.ndim != 2 or honest.shape[0] < 2 or control.shape != honest.shape:
        raise ValueError(
            "expected two arrays of losses [R T] with R >= 2, "
            f"got {list(honest.shape)} and {list(control.shape)}"
        )
    log_vocab = math.log(vocab_size)
    table = _statistics(honest, control, log_vocab=log_vocab, level=level)
    result, reason = _verdict(honest, control, table, log_vocab=log_vocab)
    return dependence.Proof(
        name="learning",
        result=result,
        reason=reason,
        figures={
            "log_vocab": log_vocab,
            "fresh_rows": len(honest),
            "level": level,
            "power": POWER,
            "overall": {
                key: dependence.finite(values[-1]) for key, values in table.items()
            },
            "positions": {
                key: [dependence.finite(value) for value in values[:-1]]
                for key, values in table.items()
            },
        },
        arrays={key: values[:-1] for key, values in table.items()},
    )


def _statistics(
    honest: Float[np.ndarray, "R T"],
    control: Float[np.ndarray, "R T"],
    *,
    log_vocab: float,
    level: float,
) -> dict[str, Float[np.ndarray, "T_and_next"]]:
    """What `judge` states, of T positions and, last, overall."""
    rows, length = honest.shape
    tests = length + 1
    normal = statistics.NormalDist()
    # A loss that is not finite is reported by the verdict.
    with np.errstate(invalid="ignore"):
        excess, error, skew = _moments(honest.astype(np.float64) - log_vocab)
        control_excess, control_error, _ = _moments(
            control.astype(np.float64) - log_vocab
        )
    counts = np.append(np.full(length, rows), rows * length)
    bound = math.log(tests / level) / counts + ROUNDING
    z = normal.inv_cdf(POWER)
    hidden = np.maximum(excess, 0) + bound + z**2 / 2 * np.maximum(skew, 0) / rows
    noise = z * math.sqrt(2) * error
    # Half the coefficient of δ in (δ - k)² = z² (2 s² + δ ℓ̄ / R), solved for δ.
    half = z**2 * (log_vocab + np.maximum(excess, 0)) / rows / 2
    spread = normal.inv_cdf(1 - level / (2 * tests))
    return {
        "excess": excess,
        "lower": excess - spread * error,
        "upper": excess + spread * error,
        "bound": bound,
        "smallest_leak": hidden + half + np.sqrt(noise**2 + half * (2 * hidden + half)),
        "smallest_even_leak": hidden + noise,
        "control_excess": control_excess,
        "control_error": control_error,
    }


def _moments(excess: Float[np.ndarray, "R T"]) -> tuple[np.ndarray, ...]:
    """Mean, its standard error and μ₃ ÷ σ², of T positions and, last, overall."""
    columns = np.column_stack([excess, excess.mean(axis=1)])
    variance = np.maximum(columns.var(axis=0, ddof=1), np.finfo(np.float64).tiny)
    centred = columns - columns.mean(axis=0)
    third = np.mean(centred * centred**2, axis=0)
    return columns.mean(axis=0), np.sqrt(variance / len(excess)), third / variance


def _verdict(
    honest: Float[np.ndarray, "R T"],
    control: Float[np.ndarray, "R T"],
    table: dict[str, Float[np.ndarray, "T_and_next"]],
    *,
    log_vocab: float,
) -> tuple[dependence.Result, str]:
    """The result of `judge`, and why, in one line."""
    excess, bound, smallest = (
        table[name] for name in ("excess", "bound", "smallest_leak")
    )
    strange = np.argwhere(~np.isfinite([honest, control]))
    if len(strange):
        which, row, position = strange[0]
        name = ("loss", "control loss")[which]
        return "void", f"the {name} of row {row} at position {position} is not finite"
    worst = int(np.argmin(excess + bound))
    if excess[worst] < -bound[worst]:
        overall = worst == honest.shape[1]
        where = "over all positions" if overall else f"at position {worst}"
        gain = f"{-excess[worst]:.4g} nats below log V"
        return "leak", f"random tokens are predicted {where}: {gain}"
    fall = -table["control_excess"][-1]
    if not fall > bound[-1] + CONTROL_ERRORS * table["control_error"][-1]:
        return "void", "the control did not learn"
    blindest = int(np.argmax(smallest[:-1]))
    if smallest[blindest] >= log_vocab:
        return "void", f"a complete leak at position {blindest} might not show"
    return "clear", (
        f"random tokens are not predicted: {excess[-1]:+.2g} nats over log V "
        f"({table['lower'][-1]:+.2g} to {table['upper'][-1]:+.2g}); "
        f"a leak would show of {table['smallest_even_leak'][-1]:.2g} nats if alike in "
        f"all rows, of {smallest[-1]:.2g} however spread, "
        f"of {smallest[blindest]:.2g} at any one position"
    )
