"""Batches of a task's rows, and the right answers in them.

Row b of step s is drawn with `fold_in(fold_in(rng, s), b)`: a batch is a pure function
of seed and step, and a row the same in a batch of any size.
"""

import types
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from train.lm import loss
from train.studies import tasks

# Each split has keys of its own: what is chosen on one is judged on another.
SPLITS: Mapping[str, int] = types.MappingProxyType(
    {"train": 0, "validation": 1, "test": 2}
)


class Batch(NamedTuple):
    """Rows of a task, for `loss.cross_entropy` and the training step.

    Attributes:
      inputs: ids that the model reads.
      targets: the id that follows each input.
      mask: True where the target counts.
    """

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    mask: Bool[Array, "B T"]


def split_rng(seed: int | Integer[Array, ""], split: str) -> Array:
    """Makes the key of a split.

    Args:
      seed: seed of the run.
      split: a name of `SPLITS`.

    Returns:
      A key that differs between seeds and between splits.

    Raises:
      ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return jax.random.fold_in(jax.random.key(seed), SPLITS[split])


def draw(
    task: tasks.Task, rng: Array, step: int | Int[Array, ""], *, batch_size: int
) -> Batch:
    """Draws the batch of one step.

    Args:
      task: the distribution of the rows.
      rng: key of the split, into which step and row are folded.
      step: index of the step, possibly traced.
      batch_size: B.

    Returns:
      Inputs, targets and the mask of the targets that count.
    """
    rng = jax.random.fold_in(rng, step)

    def row(index: Array) -> tasks.Row:
        return task.row(jax.random.fold_in(rng, index))

    tokens, mask = jax.vmap(row)(jnp.arange(batch_size))
    return Batch(*loss.next_token(tokens.astype(jnp.int32)), mask)


def hits(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Counts right answers.

    Args:
      logits: scores of all ids at each position.
      targets: the right id at each position.
      mask: True where the target counts.

    Returns:
      Number of targets that count and score above all other ids, and number of targets
      that count. Neither a tie nor NaN is a right answer.
    """
    is_target = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)
    score = jnp.max(logits, axis=-1, where=is_target, initial=-jnp.inf)
    best_other = jnp.max(logits, axis=-1, where=~is_target, initial=-jnp.inf)
    right = (score > best_other) & mask
    return jnp.sum(right, dtype=jnp.int32), jnp.sum(mask, dtype=jnp.int32)
