"""How a function over positions is called: what it takes, and what it must return.

    tokens int [B T], or vectors [B T E]   ->   one array [B T ...]

The function is foreign code: it gets copies, and whatever it raises is `Refused`.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, Shaped

from attention.properties import movements

# NumPy arrays [B T ...] -> [B T ...].
NumpyFunction = Callable[[np.ndarray], np.ndarray]


class Refused(ValueError):
    """The function raised, or returned something else than one array [B T ...]."""


def call(fn: NumpyFunction, inputs: Shaped[np.ndarray, "B T ..."]) -> np.ndarray:
    """Calls foreign code on a copy of the inputs, without its warnings.

    Args:
      fn: maps [B T ...] to [B T ...].
      inputs: token ids or vectors.

    Returns:
      Its outputs [B T ...].

    Raises:
      Refused: if it raises, or returns something else than one array [B T ...].
    """
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return checked_output(fn(inputs.copy()), inputs)
    except Refused:  # A more precise message than the one below.
        raise
    # Foreign code: anything may go wrong.
    except (Exception, SystemExit) as error:
        line = " ".join(str(error).split())
        raise Refused(f"{type(error).__name__}: {line}") from error


def checked_output(
    output: Any, inputs: Shaped[movements.AnyArray, "B T ..."]
) -> Shaped[np.ndarray, "B T ..."]:
    """The output of a function on these inputs, as a NumPy array.

    Raises:
      Refused: if it is something else than one array [B T ...].
    """
    if not isinstance(output, np.ndarray | jax.Array):
        raise Refused(f"returned {type(output).__name__!r}, expected one array")
    if output.shape[:2] != inputs.shape[:2]:
        raise Refused(
            f"expected outputs {list(inputs.shape[:2])} + features, "
            f"got {list(output.shape)}"
        )
    return np.asarray(output)


def checked_inputs(
    inputs: Shaped[movements.AnyArray, "..."], *, vocab_size: int | None
) -> Shaped[np.ndarray, "B T ..."]:
    """The inputs as a NumPy array.

    Args:
      inputs: token ids [B T], or floating point vectors [B T E].
      vocab_size: number V of ids, for tokens; None for vectors.

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


def in_library_of(inputs: Any, array: np.ndarray) -> Any:
    """The array as JAX's if `inputs` is JAX's, otherwise as it is."""
    return jnp.asarray(array) if isinstance(inputs, jax.Array) else array


def key_or_fixed(rng: PRNGKeyArray | None) -> PRNGKeyArray:
    """The key, or a fixed one in the place of None."""
    return jax.random.key(0) if rng is None else rng


def numpy_seed(rng: PRNGKeyArray | None) -> int:
    """A seed for NumPy, drawn from the key; None stands for a fixed key."""
    return int(jax.random.bits(key_or_fixed(rng)))


def require_two_positions(inputs: Shaped[movements.AnyArray, "..."]) -> None:
    """Raises ValueError on inputs [B T ...] of which no position could see another."""
    if inputs.ndim < 2 or inputs.shape[1] < 2:
        raise ValueError(
            f"expected inputs [B T ...] of 2 positions at least, got {inputs.shape}"
        )
