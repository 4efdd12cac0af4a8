"""Dot-product attention against PyTorch's numbers and jax.nn.

Against the float64 loop it runs in tests/contract/contract_test.py.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from tests.support import files, readouts

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"local_window_size": 1},
        {"local_window_size": (2, 0), "is_causal": True},
        {"key_value_seq_lengths": [3, 7], "query_seq_lengths": [5, 2]},
        {"scale": 0.3, "bias": np.random.default_rng(7).normal(size=(1, N, T, 1))},
    ],
    ids=lambda arguments: " ".join(arguments) or "plain",
)
@readouts.on_cpu
def test_equals_jax_nn_wherever_every_row_sees_a_key(implementation, arguments):
    """Outputs and gradients; rows past query_seq_lengths are 0 too."""
    *inputs, output_gradient = readouts.random_arrays(
        1, (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    )
    arguments = dict(arguments)
    for name in ("key_value_seq_lengths", "query_seq_lengths"):
        if name in arguments:
            arguments[name] = jnp.array(arguments[name], jnp.int32)
    if "bias" in arguments:
        arguments["bias"] = jnp.asarray(arguments["bias"], jnp.float32)

    def both(attend):
        out, backward = jax.vjp(lambda *arrays: attend(*arrays, **arguments), *inputs)
        return (out, *backward(output_gradient))

    attend = functools.partial(
        attention.dot_product_attention, implementation=implementation
    )
    ours, theirs = both(attend), both(jax.nn.dot_product_attention)
    for found, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, wanted, atol=3e-6)


@pytest.mark.x64
@pytest.mark.parametrize("case", range(10))
def test_pytorch_in_float64(case):
    """PyTorch's SDPA in float64: forward and gradients, grouped heads, T ≠ S."""
    golden = files.arrays(GOLDEN / "sdpa_float64.npz")
    assert golden["count"] == 10
    arrays = [jnp.asarray(golden[f"{case}_{name}"]) for name in ("q", "k", "v", "do")]
    out, backward = jax.vjp(
        functools.partial(
            attention.dot_product_attention,
            is_causal=bool(golden[f"{case}_causal"]),
            implementation="reference",
        ),
        *arrays[:3],
    )
    names = ("out", "dq", "dk", "dv")
    for name, found in zip(names, (out, *backward(arrays[3])), strict=True):
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, golden[f"{case}_{name}"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", "flash"])
def test_sinks_that_take_nothing_have_finite_gradients(implementation):
    """A sink of -inf is none, in rows that see nothing too."""
    query, key, value = readouts.random_arrays(2, (1, 3, 2, 4), *[(1, 3, 2, 4)] * 2)

    def total(query, sinks):
        attend = functools.partial(attention.dot_product_attention, query, key, value)
        out = attend(
            sinks=sinks,
            key_value_seq_lengths=jnp.array([0]),
            implementation=implementation,
        )
        return jnp.sum(out**2)

    with jax.debug_nans(True):
        sinks = jnp.full(2, -jnp.inf)
        for gradient in jax.grad(total, argnums=(0, 1))(query, sinks):
            np.testing.assert_array_equal(gradient, 0)


def test_the_log_sum_exp_has_the_dtype_of_the_inputs():
    x = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    _, lse = attention.dot_product_attention(x, x, x, return_residual=True)
    assert lse.dtype == jnp.bfloat16
