"""Proof 3 of causality: nothing is learned from tokens that cannot be predicted.

A model is trained on uniformly random tokens over V ids, and judged on fresh ones: if
it predicts those better than log V, it has seen its targets. `loss_statistics` says by
how much it must be better, and what a proof that accuses nobody would have found.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int, PRNGKeyArray

from train.lm import loss
from train.proofs import dependence, loss_statistics

# Rows that a stranger's trainer trains on, each token once: at length 64 a quarter of
# a million tokens, 128 steps of 32 rows. A second pass would learn them by heart.
TRAIN_ROWS = 4096
# Fresh rows: with 65 ids at length 64, a leak of 1 % of log V at one position shows.
FRESH_ROWS = 1024

Fit = Callable[[Array, loss.Examples], Any]
PerTokenLosses = Callable[[Any, np.ndarray, loss.Examples], npt.ArrayLike]
# Rows of training [R T+1] to a function: rows [F T+1] to the losses [F T] of
# rows[:, 1:], in nats, without dropout.
Trainer = Callable[[np.ndarray], Callable[[np.ndarray], npt.ArrayLike]]


def prove(
    fit: Fit,
    per_token_losses: PerTokenLosses,
    *,
    vocab_size: int,
    context: int,
    corpus_size: int,
    fresh_rows: int,
    rng: PRNGKeyArray,
) -> dependence.Proof:
    """Proves that, trained on random tokens, the model does not beat log V.

    It is judged on fresh random tokens. The same is done with labels that are not
    shifted (the positive control), where a model and a loop that can learn at all must
    fall far below log V.

    Args:
      fit: (corpus int32 [M], examples) -> parameters; trains from nothing with the
        loss, data code and loop under test. `examples` turns a batch of tokens
        [B T+1] into (inputs, targets), both [B T].
      per_token_losses: (parameters, tokens int32 [R T+1], examples) -> losses in
        nats float32 [R T], without dropout.
      vocab_size: number V of ids.
      context: number T of positions.
      corpus_size: number M of tokens. A corpus that training sees several times is
        learned by heart, which costs loss on fresh data and so hides small leaks.
      fresh_rows: number R of rows of fresh data.
      rng: key of the corpus and the fresh data.

    Returns:
      Proof of `loss_statistics.judge`.
    """
    corpus_rng, fresh_rng = jax.random.split(rng)
    corpus = jax.random.randint(corpus_rng, (corpus_size,), 0, vocab_size)
    fresh = _random_rows(fresh_rng, (fresh_rows, context + 1), vocab_size)

    def losses(examples: loss.Examples) -> np.ndarray:
        return np.asarray(per_token_losses(fit(corpus, examples), fresh, examples))

    return loss_statistics.judge(
        losses(loss.next_token), losses(loss.same_token), vocab_size=vocab_size
    )


def prove_trainer(
    trainer: Trainer,
    *,
    vocab_size: int,
    length: int,
    rng: PRNGKeyArray,
    train_rows: int = TRAIN_ROWS,
    fresh_rows: int = FRESH_ROWS,
) -> dependence.Proof:
    """Makes proof 3 of a stranger's trainer: the same statistics, from its losses.

    The positive control trains and judges it on rows that count upward modulo V from
    a random start: there the next token follows from the last one, which is as hard
    to learn as the copying that a leak asks for.

    Args:
      trainer: rows int32 [R T+1] -> losses; called twice, each time it trains from
        nothing. losses: rows int32 [F T+1] -> nats [F T] of predicting rows[:, 1:],
        convertible to NumPy. It decides how many steps it trains.
      vocab_size: number V of ids.
      length: number T of positions.
      rng: key that draws all rows.
      train_rows: number R of rows of training.
      fresh_rows: number F of fresh rows.

    Returns:
      Proof of `loss_statistics.judge`.

    Raises:
      ValueError: `trainer` returns no function; or the losses have another shape, are
        narrower than float32 (they may round to below log V), or are below 0.
    """

    def losses(draw: Any, rng: PRNGKeyArray) -> np.ndarray:
        train_rng, fresh_rng = jax.random.split(rng)
        losses_of = trainer(draw(train_rng, (train_rows, length + 1), vocab_size))
        if not callable(losses_of):
            raise ValueError(
                f"expected trainer to return a function, got {type(losses_of).__name__}"
            )
        fresh = draw(fresh_rng, (fresh_rows, length + 1), vocab_size)
        nats = np.asarray(losses_of(fresh))
        if nats.shape != (fresh_rows, length) or nats.dtype not in (float, np.float32):
            raise ValueError(
                f"expected losses float32 or float64 {[fresh_rows, length]} of rows "
                f"{[fresh_rows, length + 1]}, got {nats.dtype} {list(nats.shape)}"
            )
        if nats.min() < -loss_statistics.ROUNDING:
            raise ValueError(f"expected losses -log p >= 0, got {nats.min():.4g}")
        return nats

    honest_rng, control_rng = jax.random.split(rng)
    return loss_statistics.judge(
        losses(_random_rows, honest_rng),
        losses(_counting_rows, control_rng),
        vocab_size=vocab_size,
    )


def _random_rows(
    rng: PRNGKeyArray, shape: tuple[int, int], vocab_size: int
) -> Int[np.ndarray, "R T_and_next"]:
    """Uniform ids, in an array that a trainer may write to."""
    return np.array(jax.random.randint(rng, shape, 0, vocab_size, np.int32))


def _counting_rows(
    rng: PRNGKeyArray, shape: tuple[int, int], vocab_size: int
) -> Int[np.ndarray, "R T_and_next"]:
    """Rows that count upward modulo V, each from a random start."""
    starts = _random_rows(rng, (shape[0], 1), vocab_size)
    return (starts + np.arange(shape[1], dtype=np.int32)) % vocab_size
