"""Measuring: functions in turn, rates, growth.

seconds ≈ c · Tᵅ,   α the slope of log(seconds) on log(T) by least squares
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Seconds that one measurement takes at least; shorter calls are repeated within it.
SHORTEST = 2e-3
# Turns that are taken whatever they cost, and lengths from which a slope is fitted.
LEAST_TURNS = 3
LEAST_LENGTHS = 3


def interleaved(
    runs: Mapping[str, Callable[[], Any]], turns: Iterable[Any]
) -> dict[str, list[float]]:
    """Times functions in turn, A B A B …, so that noise hits all alike.

    Args:
      runs: name -> function; each returns when its work is done.
      turns: as many as there are measurements of each; everything is called before
        the first, which is not counted.

    Returns:
      Seconds per call.
    """
    calls = {}
    for name, run in runs.items():
        run()
        calls[name] = math.ceil(SHORTEST / max(_seconds(run, 1), 1e-9))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in turns:
        for name, run in runs.items():
            seconds[name].append(_seconds(run, calls[name]))
    return seconds


def turns(rounds: int, *, seconds: float) -> Iterator[int]:
    """Counts up to `rounds`, but ends after three turns when the seconds are over."""
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= LEAST_TURNS and time.perf_counter() - start > seconds:
            return
        yield turn


def _seconds(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def quartiles(seconds: Sequence[float]) -> list[float]:
    """First quartile, median and third quartile, in milliseconds."""
    found: list[float] = np.percentile(np.array(seconds) * 1e3, (25, 50, 75)).tolist()
    return found


def growth(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """The exponent α of values ≈ c · sizesᵅ, by least squares in the logarithms.

    Args:
      sizes: such as lengths T.
      values: such as seconds or bytes; what is not positive is left out.

    Returns:
      α; None if fewer than three different sizes are left.
    """
    points = [(x, y) for x, y in zip(sizes, values, strict=True) if y > 0]
    if len({x for x, _ in points}) < LEAST_LENGTHS:
        return None
    x, y = np.log(np.array(points, np.float64)).T
    return float(np.polyfit(x, y, 1)[0])


def matrix_product(size: int, dtype: str) -> tuple[Callable[[], Any], float]:
    """A large square product, for the rate that this machine reaches at the moment.

    Args:
      size: rows and columns.
      dtype: of its operands.

    Returns:
      The function to be timed, and the floating-point operations of a call.
    """
    square = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    return lambda: jax.block_until_ready(product(square, square)), 2.0 * size**3
