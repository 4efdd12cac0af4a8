"""attention.properties.movements: what moved and how far, to the bit."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attention.properties import movements

B, T, E = 2, 6, 3
KEY = jax.random.key(0)
INPUTS = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
REPLACEMENTS = np.random.default_rng(1).normal(size=(2, B, T, E)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_bits_are_compared_and_nan_is_nan(dtype):
    base = np.array([[1, 0, np.nan, np.nan, np.inf, 2, 3]], dtype)
    edited = np.array([[1, -0.0, -np.nan, 1, np.inf, np.inf, 5]], dtype)
    numbers, nonfinite = movements.changes(base, edited)
    np.testing.assert_array_equal(numbers[0, [0, 2, 3, 4, 5, 6]], [0, 0, 0, 0, 0, 2])
    assert 0 < numbers[0, 1] < 1e-300
    np.testing.assert_array_equal(nonfinite, [[0, 0, 0, 1, 0, 1, 0]])
    movement = movements.movement(base, edited)
    np.testing.assert_array_equal(movement, np.where(nonfinite, np.nan, numbers))
    # Over features: a number that moved shows beside one that was lost.
    wide = [np.stack(pair, -1) for pair in ((base, base), (edited, edited[:, ::-1]))]
    numbers, nonfinite = movements.changes(*wide)
    assert numbers[0, 1] == np.inf or numbers[0, 1] < 1e-300 and nonfinite[0, 1]
    assert numbers[0, 0] == 4 and not nonfinite[0, 0]


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (2, 3, 0)])
def test_nothing_has_not_moved(shape):
    nothing = np.zeros(shape, np.float32)
    numbers, nonfinite = movements.changes(nothing, nothing)
    chex.assert_shape([numbers, nonfinite], shape[:2])
    assert not numbers.any() and not nonfinite.any()


def test_jacobian_norms_see_what_squares_would_lose_and_what_is_nan():
    def fn(x):
        undefined = jnp.sqrt(0 * x[4])
        return (x.at[0].add(1e-30 * x[3])).at[1].add(undefined)

    norms = movements.jacobian_norms(fn, INPUTS[0], rng=KEY)
    assert 0 < norms[0, 3] < 1e-28
    assert np.isnan(norms[1, 4])
    expected = np.eye(T, dtype=bool)
    expected[0, 3] = True
    np.testing.assert_array_equal(
        np.delete(norms != 0, 4, 1), np.delete(expected, 4, 1)
    )


@pytest.mark.parametrize("inputs", [np.zeros((2, 3), int), np.zeros(3, np.float32)])
def test_jacobian_norms_refuse_other_inputs(inputs):
    with pytest.raises(ValueError, match="expected floating point inputs"):
        movements.jacobian_norms(jnp.sin, inputs, rng=KEY)
