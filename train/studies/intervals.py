"""Confidence intervals of means, over runs that differ in their seed.

    x̄ ± t s / √n        t the quantile of Student's distribution with n - 1 degrees

Exact for normal x; for bounded or skewed x with few runs an approximation. Student,
The probable error of a mean, 1908.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and the ends of its interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Three significant digits of each."""
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


def of_mean(samples: Float[np.ndarray, "R"], *, level: float = LEVEL) -> Interval:
    """The interval of the mean of independent samples.

    Args:
      samples: at least two.
      level: chance that such an interval holds the mean.

    Raises:
      ValueError: fewer than two samples, or one that is not finite.
    """
    samples = np.asarray(samples, np.float64)
    if samples.ndim != 1 or len(samples) < 2 or not np.isfinite(samples).all():
        raise ValueError(f"expected two or more finite samples, got {samples}")
    mean = float(samples.mean())
    error = float(samples.std(ddof=1)) / len(samples) ** 0.5
    width = float(stats.t.ppf((1 + level) / 2, len(samples) - 1)) * error
    return Interval(mean, mean - width, mean + width)


def of_difference(
    samples: Float[np.ndarray, "R"],
    others: Float[np.ndarray, "R"],
    *,
    level: float = LEVEL,
) -> Interval:
    """The interval of the mean of `samples - others`, paired by their seeds."""
    return of_mean(np.asarray(samples) - np.asarray(others), level=level)
