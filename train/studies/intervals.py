"""Confidence intervals of means over runs that differ in their seed.

    x̄ ± t s / √n        t: quantile of Student's distribution, n - 1 degrees of freedom

They are exact for normal x, and an approximation for few runs of a bounded or skewed x.
Student, The probable error of a mean, 1908.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Formats all three with three significant digits."""
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


def of_mean(samples: Float[np.ndarray, "R"], *, level: float = LEVEL) -> Interval:
    """Computes Student's interval of the mean of independent samples.

    Args:
      samples: at least two numbers, one of each run.
      level: probability that such an interval covers the true mean.

    Returns:
      The sample mean and the ends of the interval, which coincide with the mean where
      all samples are equal.

    Raises:
      ValueError: there are fewer than two samples, or one is not finite.
    """
    samples = np.asarray(samples, np.float64)
    if samples.ndim != 1 or len(samples) < 2 or not np.isfinite(samples).all():
        raise ValueError(f"expected two or more finite samples, got {samples}")
    mean = float(samples.mean())
    # Not `stats.t.interval`, which gives NaN for samples that are all equal.
    quantile = stats.t.ppf((1 + level) / 2, df=len(samples) - 1)
    half_width = float(quantile * stats.sem(samples))
    return Interval(mean, mean - half_width, mean + half_width)


def of_difference(
    samples: Float[np.ndarray, "R"],
    baseline: Float[np.ndarray, "R"],
    *,
    level: float = LEVEL,
) -> Interval:
    """Computes the interval of the mean difference of paired samples.

    Args:
      samples: one number of each run.
      baseline: what is subtracted: one number of each run, in the same order of seeds.
      level: probability that such an interval covers the true mean.

    Returns:
      The mean of `samples - baseline` and the ends of its interval.

    Raises:
      ValueError: there are fewer than two pairs, or a difference is not finite.
    """
    return of_mean(np.asarray(samples) - np.asarray(baseline), level=level)


def joint_level(count: int) -> float:
    """Computes the level at which `count` intervals hold together at `LEVEL`.

    Bonferroni's correction, 1 - (1 - LEVEL) / count, needs no independence.

    Args:
      count: number of intervals, at least 1.
    """
    return 1 - (1 - LEVEL) / count
