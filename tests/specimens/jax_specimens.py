"""Planted leaks and honest models in JAX and flax: functions that make them."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from configs import tiny_lm
from models import config as config_lib
from models import transformer
from tests.specimens.parts import HEADS, LENGTH, VOCAB, WIDTH, normal

KEY = jax.random.key(0)
EXAMPLE = jnp.ones((2, LENGTH, WIDTH))


def applied(module, example=EXAMPLE, **options):
    """A linen module with parameters, as a function of its input."""
    variables = jax.jit(functools.partial(module.init, **options))(KEY, example)
    return jax.jit(lambda x: module.apply(variables, x, **options))


# Leaks


def sine_of_next():
    """A fast, faint sine of the next input: its derivative is 1, its size 1e-6."""

    @jax.jit
    def fn(x):
        later = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
        return x + 1e-6 * jnp.sin(1e6 * later)

    return fn


def flax_convolution():
    """flax's convolution pads 'SAME' unless told otherwise."""
    return applied(nn.Conv(WIDTH, kernel_size=(3,)))


def flax_batch_norm():
    """flax's BatchNorm: running statistics in evaluation, the batch's in training."""
    module = nn.BatchNorm()
    variables = module.init(KEY, EXAMPLE, use_running_average=True)

    def fn(x, *, train=False):
        return module.apply(
            variables, x, use_running_average=not train, mutable=["batch_stats"]
        )[0]

    return fn


# Honest models


def flax_attention():
    """flax's multi-head attention under its own causal mask."""
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    variables = jax.jit(module.init)(KEY, EXAMPLE)

    @jax.jit
    def fn(x):
        mask = nn.make_causal_mask(x[..., 0])
        return module.apply(variables, x, mask=mask)

    return fn


def jax_attention():
    """jax.nn's attention, is_causal."""

    @jax.jit
    def fn(x):
        heads = x.reshape(*x.shape[:2], HEADS, -1)
        return jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)

    return fn


def jax_recurrence():
    """A recurrence, scanned over time."""
    weights = jnp.asarray(normal(WIDTH, WIDTH, seed=9))

    def step(state, x):
        state = jnp.tanh(x + state @ weights)
        return state, state

    @jax.jit
    def fn(x):
        _, y = jax.lax.scan(step, 0 * x[:, 0], x.swapaxes(0, 1))
        return y.swapaxes(0, 1)

    return fn


def flax_dilated_convolution():
    """A causal convolution, dilated by four."""
    return applied(nn.Conv(WIDTH, (3,), kernel_dilation=4, padding="CAUSAL"))


def our_language_model():
    """CausalLM of models/, one layer."""
    config = tiny_lm.get_config().model
    config.update(num_layers=1, num_heads=2, width=8, mlp_width=16)
    module = transformer.CausalLM(config_lib.CausalLMConfig(**config), VOCAB)
    return applied(module, jnp.zeros((1, 2), jnp.int32), deterministic=True)
