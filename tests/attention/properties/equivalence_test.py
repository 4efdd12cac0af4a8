"""attention.properties.equivalence: two functions are one, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import properties

X = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)


def test_equivalent_in_values_and_gradients():
    def double(tree):
        return {"y": tree["x"] * 2, "n": tree["n"]}

    arguments = {"x": X, "n": np.arange(3)}
    properties.assert_equivalent(
        double, lambda tree: {"y": tree["x"] + tree["x"], "n": tree["n"]}, arguments
    )
    with pytest.raises(AssertionError, match=r"output \['y'\]: .* at \[\d, \d, \d\]"):
        properties.assert_equivalent(
            double, lambda tree: double(tree) | {"y": tree["x"] * 2.01}, arguments
        )
    with pytest.raises(AssertionError, match="gradient by floating argument 0"):
        properties.assert_equivalent(
            double,
            lambda tree: double(tree) | {"y": jax.lax.stop_gradient(tree["x"]) * 2},
            arguments,
        )
    with pytest.raises(AssertionError, match=r"float16 \[2\] against float32 \[2\]"):
        properties.assert_equivalent(
            lambda x: x.astype(jnp.float16), jnp.asarray, np.ones(2, np.float32)
        )


def test_nan_equals_nan():
    """Two functions that leave the same places undefined are one."""
    undefined = np.array([1.0, -1.0], np.float32)
    properties.assert_equivalent(jnp.sqrt, lambda x: x**0.5, undefined)
    with pytest.raises(AssertionError, match="output"):
        properties.assert_equivalent(jnp.sqrt, lambda x: jnp.abs(x) ** 0.5, undefined)


@pytest.mark.parametrize("other", [lambda x: [x], lambda x: {"y": x}])
def test_another_structure_is_another_function(other):
    """Though the leaves are the same."""
    with pytest.raises(AssertionError, match="outputs PyTreeDef.* against PyTreeDef"):
        properties.assert_equivalent(lambda x: (x,), other, X)
