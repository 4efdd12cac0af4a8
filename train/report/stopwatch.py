"""Time: of functions in turns, of a matrix product, and its growth with the size.

seconds ≈ c · Tᵅ,   α the slope of log(seconds) on log(T) by least squares
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Least seconds of one measurement; shorter calls are repeated within it.
SHORTEST = 2e-3
# Least number of turns whatever they cost, and of sizes for a fit.
LEAST_TURNS = 3
LEAST_LENGTHS = 3


def interleaved(
    runs: Mapping[str, Callable[[], Any]], turns: Iterable[Any]
) -> dict[str, list[float]]:
    """Times functions in turns, A B A B …, so that noise affects all of them.

    Each function is called once before the first turn, to warm up.

    Args:
      runs: functions by name; each returns when its work is done.
      turns: an iterable with one element for each measurement of all functions.

    Returns:
      Seconds per call of each measurement, by name.
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
    """Counts up to `rounds`, but stops after three turns once the seconds are over."""
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
    """Computes first quartile, median and third quartile, in milliseconds."""
    quarters = np.percentile(np.array(seconds) * 1e3, (25, 50, 75))
    return [float(x) for x in quarters]


def growth(
    sizes: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray
) -> float | None:
    """Fits the exponent α of values ≈ c · sizesᵅ, by least squares in the logarithms.

    Args:
      sizes: sizes, such as lengths T.
      values: values, such as seconds or bytes; those that are not positive are left
        out.

    Returns:
      α; None if fewer than three different sizes remain.
    """
    points = [(x, y) for x, y in zip(sizes, values, strict=True) if y > 0]
    if len({x for x, _ in points}) < LEAST_LENGTHS:
        return None
    x, y = np.log(np.array(points, np.float64)).T
    return float(np.polyfit(x, y, 1)[0])


def matrix_product(size: int, dtype: str) -> tuple[Callable[[], Any], float]:
    """Makes a large square product, whose rate is that of the machine at the moment.

    Args:
      size: rows and columns.
      dtype: dtype of the operands.

    Returns:
      The function to be timed, and the floating-point operations of a call.
    """
    square = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    return lambda: jax.block_until_ready(product(square, square)), 2.0 * size**3
