"""Which inputs a probe edits, where, and into what.

A `Subject` is the function and what is known of it. Edits of all rows of a batch at
once, at one position, show what an output sees of its future in few calls; edits of
one row at a time show what rows see of one another.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray, Shaped

from attention.properties import equivalence, findings, movements

# Tokens (more fit no cache) and numbers of output in one call, at most.
_CALL_TOKENS, _CALL_OUTPUTS = 2**11, 2**24

# Replacements [R ...] of one input; the same number R for each.
Values = Callable[[np.random.Generator, np.ndarray], np.ndarray]
# Inputs, and edits of them.
Edits = tuple[Shaped[np.ndarray, "B T ..."], Iterator[findings.Edit]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function over positions, and how it may be examined.

    Attributes:
      fn: [B T ...] -> [B T ...], NumPy arrays, in evaluation mode; compiled if slow.
      length: T.
      vocab_size: V of a function of tokens int32 [B T]; None: of vectors.
      width: E of a function of vectors float32 [B T E]; None: of tokens.
      training: the same function in training mode, if it has one.
      gradient: inputs [B T E] -> largest |cᵀ ∂yᵢ/∂xⱼ| [T T] for a random c, as of
        `movements.jacobian_norms`, if it can be had.
      seed: of inputs and replacements.
      edits: about how many edits of tokens the probe of every replacement makes; one
        per position at least.
      tolerance: share of an edit's size, or of the largest derivative, that is rounding
        (as are a few units in the last place); 0: no bit may move.
      rows: inputs [B T ...] of the caller's own; None: random ones.
    """

    fn: findings.Function
    length: int
    vocab_size: int | None
    width: int | None
    training: findings.Function | None
    gradient: Callable[[np.ndarray], np.ndarray] | None
    seed: int
    edits: int
    tolerance: float = findings.ROUNDING
    rows: Shaped[np.ndarray, "B T ..."] | None = None


def given(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "B T ..."],
    *,
    vocab_size: int | None,
    rng: PRNGKeyArray | None,
    edits: int,
    tolerance: float,
) -> Subject:
    """A function on the caller's own inputs, whose kind of arrays it gets.

    Args:
      fn: maps [B T ...] to [B T ...], of JAX's or NumPy's arrays.
      inputs: token ids [B T], or floating point vectors [B T E].
      vocab_size: V, for tokens only.
      rng: key of the edits; None: a fixed one.
      edits: as of `Subject`.
      tolerance: as of `Subject`.

    Raises:
      ValueError: as of `checked`, or a tolerance below 0.
    """
    rows = checked(inputs, vocab_size=vocab_size)
    if not tolerance >= 0:
        raise ValueError(f"expected a tolerance of 0 or more, got {tolerance}")
    return Subject(
        fn=lambda x: fn(like(inputs, x)),
        length=rows.shape[1],
        vocab_size=vocab_size,
        width=None if vocab_size is not None else rows.shape[2],
        training=None,
        gradient=None,
        seed=seed(rng),
        edits=edits,
        tolerance=tolerance,
        rows=rows,
    )


def checked(
    inputs: Shaped[movements.AnyArray, "B T ..."], *, vocab_size: int | None
) -> Shaped[np.ndarray, "B T ..."]:
    """The inputs as NumPy's.

    Raises:
      ValueError: on inputs that are neither tokens nor vectors, tokens without
        `vocab_size`, fewer than 2 ids, or no inputs at all.
    """
    rows = np.asarray(inputs)
    kind, ndim = (jnp.floating, 3) if vocab_size is None else (jnp.integer, 2)
    if rows.ndim != ndim or not jnp.issubdtype(rows.dtype, kind):
        raise ValueError(
            "expected token ids [B T] and vocab_size, or floating point vectors "
            f"[B T E] without, got {rows.dtype} {list(rows.shape)} and "
            f"vocab_size={vocab_size}"
        )
    if vocab_size is not None and vocab_size < 2:
        raise ValueError(f"expected a vocab_size of 2 or more, got {vocab_size}")
    if not rows.size:
        raise ValueError(f"expected inputs, got none: {rows.dtype} {list(rows.shape)}")
    return rows


def like(inputs: Any, x: np.ndarray) -> Any:
    """An array as it would come from the caller."""
    return jnp.asarray(x) if isinstance(inputs, jax.Array) else x


def seed(rng: PRNGKeyArray | None) -> int:
    """NumPy's seed in the place of a key; None: of a fixed one."""
    return int(jax.random.bits(equivalence.key_or_fixed(rng)))


def draw(subject: Subject, count: int, length: int) -> Shaped[np.ndarray, "B T ..."]:
    """Random rows: normal vectors, or tokens.

    Tokens are all ids in random order, as many as fit, and in every other row four ids
    again and again: a leak may hang on an id that is there, or on one that repeats.
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


def rows_of(subject: Subject, count: int, length: int) -> Shaped[np.ndarray, "B T ..."]:
    """The caller's rows, at least `count` of them, or random ones."""
    if subject.rows is None:
        return draw(subject, count, length)
    count = max(count, len(subject.rows))
    return subject.rows[np.arange(count) % len(subject.rows)]


def ordinary(subject: Subject, count: int) -> Values:
    """Other ids, all different; or vectors of the scale of the inputs."""
    vocab_size = subject.vocab_size
    if vocab_size is None:
        return lambda rng, x: findings.scale(x) * rng.standard_normal((count, *x.shape))

    def others(rng: np.random.Generator, token: np.ndarray) -> np.ndarray:
        turn = (rng.integers(vocab_size - 1) + np.arange(count)) % (vocab_size - 1)
        return (token + 1 + turn) % vocab_size

    return others


def together(
    subject: Subject, rows: Shaped[np.ndarray, "B T ..."], values: Values
) -> Edits:
    """One edit in every row of a batch, all at the same position."""
    rng = np.random.default_rng(subject.seed)
    count = len(values(rng, rows[0, 0]))
    length, width = rows.shape[1], subject.vocab_size or rows[0, 0].size
    slots = min(_CALL_TOKENS // length, _CALL_OUTPUTS // (length * width))
    most = max(1, min(count, slots // len(rows)))
    sizes = sorted({most, min(2, most), 1}, reverse=True)
    inputs = accepted(subject, [np.repeat(rows, n, axis=0) for n in sizes])
    copies = len(inputs) // len(rows)
    everything = np.ones(len(inputs), bool)

    def edits() -> Iterator[findings.Edit]:
        for position in range(length):
            replacements = np.stack([values(rng, row[position]) for row in rows])
            for start in range(0, count, copies):
                chosen = (start + np.arange(copies)) % count
                edited = inputs.copy()
                # A huge number is infinite in float16.
                with np.errstate(over="ignore"):
                    some = replacements[:, chosen].astype(inputs.dtype)
                edited[:, position] = some.reshape(len(inputs), *some.shape[2:])
                yield findings.Edit(position, everything, edited, since=position)

    return inputs, edits()


def each_first(row: Int[np.ndarray, "T"], count: int, *, vocab_size: int) -> Edits:
    """Rows that begin with different ids; edits behind it, halfway and at the end."""
    inputs = np.repeat(row[None], count, axis=0)
    inputs[:, 0] = (row[0] + 1 + np.arange(count)) % vocab_size

    def edits() -> Iterator[findings.Edit]:
        for position in sorted({1, len(row) // 2, len(row) - 1} - {0}):
            edited = inputs.copy()
            edited[:, position] = (row[position] + 1) % vocab_size
            yield findings.Edit(position, np.ones(count, bool), edited, since=position)

    return inputs, edits()


def one_row_at_a_time(
    subject: Subject,
    rows: Shaped[np.ndarray, "B T ..."],
    places: Iterable[tuple[int, int]],
    values: Values,
    *,
    causal: bool,
) -> Edits:
    """Edits in one row of the batch, one by one, at each of the places (position, row).

    If `causal`, earlier outputs of the row itself must not move either.
    """
    rng = np.random.default_rng(subject.seed)

    def edits() -> Iterator[findings.Edit]:
        for position, row in places:
            since = position if causal else 0
            for value in values(rng, rows[row, position]):
                edited = rows.copy()
                edited[row, position] = value
                yield findings.Edit(
                    position, np.arange(len(rows)) == row, edited, since
                )

    return rows, edits()


def accepted(
    subject: Subject, batches: Sequence[Shaped[np.ndarray, "B T ..."]]
) -> Shaped[np.ndarray, "B T ..."]:
    """The first batch that the function accepts, or the last: its size may be fixed."""
    for inputs in batches[:-1]:
        with contextlib.suppress(findings.Refused):
            findings.call(subject.fn, inputs)
            return inputs
    return batches[-1]
