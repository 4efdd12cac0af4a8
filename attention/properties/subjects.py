"""A function over positions, ready to be examined, and the inputs to examine it on."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import PRNGKeyArray, Shaped

from attention.properties import calls, findings, movements


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function over positions, and how it may be examined.

    Attributes:
      fn: maps NumPy arrays [B T ...] to [B T ...], in evaluation mode; compiled if
        it is slow otherwise.
      length: number T of positions.
      vocab_size: number V of ids of a function of tokens int32 [B T]; None for a
        function of vectors.
      width: width E of a function of vectors float32 [B T E]; None for tokens.
      training: the same function in training mode; None if it has none.
      gradient: maps inputs [B T E] to the largest |cᵀ ∂yᵢ/∂xⱼ| [T T] for a random c,
        like `movements.jacobian_norms`; None if there are no derivatives.
      seed: seed of random inputs and replacements.
      token_edit_budget: about how many edits of tokens the probe 'edits' makes; it
        makes at least one at each position.
      tolerance: share of an edit's size, or of the largest derivative, that counts as
        rounding (as do a few units in the last place); with 0 no bit may move.
      rows: inputs [B T ...] that the caller wants examined; None for random ones.
    """

    fn: calls.NumpyFunction
    length: int
    vocab_size: int | None
    width: int | None
    training: calls.NumpyFunction | None
    gradient: Callable[[np.ndarray], np.ndarray] | None
    seed: int
    token_edit_budget: int
    tolerance: float = findings.ROUNDING
    rows: Shaped[np.ndarray, "B T ..."] | None = None


def on_inputs(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "..."],
    *,
    vocab_size: int | None,
    rng: PRNGKeyArray | None,
    token_edit_budget: int,
    tolerance: float,
) -> Subject:
    """A function to be examined on the caller's inputs, in the caller's arrays.

    Args:
      fn: maps [B T ...] to [B T ...], arrays of JAX or of NumPy like `inputs`.
      inputs: token ids [B T], or floating point vectors [B T E].
      vocab_size: number V of ids, for tokens; None for vectors.
      rng: key of the edits; None stands for a fixed one.
      token_edit_budget: about how many edits of tokens the probe 'edits' makes.
      tolerance: share of an edit's size that counts as rounding.

    Raises:
      ValueError: on inputs that are neither tokens nor vectors, tokens without
        `vocab_size`, fewer than 2 ids, no inputs at all, or a tolerance below 0.
    """
    rows = calls.checked_inputs(inputs, vocab_size=vocab_size)
    if not tolerance >= 0:
        raise ValueError(f"expected a tolerance of 0 or more, got {tolerance}")
    return Subject(
        fn=lambda array: fn(calls.in_library_of(inputs, array)),
        length=rows.shape[1],
        vocab_size=vocab_size,
        width=None if vocab_size is not None else rows.shape[2],
        training=None,
        gradient=None,
        seed=calls.numpy_seed(rng),
        token_edit_budget=token_edit_budget,
        tolerance=tolerance,
        rows=rows,
    )


def random_rows(
    subject: Subject, count: int, length: int
) -> Shaped[np.ndarray, "B T ..."]:
    """Random inputs: normal vectors, or tokens.

    Tokens are all ids in random order, as many as fit, and in every other row four ids
    again and again: a leak may hang on an id that is there, or on one that repeats.

    Args:
      subject: decides the kind of inputs, and the seed.
      count: number of rows.
      length: number of positions.
    """
    rng = np.random.default_rng([subject.seed, count, length])
    if subject.vocab_size is None:
        vectors = rng.standard_normal((count, length, subject.width or 1))
        return vectors.astype(np.float32)
    rows = np.empty((count, length), np.int32)
    for row in range(count):
        ids = rng.permutation(subject.vocab_size)
        rows[row] = (
            np.resize(ids, length) if row % 2 == 0 else rng.choice(ids[:4], length)
        )
    return rows


def input_rows(subject: Subject, count: int) -> Shaped[np.ndarray, "B T ..."]:
    """At least `count` rows: the caller's, repeated if they are fewer, or random."""
    if subject.rows is None:
        return random_rows(subject, count, subject.length)
    count = max(count, len(subject.rows))
    return subject.rows[np.arange(count) % len(subject.rows)]


def first_accepted(subject: Subject, batches: Sequence[np.ndarray]) -> np.ndarray:
    """The first batch that the function accepts, or the last: its size may be fixed."""
    for inputs in batches[:-1]:
        with contextlib.suppress(calls.Refused):
            calls.call(subject.fn, inputs)
            return inputs
    return batches[-1]
