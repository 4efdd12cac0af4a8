"""Norms of derivatives over distance, and the lines that are fitted to them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny_lm
from models import config as model_config
from models import recurrent, transformer
from train.studies.reach import gradient_norms


def decaying(decays):
    """The last state of h = a h + x: its derivative by the input k back is aᵏ."""

    def last(x):
        one = lambda h, x: (jnp.asarray(decays, jnp.float32) * h + x, None)  # noqa: E731
        return jax.lax.scan(one, jnp.zeros(len(decays)), x)[0]

    return last


def test_norms_of_a_decay_are_its_powers():
    """Down to where float32 alone would have lost them, and to where all is lost."""
    decays = np.array([0.9, 0.5, 0.3], np.float32)
    k = np.arange(128)
    computed = jax.jit(lambda x: gradient_norms.log_norms(decaying(decays), x))(
        jnp.ones((128, 3))
    )
    norms = np.sqrt(np.sum(decays.astype(np.float64) ** (2 * k[:, None]), axis=1))
    np.testing.assert_allclose(computed, np.log(norms), atol=2e-4)
    steep = jax.jit(lambda x: gradient_norms.log_norms(decaying([0.25]), x))(
        jnp.ones((128, 1))
    )
    assert gradient_norms.FLOOR < -156  # 1e-68, where float32 ends at 1e-38
    kept = k * math.log(0.25) > gradient_norms.FLOOR + 1
    np.testing.assert_allclose(steep[kept], k[kept] * math.log(0.25), atol=1e-3)
    assert np.all(np.isneginf(steep[k * math.log(0.25) < gradient_norms.FLOOR - 20]))


def jacobian(f, x, size=1e-5):
    """By central differences in float64: [T E D]."""
    derivative = np.zeros((*x.shape, len(f(x))))
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += size
        down[index] -= size
        derivative[index] = (f(up) - f(down)) / (2 * size)
    return derivative


def log_norms_of(jacobian):
    return np.log(np.sqrt(np.sum(jacobian**2, axis=(1, 2))))[::-1]


def test_norms_of_a_gru_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    kernels = rng.normal(size=(3, 4, 4)) / 2
    x = rng.normal(size=(7, 12))

    def last(x):
        h = np.zeros(4)
        for inputs in x.reshape(7, 3, 4):
            reset, update = (
                1 / (1 + np.exp(-(inputs[i] + h @ kernels[i]))) for i in (0, 1)
            )
            h = update * h + (1 - update) * np.tanh(
                inputs[2] + (reset * h) @ kernels[2]
            )
        return h

    parameters = recurrent.Kernels(*jnp.asarray(kernels, jnp.float32))

    def ours(x):
        return recurrent.scan(parameters, x.reshape(7, 3, 4), jnp.zeros(4))[1]

    computed = jax.jit(lambda x: gradient_norms.log_norms(ours, x))(
        jnp.asarray(x, jnp.float32)
    )
    np.testing.assert_allclose(computed, log_norms_of(jacobian(last, x)), atol=1e-4)


def test_norms_of_a_run_are_those_of_its_attention():
    """By hand: norm of the embeddings, two heads, the last query."""
    config = dataclasses.replace(
        model_config.CausalLMConfig(**tiny_lm.get_config().model),
        num_layers=1,
        num_heads=2,
        width=8,
        context=6,
        positions="none",
    )
    tokens = np.array([[3, 1, 4, 1, 5, 2], [2, 7, 1, 0, 2, 6]])
    model = transformer.CausalLM(config, 9)
    init = jax.jit(functools.partial(model.init, deterministic=True))
    params = init(jax.random.key(0), tokens)["params"]
    stacked = jax.tree.map(lambda x: jnp.stack([x, 1.2 * x]), params)
    computed = gradient_norms.of_runs(config, 9, stacked, tokens)
    for run, factor in enumerate((1.0, 1.2)):
        of_run = jax.tree.map(lambda x, c=factor: c * np.asarray(x, np.float64), params)
        mixer = of_run["blocks_0"]["mixer"]
        query, key, value = (
            mixer[name]["kernel"] for name in ("query", "key", "value")
        )

        def last(x, query=query, key=key, value=value, mixer=mixer):
            y = 0
            for n in range(2):
                scores = (x @ key[:, n]) @ (x[-1] @ query[:, n]) / 2
                weights = np.exp(scores) / np.sum(np.exp(scores))
                y += weights @ (x @ value[:, n]) @ mixer["out"]["kernel"][n]
            return y

        logs = []
        for row in tokens:
            x = of_run["token_embedding"]["embedding"][row]
            x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6)
            x = x * of_run["blocks_0"]["mixer_norm"]["scale"]
            logs.append(log_norms_of(jacobian(last, x)))
        np.testing.assert_allclose(computed[run], np.mean(logs, axis=0), atol=1e-3)


def test_lines_find_what_was_drawn():
    k = np.arange(64)
    noise = 0.01 * np.random.default_rng(0).normal(size=64)
    fit = gradient_norms.fitted(2 - 0.3 * k + noise, nearest=1)
    assert fit.exponential.slope == pytest.approx(-0.3, abs=1e-3)
    assert fit.exponential.intercept == pytest.approx(2, abs=0.02)
    assert fit.exponential.residual == pytest.approx(0.01, rel=0.3)
    assert fit.power.residual > 1
    logs = np.log(np.maximum(k, 1))
    fit = gradient_norms.fitted(1 - 1.5 * logs + noise, nearest=4)
    assert fit.power.slope == pytest.approx(-1.5, abs=0.01)
    assert fit.power.residual < 0.02 < fit.exponential.residual


def test_lines_leave_out_what_is_near_or_lost():
    norms = -0.5 * np.arange(20.0)
    norms[:3], norms[15:] = 7.0, -np.inf
    fit = gradient_norms.fitted(norms, nearest=3)
    assert fit.exponential.slope == pytest.approx(-0.5)
    norms[5:] = -np.inf
    with pytest.raises(ValueError, match="three norms above the floor, got 2"):
        gradient_norms.fitted(norms, nearest=3)
