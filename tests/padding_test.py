"""What stands beyond the lengths of a row reaches nothing, NaN and inf included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks
from tests import oracle, probes

B, T, S, N, K, H = 2, 4, 5, 4, 2, 4
KEY_LENGTHS, QUERY_LENGTHS = np.array([3, 5]), np.array([4, 2])
BEYOND_KEYS = np.arange(S) >= KEY_LENGTHS[:, None]
BEYOND_QUERIES = np.arange(T) >= QUERY_LENGTHS[:, None]

# Ways to say both lengths, and which keys are visible besides.
SAID = {
    "arguments": (
        lambda keys, queries: {
            "key_value_seq_lengths": keys,
            "query_seq_lengths": queries,
        },
        np.ones((T, S), bool),
    ),
    "and": (
        lambda keys, queries: {
            "mask": masks.causal(offset=1) & masks.lengths(keys, queries)
        },
        np.tri(T, S, 1, dtype=bool),
    ),
    "or": (
        lambda keys, queries: {
            "mask": masks.lengths(keys - 1, queries) | masks.lengths(keys, queries)
        },
        np.ones((T, S), bool),
    ),
    "both": (
        lambda keys, queries: {
            "mask": masks.lengths(keys) & masks.window(1, 3),
            "query_seq_lengths": queries,
            "is_causal": True,
        },
        np.tri(T, S, dtype=bool) & ~np.tri(T, S, -2, dtype=bool),
    ),
}


@pytest.mark.parametrize("said", SAID)
@probes.on_cpu
def test_padding_reaches_nothing(implementation, said):
    """Outputs and all gradients are bit for bit those with zeros there."""
    arrays = probes.random_arrays(
        0, (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, N, T, S), (B, T, N, H)
    )
    *inputs, output_gradient = arrays
    say, visible = SAID[said]
    beyond = [
        BEYOND_QUERIES[:, :, None, None],
        BEYOND_KEYS[:, :, None, None],
        BEYOND_KEYS[:, :, None, None],
        BEYOND_KEYS[:, None, None, :] | BEYOND_QUERIES[:, None, :, None],
    ]

    @jax.jit
    def answers(inputs, keys, queries):
        def f(*inputs):
            return attention.dot_product_attention(
                *inputs,
                **say(keys, queries),
                implementation=implementation,
                return_residual=True,
            )

        out, backward, residual = jax.vjp(f, *inputs, has_aux=True)
        weights = attention.attention_weights(
            *inputs[:2], inputs[3], **say(keys, queries)
        )
        return backward(output_gradient), out, residual, weights

    found = {}
    for junk in (0.0, np.nan, np.inf, -np.inf, 3e38):
        padded = [jnp.where(b, junk, x) for x, b in zip(inputs, beyond, strict=True)]
        found[junk] = answers(padded, KEY_LENGTHS, QUERY_LENGTHS)
        for array, wanted in zip(
            jax.tree.leaves(found[junk]), jax.tree.leaves(found[0.0]), strict=True
        ):
            np.testing.assert_array_equal(array, wanted)
    gradients, out, _, weights = found[0.0]
    visible = np.broadcast_to(visible & ~beyond[3], (B, N, T, S))
    wanted = oracle.attention(*inputs[:3], visible=visible, bias=inputs[3])
    np.testing.assert_allclose(out, wanted["out"], atol=2e-6)
    np.testing.assert_allclose(weights, wanted["weights"], atol=2e-6)
    for gradient, b in zip(gradients, beyond, strict=True):
        assert np.all(np.isfinite(gradient))
        assert np.all(np.where(b, gradient, 0) == 0)
        assert np.any(np.asarray(gradient) != 0)
