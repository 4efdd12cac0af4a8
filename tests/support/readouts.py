"""What the tests of dot-product attention share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention

CPU = [name for name in attention.IMPLEMENTATIONS if name != "cudnn"]
# Those that honour every argument.
FULL = [name for name in CPU if name != "xla"]
on_cpu = pytest.mark.parametrize("implementation", CPU)
with_every_feature = pytest.mark.parametrize("implementation", FULL)

STATIC = ("is_causal", "implementation", "local_window_size", "return_residual")
attend = jax.jit(attention.dot_product_attention, static_argnames=STATIC)
attend_weights = jax.jit(attention.attention_weights, static_argnames="is_causal")


def random_arrays(seed, *shapes):
    """Standard normal float32 arrays."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def read(T, S, **arguments):
    """What each of T queries reads when all scores are equal.

    The mean of the values that it sees, 1 for key 0, 2 for key 1 and so on; 0 if it
    sees nothing.
    """
    query, key = jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1))
    value = key + jnp.arange(1.0, S + 1)[None, :, None, None]
    return np.asarray(attend(query, key, value, **arguments))[0, :, 0, 0]


def assert_reads(found, wanted):
    """Equal to the last bits."""
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)
