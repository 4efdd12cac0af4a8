"""Three proofs that a language model predicts the next token without seeing it.

1. Edits. Replace token j: every logit at i < j keeps its bits.
2. Gradients. ∂yᵢ/∂xⱼ ≠ 0 exactly where the declared mask lets information pass.
3. Learning. On uniformly random tokens over V ids nothing can be learned. Whatever
   pₜ the model states before it sees token xₜ,

       E[V pₜ(xₜ)] = 1,   hence   E[-log pₜ(xₜ)] ≥ log V   and
       P(Σ (log V + log pₜ(xₜ)) ≥ log 1/α) ≤ α             (Markov; Ville, 1939)

   for the sum over any number of independent rows and over the positions of a row.
   A model that wins more than log 1/α nats against log V on fresh random tokens has
   seen its targets. The bound holds for every sample size and every distribution of
   the losses; a normal approximation does not (a model that states nearly 0 for one
   rare id would often be accused).

The first two examine the function; only the third sees that the labels themselves
are wrong (not shifted, shifted the wrong way), because it runs the loss, the data
code and the loop too.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from attention import properties
from train import loss

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


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a proof found.

    Attributes:
      name: 'edits', 'gradients' or 'learning'.
      passed: the verdict.
      reason: the verdict in one line.
      figures: numbers for the report, ready for JSON.
      arrays: what pictures are drawn from.
    """

    name: str
    passed: bool
    reason: str
    figures: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def void(self) -> bool:
        """Whether the proof failed without having shown anything."""
        return self.reason.startswith("void")

    def report(self) -> dict[str, Any]:
        """The proof as an entry of report.json: everything but the arrays."""
        head = {"name": self.name, "passed": self.passed, "reason": self.reason}
        return head | self.figures


def reachable(
    mask: Bool[properties.AnyArray, "T T"], *, num_layers: int
) -> Bool[np.ndarray, "T T"]:
    """Which inputs reach which outputs through a stack of residual layers.

    (I ∨ M)ᴸ, the boolean power: a layer passes position i on to itself, and to i
    what its mask lets i attend to.

    Args:
      mask: of one layer, True = may attend.
      num_layers: L.
    """
    step = np.asarray(mask) | np.eye(len(mask), dtype=bool)
    reach = np.eye(len(mask), dtype=bool)
    for _ in range(num_layers):
        reach = reach @ step
    return reach


def edits(
    logits_fn: properties.Function,
    tokens: Int[properties.AnyArray, "B T"],
    *,
    vocab_size: int,
    replacements: int,
    rng: PRNGKeyArray,
) -> Proof:
    """Proof 1: no edit of a token moves an earlier logit, or another row's, by a bit.

    An edit that moves nothing at its own position proves nothing, so each position
    must move its own output at least once.

    Args:
      logits_fn: tokens [B T] -> logits [B T V], compiled, without dropout.
      tokens: real text; one call per row, position and replacement.
      vocab_size: V.
      replacements: per token and row.
      rng: key that draws them.

    Returns:
      Proof; arrays: `own` and `others`, movement of output i by edits of token j.
    """
    failure, leak = None, None
    try:
        properties.assert_deterministic(logits_fn, tokens)
    except AssertionError as error:
        failure = str(error)
    drawn = properties.token_replacements(
        rng, tokens, vocab_size=vocab_size, count=replacements
    )
    movements = properties.edit_movements(logits_fn, tokens, drawn)
    silent = np.flatnonzero(movements.own.diagonal() == 0)
    if failure is None:
        leak = properties.find_leak(movements)
        if leak is not None:
            failure = str(leak)
        elif len(silent):
            failure = f"void: no edit of token {silent[0]} moved its own output"
    return Proof(
        name="edits",
        passed=failure is None,
        reason=failure or f"{drawn.size} edits moved no bit of an earlier logit",
        figures={
            "positions": tokens.shape[1],
            "edits": drawn.size,
            "leak": _leak_figures(leak),
        },
        arrays=movements._asdict(),
    )


def gradients(
    from_embeddings: properties.Function,
    embeddings: Float[properties.AnyArray, "B T E"],
    declared: Bool[np.ndarray, "T T"],
    *,
    rng: PRNGKeyArray,
) -> Proof:
    """Proof 2: outputs depend on exactly the inputs that the declared mask says.

    A weight below the smallest float (a score about 100 under its row's maximum in
    float32) has no gradient: several rows make sure that a dependence shows in one.

    Args:
      from_embeddings: [B T E] -> logits [B T V], without dropout.
      embeddings: of real text, in float32.
      declared: what may reach what through all layers, see `reachable`.
      rng: key of the random cotangents.

    Returns:
      Proof; arrays: `norms`, `dependency`, `declared`, all [T T].
    """
    norms = properties.jacobian_norms(from_embeddings, embeddings, rng=rng)
    dependency = norms != 0
    leak = properties.find_dependence(norms, declared)
    missing = np.argwhere(declared & ~dependency)
    failure = None
    if np.triu(declared, 1).any() or not declared.diagonal().all():
        failure = "the declared mask is not causal with every position seeing itself"
    elif leak is not None:
        failure = str(leak)
    elif len(missing):
        target, source = missing[0]
        failure = f"output {target} does not depend on input {source}, as declared"
    return Proof(
        name="gradients",
        passed=failure is None,
        reason=failure or "each output depends on exactly the declared inputs",
        figures={
            "positions": len(declared),
            "declared": int(declared.sum()),
            "outside_declared": int((dependency & ~declared).sum()),
            "missing_from_declared": len(missing),
            "leak": _leak_figures(leak),
        },
        arrays={"norms": norms, "dependency": dependency, "declared": declared},
    )


def learning(
    fit: Fit,
    per_token_losses: PerTokenLosses,
    *,
    vocab_size: int,
    context: int,
    corpus_size: int,
    fresh_rows: int,
    rng: PRNGKeyArray,
) -> Proof:
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
) -> Proof:
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
    return Proof(
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
            "overall": {key: _finite(values[-1]) for key, values in table.items()},
            "positions": {
                key: [_finite(value) for value in values[:-1]]
                for key, values in table.items()
            },
        },
        arrays={key: values[:-1] for key, values in table.items()},
    )


def _leak_figures(leak: properties.LeakError | None) -> dict[str, Any] | None:
    if leak is None:
        return None
    movement = _finite(leak.movement)
    return {"source": leak.source, "target": leak.target, "movement": movement}


def _finite(value: float) -> float | str:
    """JSON has no NaN and no infinity: their names instead."""
    return float(value) if math.isfinite(value) else str(float(value))
