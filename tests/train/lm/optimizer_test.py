"""Optimiser: schedule, AdamW against a NumPy loop, decay by name, clipping."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train import config
from train.lm import optimizer

CONFIG = config.OptimizerConfig(
    peak_lr=1.0,
    min_lr=0.0,
    warmup_steps=10,
    b1=0.9,
    b2=0.95,
    weight_decay=0.1,
    clip_norm=None,
)


def test_schedule_values():
    """Cases B114 and B113: warm-up 10 of 110, and the minimum ever after."""
    rate = optimizer.schedule(CONFIG, 110)
    updates = [1, 5, 10, 60, 110, 111, 1100]
    expected = [0.1, 0.5, 1.0, 0.5, 0.0, 0.0, 0.0]
    got = np.array([rate(n) for n in updates])
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert (got >= 0).all()
    assert rate(10) == 1.0


def test_schedule_ends_at_the_minimum():
    rate = optimizer.schedule(dataclasses.replace(CONFIG, min_lr=0.25), 110)
    got = [rate(n) for n in (10, 60, 110, 111, 1100)]
    np.testing.assert_allclose(got, [1.0, 0.625, 0.25, 0.25, 0.25], atol=1e-6)


def test_schedule_without_warmup_and_with_a_run_that_ends_in_it():
    rate = optimizer.schedule(dataclasses.replace(CONFIG, warmup_steps=0), 4)
    half = 0.5 * (1 + np.cos(np.pi / 4))
    np.testing.assert_allclose([rate(0), rate(1), rate(4)], [1.0, half, 0.0], atol=1e-6)
    rate = optimizer.schedule(CONFIG, 5)
    np.testing.assert_allclose([rate(1), rate(5), rate(10)], [0.1, 0.5, 1.0], rtol=1e-6)


def _numpy_adamw(params, gradients, settings, steps):
    """The equations of train/lm/optimizer.py, written out in float64."""
    params = {name: value.astype(np.float64) for name, value in params.items()}
    mean = {name: np.zeros_like(value) for name, value in params.items()}
    square = {name: np.zeros_like(value) for name, value in params.items()}
    for n, gradient in enumerate(gradients, 1):
        norm = np.sqrt(
            sum((g.astype(np.float64) ** 2).sum() for g in gradient.values())
        )
        clip = (
            min(1.0, settings.clip_norm / norm)
            if settings.clip_norm is not None
            else 1.0
        )
        peak, low, warmup = settings.peak_lr, settings.min_lr, settings.warmup_steps
        angle = np.pi * (n - warmup) / (steps - warmup)
        rate = (
            peak * n / warmup
            if n <= warmup
            else low + (peak - low) * (1 + np.cos(angle)) / 2
        )
        for name in params:
            g = gradient[name] * clip
            mean[name] = settings.b1 * mean[name] + (1 - settings.b1) * g
            square[name] = settings.b2 * square[name] + (1 - settings.b2) * g**2
            step = mean[name] / (1 - settings.b1**n)
            step /= np.sqrt(square[name] / (1 - settings.b2**n)) + 1e-8
            if name == "kernel":
                step += settings.weight_decay * params[name]
            params[name] -= rate * step
    return params


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_updates_meet_the_equations(clip_norm):
    """The first update already moves; clipping is off at None (case B117)."""
    settings = dataclasses.replace(
        CONFIG, peak_lr=0.1, min_lr=0.01, warmup_steps=2, clip_norm=clip_norm
    )
    generator = np.random.default_rng(0)

    def draw(scale):
        return {
            "kernel": generator.normal(0, scale, (3, 4)).astype(np.float32),
            "bias": generator.normal(0, scale, (2, 2)).astype(np.float32),
        }

    start = draw(1.0)
    # The first norm is below the bound, the others are above it.
    gradients = [draw(0.01), draw(1.0), draw(3.0), draw(1.0)]
    transformation = optimizer.make(settings, 5)

    @jax.jit
    def update(params, state, gradient):
        updates, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params, state = start, transformation.init(start)
    for n, gradient in enumerate(gradients, 1):
        params, state = update(params, state, gradient)
        expected = _numpy_adamw(start, gradients[:n], settings, 5)
        for name in params:
            np.testing.assert_allclose(params[name], expected[name], atol=2e-6)
            assert np.abs(params[name] - start[name]).min() > 1e-3


def _parameter_tree():
    """Parameters of every kind: flax's own attention, norm, embedding, a bias table."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(5, 4)(tokens)
            table = self.param("relative_bias", nn.initializers.ones, (32, 2))
            x = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            return nn.Dense(5)(nn.RMSNorm()(x)) + table[0, 0]

    tokens = jnp.zeros((1, 3), jnp.int32)
    shapes = jax.eval_shape(Model().init, jax.random.key(0), tokens)["params"]
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)


def test_decay_on_matrices_only():
    """Case B116: kernels and embeddings shrink; biases, scales and tables do not."""
    params = _parameter_tree()
    settings = dataclasses.replace(CONFIG, warmup_steps=1)
    transformation = optimizer.make(settings, 10)

    @jax.jit
    def update(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = transformation.update(zeros, transformation.init(params), params)
        return optax.apply_updates(params, updates)

    values = {
        jax.tree_util.keystr(path, simple=True, separator="/"): set(leaf.flat)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            jax.tree.map(np.asarray, update(params))
        )
    }
    attention = "MultiHeadDotProductAttention_0"
    shrunk = {"Embed_0/embedding", "Dense_0/kernel"} | {
        f"{attention}/{name}/kernel" for name in ("query", "key", "value", "out")
    }
    kept = {
        "Dense_0/bias",
        "LayerNorm_0/scale",
        "LayerNorm_0/bias",
        "RMSNorm_0/scale",
        "relative_bias",
    } | {f"{attention}/{name}/bias" for name in ("query", "key", "value", "out")}
    assert values.keys() == shrunk | kept
    assert params[attention]["query"]["bias"].ndim == 2
    for name in shrunk:
        assert values[name] == {np.float32(0.9)}, name
    for name in kept:
        assert values[name] == {np.float32(1.0)}, name


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_zero_gradients_stay_finite(clip_norm):
    """Case B117: nothing divides 0 by 0, with or without a bound."""
    transformation = optimizer.make(
        dataclasses.replace(CONFIG, clip_norm=clip_norm, weight_decay=0.0), 10
    )
    params = {"kernel": jnp.ones((2, 2))}
    zeros = {"kernel": jnp.zeros((2, 2))}
    updates, _ = transformation.update(zeros, transformation.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], zeros["kernel"])
