"""Mamba as a mixer and as a language model; its logits are in pretrained_test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import mamba
from tests.support import recurrences

B, T, E = 2, 5, 4
(X,) = recurrences.normal(7, (B, T, E))
MIXER = mamba.MambaMixer(state_size=3, use_bias=True)


def test_is_a_mixer():
    recurrences.assert_is_a_mixer(MIXER, X)


def test_biases_may_be_left_out():
    module = MIXER.clone(use_bias=False, use_conv_bias=False)
    given = recurrences.variables(module, X)
    p = given["params"]
    assert "conv_bias" not in p and "bias" not in p["in_proj"] | p["out_proj"]
    assert "bias" in p["dt_proj"]
    with_zeros = jax.tree.map(jnp.asarray, p)
    for name, width in (("in_proj", 4 * E), ("out_proj", E)):
        with_zeros[name] = {**p[name], "bias": jnp.zeros(width)}
    with_zeros["conv_bias"] = jnp.zeros(2 * E)
    np.testing.assert_allclose(
        module.apply(given, X), MIXER.apply({"params": with_zeros}, X), atol=1e-6
    )


def test_computes_in_its_dtype():
    module = MIXER.clone(dtype=jnp.bfloat16)
    given = recurrences.variables(module, X)
    found = module.apply(given, jnp.bfloat16(X))
    assert found.dtype == jnp.bfloat16
    recurrences.assert_close(found, MIXER.apply(given, X), 0.05)


@pytest.mark.x64
def test_float64_stays_float64():
    recurrences.assert_float64_stays(MIXER, X)


def test_initial_values_are_those_of_the_authors():
    module = mamba.MambaMixer()
    x = jnp.ones((1, 1, 64))
    p = module.init(jax.random.key(0), x)["params"]
    np.testing.assert_allclose(
        np.exp(p["A_log"]), np.broadcast_to(np.arange(1, 17), (128, 16)), rtol=1e-5
    )
    np.testing.assert_array_equal(p["D"], 1)
    steps = np.log1p(np.exp(np.float64(p["dt_proj"]["bias"])))
    assert steps.min() > 0.00099 and steps.max() < 0.101
    assert steps.min() < 0.0015 and steps.max() > 0.07
    assert 0.45 < np.abs(p["dt_proj"]["kernel"]).max() <= 0.5  # rank 4
    assert p["dt_proj"]["kernel"].shape == (4, 128)
    assert 0.45 < np.abs(p["conv_kernel"]).max() <= 0.5  # width 4


def test_language_model():
    module = mamba.MambaLM(vocab_size=7, width=E, num_layers=2, tie_embeddings=False)
    tokens = np.int32([[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]])
    given = recurrences.variables(module, tokens)
    assert "unembedding" in given["params"]
    run = recurrences.decoding(module, given)
    whole = module.apply(given, tokens)
    assert whole.shape == (2, 5, 7) and whole.dtype == jnp.float32
    _, padded = run([np.int32([[9, 9, *tokens[0]]])], None, np.arange(7)[None] >= 2)
    recurrences.assert_close(padded[0, 2:], whole[0], 1e-5)
    narrow = module.clone(dtype=jnp.bfloat16).apply(given, tokens)
    recurrences.assert_close(narrow, whole, 0.05)
