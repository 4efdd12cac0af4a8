"""Turns, quartiles and fitted exponents."""

import itertools

import numpy as np
import pytest

from train.report import stopwatch


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_functions_take_turns_and_keep_their_own_times(clock):
    called = []

    def run(name, seconds):
        called.append(name)
        clock.now += seconds

    seconds = stopwatch.interleaved(
        {"a": lambda: run("a", 1.0), "b": lambda: run("b", 2.0)}, range(3)
    )
    assert seconds == {"a": [1.0] * 3, "b": [2.0] * 3}
    # Two calls of each come before anything that counts.
    assert called == [*"aabb", *"ababab"]


def test_short_calls_are_repeated_and_divided(clock):
    calls = itertools.count()

    def run():
        next(calls)
        clock.now += stopwatch.SHORTEST / 8

    seconds = stopwatch.interleaved({"short": run}, range(2))
    assert next(calls) == 2 + 2 * 8
    np.testing.assert_allclose(seconds["short"], stopwatch.SHORTEST / 8)


@pytest.mark.parametrize("each, expected", [(0.1, 7), (1.0, 4), (10.0, 3)])
def test_turns_end_with_the_seconds_but_not_before_the_third(clock, each, expected):
    count = 0
    for _ in stopwatch.turns(7, seconds=3.5):
        count += 1
        clock.now += each
    assert count == expected


def test_quartiles_are_milliseconds():
    times = [0.004, 0.001, 0.002, 0.003, 0.005]
    np.testing.assert_allclose(stopwatch.quartiles(times), [2, 3, 4])


def test_exponents_are_those_of_the_data():
    lengths = [512, 1024, 2048, 4096]
    noise = np.array([1.02, 0.98, 0.98, 1.02])  # orthogonal to the slope
    for exponent in (0.0, 1.0, 1.5, 2.0):
        values = 3e-7 * np.array(lengths) ** exponent * noise
        assert stopwatch.growth(lengths, values) == pytest.approx(exponent, 1e-3)


def test_no_exponent_from_less_than_three_lengths():
    assert stopwatch.growth([1, 2], [1, 2]) is None
    assert stopwatch.growth([1, 1, 2], [1, 1, 2]) is None
    assert stopwatch.growth([1, 2, 4, 8], [0, 0, 4, 8]) is None
    assert stopwatch.growth([], []) is None


def test_a_matrix_product_counts_its_operations():
    run, flops = stopwatch.matrix_product(8, "float32")
    assert flops == 2 * 8**3
    np.testing.assert_array_equal(run(), np.full((8, 8), 8.0))
