"""Positions: the papers' formulas, their invariances, and the dtype of angles."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from attention import positions

RANDOM = np.random.default_rng(0)
LAYOUTS = ("half", "interleaved")


def test_sinusoidal_is_the_papers_formula() -> None:
    places = np.array([[0, 1, 2], [7, 40, 1000]])
    encoding = positions.sinusoidal(places, 6, base=100.0)
    assert encoding.shape == (2, 3, 6) and encoding.dtype == jnp.float32
    for index, p in np.ndenumerate(places):
        for i in range(3):
            angle = p / 100.0 ** (2 * i / 6)
            assert abs(encoding[(*index, 2 * i)] - math.sin(angle)) < 1e-4
            assert abs(encoding[(*index, 2 * i + 1)] - math.cos(angle)) < 1e-4


def test_rotary_turns_pairs_counterclockwise() -> None:
    """case B085: an offset goes in through the positions."""
    x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    for layout in LAYOUTS:
        here = positions.rotary(x, jnp.array([0]), layout=layout)
        there = positions.rotary(x, jnp.array([5]), layout=layout)
        np.testing.assert_array_equal(here, x)
        np.testing.assert_allclose(there[0, 0, 0], [0.283662, -0.958924], atol=1e-6)


@pytest.mark.parametrize(
    "layout, expected",
    [
        ("half", [-1.984111, 1.959901, 2.462378, 4.019800]),
        ("interleaved", [-1.142640, 1.922076, 2.959851, 4.029800]),
    ],
)
def test_rotary_layouts(layout: str, expected: list[float]) -> None:
    """case B087: the two ways to pair the entries of a head."""
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    rotated = positions.rotary(x, jnp.array([1]), layout=layout)
    np.testing.assert_allclose(rotated[0, 0], expected, atol=1e-6)
    assert jnp.array_equal(
        rotated, positions.rotary(x, jnp.array([4]), layout=layout, scaling=4.0)
    )


def test_rotary_layouts_differ_by_a_permutation_only() -> None:
    x = RANDOM.normal(size=(2, 3, 2, 8)).astype(np.float32)
    places = jnp.array([[3, 4, 5], [0, 9, 2]])
    evens_first = [0, 2, 4, 6, 1, 3, 5, 7]
    half = positions.rotary(x[..., evens_first], places, layout="half")
    interleaved = positions.rotary(x, places, layout="interleaved")
    np.testing.assert_allclose(half, interleaved[..., evens_first], atol=1e-6)


def rotary_loop(x: Any, places: np.ndarray, *, base: float) -> np.ndarray:
    """Half-split, in float64, one pair at a time; x is [B T N H], places [B T]."""
    rotated = np.array(x, np.float64)
    half = x.shape[-1] // 2
    for b, t, n, i in np.ndindex(*x.shape[:3], half):
        angle = places[b, t] / base ** (i / half)
        a, c = float(x[b, t, n, i]), float(x[b, t, n, half + i])
        rotated[b, t, n, i] = a * math.cos(angle) - c * math.sin(angle)
        rotated[b, t, n, half + i] = c * math.cos(angle) + a * math.sin(angle)
    return rotated


def test_rotary_takes_positions_of_each_row() -> None:
    x = RANDOM.normal(size=(2, 3, 2, 6)).astype(np.float32)
    places = np.array([[0, 1, 2], [40, 7, 3]])
    expected = rotary_loop(x, places, base=500.0)
    rotated = positions.rotary(x, places, base=500.0)
    np.testing.assert_allclose(rotated, expected, atol=1e-5)
    shared = positions.rotary(x, places[0], base=500.0)
    np.testing.assert_allclose(shared[0], rotated[0], atol=1e-6)
    np.testing.assert_array_equal(shared, positions.rotary(x, places[:1], base=500.0))
    # Any leading batch dimensions, and none.
    np.testing.assert_array_equal(
        positions.rotary(x[1], places[0], base=500.0), shared[1]
    )
    np.testing.assert_array_equal(
        positions.rotary(x[None], places[None], base=500.0), rotated[None]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_keeps_norms_and_scores_depend_on_distance_only(layout: str) -> None:
    q, k = RANDOM.normal(size=(2, 1, 4, 1, 8)).astype(np.float32)

    def scores(shift: int) -> Array:
        places = jnp.array([0, 3, 5, 11]) + shift
        rotated = positions.rotary(q, places, layout=layout)
        np.testing.assert_allclose(
            jnp.linalg.norm(rotated, axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5
        )
        keys = positions.rotary(k, places, layout=layout)
        return jnp.einsum("btnh,bsnh->bnts", rotated, keys)

    np.testing.assert_allclose(scores(0), scores(170), atol=1e-4)
    np.testing.assert_allclose(scores(0), scores(-6), atol=1e-4)
    # The sign of the distance matters: the rotation is not a function of |i - j|.
    a = positions.rotary(k, jnp.full(4, 3), layout=layout)
    b = positions.rotary(k, jnp.full(4, -3), layout=layout)
    assert np.abs((a - b) * q).max() > 0.1


@pytest.mark.parametrize("place", [257, 259])
def test_rotary_angles_are_float32_in_bfloat16_models(place: int) -> None:
    """case B075: bfloat16 knows neither position 257 nor 259."""
    x = jnp.asarray(RANDOM.normal(size=(1, 1, 64)), jnp.bfloat16)
    rotated = positions.rotary(x, jnp.array([place]))
    assert rotated.dtype == jnp.bfloat16
    exact = rotary_loop(np.asarray(x)[None], np.array([[place]]), base=10000.0)[0]
    np.testing.assert_allclose(rotated.astype(jnp.float32), exact, atol=1e-2)
    in_float32 = positions.rotary(x.astype(jnp.float32), jnp.array([place]))
    np.testing.assert_array_equal(rotated, in_float32.astype(jnp.bfloat16))


def test_rotary_computes_float64_in_float64() -> None:
    x = RANDOM.normal(size=(1, 2, 2, 8))
    places = np.array([[12345, 7]])
    with jax.enable_x64(True):
        rotated = positions.rotary(jnp.asarray(x), places)
        assert rotated.dtype == jnp.float64
        expected = rotary_loop(x, places, base=10000.0)
        np.testing.assert_allclose(rotated, expected, rtol=0, atol=1e-12)
        assert positions.rotary(jnp.asarray(x, jnp.float32), places).dtype == "float32"


ZERO = jnp.array([0])
ONES = jnp.ones((2, 3, 2, 4))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: positions.rotary(jnp.ones((3, 2, 5)), jnp.arange(3)),
            ValueError,
            "width must be even and at least 2, got 5",
        ),
        (lambda: positions.sinusoidal(1, 3), ValueError, "even .* got 3"),
        (lambda: positions.sinusoidal(1, 0), ValueError, "at least 2, got 0"),
        (lambda: positions.sinusoidal(1.5, 4), TypeError, "integers, got float32"),
        (
            lambda: positions.rotary(ONES, jnp.arange(3.0)),
            TypeError,
            "positions must be integers, got float32",
        ),
        (
            lambda: positions.rotary(jnp.array([[[1, 2]]]), ZERO),
            TypeError,
            "floating, got int32",
        ),
        (lambda: positions.rotary(ONES[0, 0], ZERO), ValueError, r"got \[2, 4\]"),
        (
            lambda: positions.rotary(ONES, jnp.arange(4)),
            ValueError,
            r"must be \[3\] or \[2, 3\] .*, got \[1, 4\]",
        ),
        (
            lambda: positions.rotary(ONES, jnp.zeros((3, 3), int)),
            ValueError,
            r"got \[3, 3\]",
        ),
        (
            lambda: positions.rotary(ONES, jnp.arange(3), layout="neox"),
            ValueError,
            "layout must be 'half' or 'interleaved', got 'neox'",
        ),
        (
            lambda: positions.rotary(ONES, jnp.arange(3), scaling=0.0),
            ValueError,
            "scaling must be positive, got 0.0",
        ),
    ],
)
def test_errors_say_what_was_expected_and_what_came(
    make: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
