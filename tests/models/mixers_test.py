"""models.mixers: every row of the table as a layer of a model.

That each is causal, streams and keeps rows and padding apart stands in
mechanisms_test.py; each one's own mathematics has its own test. That a whole model
trains and passes the three proofs is shown by `train.main`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import properties
from models import mixers
from tests.support import small

B, T, E = 2, 7, small.CONFIG.width
CONFIG = dataclasses.replace(small.CONFIG, positions="none")
X = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
NAMES = tuple(mixers.MIXERS)


@functools.cache
def built(name, dtype="float32"):
    """A mixer, compiled, and parameters that are not small."""
    module = mixers.MIXERS[name].make(dataclasses.replace(CONFIG, dtype=dtype), 1)
    init = functools.partial(module.init, deterministic=True)
    shapes = jax.eval_shape(init, jax.random.key(0), X)
    rng = np.random.default_rng(1)
    variables = jax.tree.map(
        lambda x: (0.5 * rng.normal(size=x.shape)).astype(x.dtype), shapes
    )
    return module, variables


@functools.cache
def compiled(name):
    module, variables = built(name)
    return jax.jit(
        lambda x, token_mask=None, token_positions=None: module.apply(
            variables,
            x,
            deterministic=True,
            token_mask=token_mask,
            token_positions=token_positions,
        )
    )


def test_every_mixer_is_of_one_kind_and_known_to_the_configuration():
    assert (*mixers.ATTENTION, *mixers.RECURRENT, "zero") == NAMES
    model = dataclasses.replace(CONFIG, mixers=",".join(NAMES))
    assert [model.mixer(i) for i in range(len(NAMES))] == list(mixers.MIXERS.values())
    attention = [name for i, name in enumerate(NAMES) if model.is_attention(i)]
    assert attention == ["softmax", "window", "longformer", "bigbird"]
    help_text = {x.name: x.type for x in dataclasses.fields(model)}["mixers"]
    assert ", ".join(NAMES) in str(help_text)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_table_declares_is_seen(name):
    """∂y/∂x is zero just where the mask says so, the position itself apart."""
    module_mask = mixers.MIXERS[name].mask(CONFIG, 1)
    declared = np.asarray(module_mask.materialize(T, T)[0, 0])
    found = properties.dependency_matrix(compiled(name), X)
    itself = np.eye(T, dtype=bool)
    np.testing.assert_array_equal(found | itself, declared | itself)


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_both_sides_changes_nothing(name):
    """NaN in it included: case B046."""
    left, right = 2, 1
    padded = np.pad(
        X, ((0, 0), (left, right), (0, 0)), constant_values=np.float32(np.nan)
    )
    real = np.zeros((B, T + 3), bool)
    real[:, left : left + T] = True
    places = np.maximum(np.cumsum(real, axis=1, dtype=np.int32) - 1, 0)
    found = compiled(name)(padded, real, places)[:, left : left + T]
    wanted = np.asarray(compiled(name)(X))
    atol = 1e-6 * max(1, np.max(np.abs(wanted)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 2])
def test_short_inputs_are_the_start_of_long_ones(name, length):
    found = compiled(name)(X[:, :length])
    np.testing.assert_allclose(found, compiled(name)(X)[:, :length], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name):
    """The output is narrow and near; parameters stay in float32."""
    module, variables = built(name, "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(variables)} <= {jnp.dtype("float32")}
    x = X.astype(jnp.bfloat16)
    found = jax.jit(functools.partial(module.apply, deterministic=True))(variables, x)
    assert found.dtype == jnp.bfloat16
    wanted = compiled(name)(x.astype(np.float32))
    scale = np.max(np.abs(wanted)) + 1e-6
    assert np.max(np.abs(found.astype(np.float32) - wanted)) < 0.1 * scale


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name):
    module, variables = built(name)
    if not variables:
        return

    @jax.jit
    def gradients(variables):
        def loss(variables):
            y = module.apply(variables, X, deterministic=True)
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(variables)

    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients(variables)):
        where = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), where
        assert np.any(gradient != 0), where


# The papers' numbers, with width 16 in 2 heads of 8, T = 7, windows of 3, 8 features;
# Mamba has 32 channels of state 4 behind a convolution of width 4.
STATES = {
    "softmax": 2 * 16 * T,
    "window": 2 * 16 * 2,
    "longformer": 2 * 16 * (2 + 1),
    "linear": 2 * (8 * 8 + 8),
    "performer": 2 * (8 * 8 + 8 + 8),
    "retention": 2 * 8 * 8,
    "rwkv": 16 + 3 * 16,
    "rwkv6": 16 + 2 * 8 * 8,
    "mamba": 32 * 4 + 32 * 3,
    "gru": 16,
    "zero": 0,
}


@pytest.mark.parametrize("name", STATES)
def test_states_have_the_sizes_of_the_papers(name):
    assert mixers.MIXERS[name].state_size(CONFIG, 1, T) == STATES[name]


@pytest.mark.parametrize("name", NAMES)
def test_states_are_what_the_row_says_is_carried(name):
    """Keys and values of each token that a later one sees; else a constant number."""
    row = mixers.MIXERS[name]
    short, long = (row.state_size(CONFIG, 1, length) for length in (T, 2 * T))
    if row.is_attention:
        seen = np.asarray(row.mask(CONFIG, 1).materialize(2 * T, 2 * T)[0, 0])
        assert short == 2 * E * sum(seen[T:, key].any() for key in range(T))
    else:
        assert short == long
        assert (short > 0) == row.is_recurrent


def test_grouped_heads_carry_less():
    grouped = dataclasses.replace(CONFIG, num_kv_heads=1)
    found = mixers.MIXERS["softmax"].state_size(grouped, 1, T)
    assert found == STATES["softmax"] // 2


def test_what_is_drawn_at_random_differs_between_layers():
    config = dataclasses.replace(CONFIG, block_size=2)
    bigbird = mixers.MIXERS["bigbird"]
    seen = [np.asarray(bigbird.mask(config, i).materialize(64, 64)) for i in (0, 1)]
    assert np.any(seen[0] != seen[1])
    performer = mixers.MIXERS["performer"]
    x = X[..., : CONFIG.head_width]
    features = [performer.make(CONFIG, i).feature_map(x) for i in (0, 1)]
    assert np.all(features[0] != features[1])
