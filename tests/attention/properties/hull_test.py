"""properties.assert_in_hull: what is a mean of the values passes, nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import properties

VALUES = np.random.default_rng(0).normal(size=(2, 4, 3))
# Rows sum to 1.
MEAN = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]


def mixed(weights):
    return lambda v: np.einsum("ts,bsd->btd", weights, v)


def test_means_pass():
    properties.assert_in_hull(mixed(MEAN), VALUES)


def test_functions_of_jax_in_their_own_precision():
    """Values of 100, in float64 of NumPy and in float32 of JAX."""
    fn = jax.jit(lambda v: jnp.einsum("ts,bsd->btd", MEAN.astype(np.float32), v))
    properties.assert_in_hull(fn, 100 * VALUES)
    properties.assert_in_hull(fn, jnp.asarray(100 * VALUES, jnp.float32))


def test_each_channel_may_have_weights_of_its_own():
    own = np.stack([MEAN, np.eye(4), MEAN[::-1]])
    properties.assert_in_hull(lambda v: np.einsum("dts,bsd->btd", own, v), VALUES)


def test_a_negative_weight():
    weights = MEAN.copy()
    weights[2, :2] += [0.5, -0.5]
    with pytest.raises(AssertionError, match="output 2 of row 0 takes value 1 -0.167"):
        properties.assert_in_hull(mixed(weights), VALUES)


@pytest.mark.parametrize("factor", [0.9, 1.1, np.nan])
def test_weights_that_do_not_sum_to_one(factor):
    with pytest.raises(AssertionError, match="sum of the weights|takes value"):
        properties.assert_in_hull(mixed(factor * MEAN), VALUES)


def test_outputs_that_are_no_sum():
    """Weights of one value alone say nothing about a maximum over the values."""
    with pytest.raises(AssertionError, match="output: "):
        properties.assert_in_hull(
            lambda v: mixed(MEAN)(v) + np.prod(v, axis=1, keepdims=True), VALUES
        )
