"""What the planted leaks and the honest models are made of, in NumPy.

A specimen is what a stranger would hand to the verifier: a callable of tokens int
[B T] or of vectors float32 [B T E], of any B and T.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

# A multiple of a chunk, so that only other lengths leave a ragged one.
LENGTH = 32
CHUNK = 8
WIDTH = 6
HEADS = 3
VOCAB = 17
# Of a model of bytes, and the one that ends a transmission.
BYTES = 256
END_OF_TRANSMISSION = 4


@dataclasses.dataclass(frozen=True)
class Specimen:
    """One row of `leaks.LEAKS` or `honest.HONEST`.

    Attributes:
      make: returns the callable that is examined.
      input: 'tokens' or 'embeddings'.
      vocab_size: V, of tokens.
      needs: a package that is no dependency of this one; '' if none.
      trainer: rows int32 [R T+1] -> losses, where losses(rows int32 [F T+1]) are
        nats [F T]; None if there is none.
      length: T.
      shows: of an honest model: what it may be seen to do, of 'rounding' and
        'nan-unsafe'.
    """

    make: Callable[[], Callable[..., Any]]
    input: str = "embeddings"
    vocab_size: int = VOCAB
    needs: str = ""
    trainer: Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]] | None = None
    length: int = LENGTH
    shows: tuple[str, ...] = ()


def vectors(fn, **fields):
    """A specimen that is a NumPy function of vectors."""
    return Specimen(lambda: in_numpy(fn), **fields)


def tokens(fn, **fields):
    """A specimen that is a NumPy function of tokens."""
    return Specimen(lambda: in_numpy(fn), input="tokens", **fields)


def in_numpy(fn):
    """The function, for arrays only: many of NumPy's own take JAX's tracers."""

    @functools.wraps(fn)
    def of_arrays(inputs, **mode):
        return fn(np.asarray(inputs), **mode)

    return of_arrays


def lazy(module, name, **fields):
    """A specimen whose module is imported only when it is made."""
    return Specimen(
        lambda: getattr(importlib.import_module(f"tests.specimens.{module}"), name)(),
        **fields,
    )


def normal(*shape, seed):
    """Standard normal weights over the square root of their first axis."""
    weights = np.random.default_rng(seed).normal(size=shape) / math.sqrt(shape[0])
    return weights.astype(np.float32)


EMBEDDING = math.sqrt(BYTES) * normal(BYTES, WIDTH, seed=0)
# Of queries, keys and values.
PROJECTIONS = normal(WIDTH, 3 * WIDTH, seed=1)


def logits(y, vocab_size=VOCAB):
    """[B T E] to [B T V]."""
    return y @ EMBEDDING[:vocab_size].T


def causal(length, k=0):
    """bool [T T]: the lower triangle, with k diagonals above it."""
    return np.tril(np.ones((length, length), bool), k)


def softmax(scores, axis=-1):
    shifted = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)


def split(x):
    """[B T E] to [B N T H]."""
    return np.moveaxis(x.reshape(*x.shape[:2], HEADS, -1), 2, 1)


def merge(heads):
    """[B N T H] to [B T E]."""
    return np.moveaxis(heads, 1, 2).reshape(heads.shape[0], heads.shape[2], -1)


def projected(x):
    """Scores [B N T T] and values [B N T H] of three heads."""
    query, key, value = (split(y) for y in np.split(x @ PROJECTIONS, 3, axis=-1))
    return query @ key.mT / math.sqrt(query.shape[-1]), value


def attend(x, visible):
    """Attention of three heads; visible: bool, broadcast to [B N T T]."""
    scores, value = projected(x)
    return merge(softmax(np.where(visible, scores, -np.inf)) @ value)


def attend_causally(x):
    """The honest one, where only one thing is to be wrong."""
    return attend(x, causal(x.shape[1]))


def normalised(x, axis=-1):
    """Mean 0 and standard deviation 1 over `axis`."""
    centred = x - x.mean(axis=axis, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(axis=axis, keepdims=True) + 1e-5)


def convolve(x, taps, first):
    """y_t = Σ_k taps[k] x_{t+first+k}, zeros beyond the ends; taps [K] or [K E]."""
    length, last = x.shape[1], first + len(taps) - 1
    padded = np.pad(x, ((0, 0), (max(-first, 0), max(last, 0)), (0, 0)))
    start = max(first, 0)
    return sum(
        tap * padded[:, start + k : start + k + length] for k, tap in enumerate(taps)
    )
