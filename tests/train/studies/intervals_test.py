"""Intervals of means: a table's numbers, and how often they hold the truth."""

import numpy as np
import pytest

from train.studies import intervals


def test_against_a_table():
    """t of 4 degrees at 95 % is 2.776 (Student's table)."""
    interval = intervals.of_mean(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    width = 2.776 * np.sqrt(2.5 / 5)
    np.testing.assert_allclose(interval, (3, 3 - width, 3 + width), rtol=1e-3)
    assert str(interval) == "3 (1.04 to 4.96)"


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_covers_the_mean_as_often_as_it_says(level):
    rng = np.random.default_rng(0)
    ends = [intervals.of_mean(rng.normal(size=4), level=level) for _ in range(2000)]
    covered = np.mean([low <= 0 <= high for _, low, high in ends])
    assert abs(covered - level) < 4 * np.sqrt(level * (1 - level) / 2000)


def test_pairs_share_what_they_have_in_common():
    rng = np.random.default_rng(0)
    common = rng.normal(size=6)
    interval = intervals.of_difference(common + 0.1, common)
    np.testing.assert_allclose(interval, 0.1, atol=1e-9)


@pytest.mark.parametrize("samples", [[1.0], [], [1.0, np.nan], [[1.0, 2.0]]])
def test_refuses_what_has_no_interval(samples):
    with pytest.raises(ValueError, match="two or more finite samples"):
        intervals.of_mean(np.array(samples))
