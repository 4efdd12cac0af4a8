"""train.callables.modes: a callable in evaluation and in training mode."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from attention.properties import calls
from tests.support import callables


def dropped(torch):
    """A module of tokens that drops half of what it reads, and averages over time."""

    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(callables.V, callables.V)
            self.dropout = torch.nn.Dropout(0.5)
            self.norm = torch.nn.BatchNorm1d(callables.V)

        def forward(self, tokens, key=None):
            assert key is None and not torch.is_grad_enabled()
            x = self.dropout(self.embedding(tokens))
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    return Dropped()


@pytest.mark.parametrize("method", [False, True])
def test_a_module_in_both_modes(torch, method):
    module = dropped(torch)
    mean = module.norm.running_mean.clone()
    target = callables.adapt(module.forward if method else module)
    assert target.framework == "PyTorch"
    wanted = module.embedding(torch.tensor(callables.TOKENS).long()).detach().numpy()
    evaluation, training = (
        target.fn(callables.TOKENS),
        target.training(callables.TOKENS),
    )
    np.testing.assert_allclose(evaluation, wanted, atol=1e-4)
    # In training half is dropped, and the rest has the statistics of the batch.
    np.testing.assert_allclose(training.mean((0, 1)), 0, atol=1e-5)
    np.testing.assert_array_equal(training, target.training(callables.TOKENS))
    np.testing.assert_array_equal(evaluation, target.fn(callables.TOKENS))
    # The stranger's own object is as it was.
    assert module.training and torch.equal(module.norm.running_mean, mean)


def test_a_module_without_a_copy_is_restored(torch):
    """It holds a tensor that is no leaf, as PyTorch's old weight_norm does."""
    module = dropped(torch).eval()
    module.held = module.embedding.weight * 1
    module.dropout.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    target = callables.adapt(module)
    training = target.training(callables.TOKENS)
    np.testing.assert_allclose(training.mean((0, 1)), 0, atol=1e-5)
    np.testing.assert_array_equal(training, target.training(callables.TOKENS))
    wanted = module.embedding(torch.tensor(callables.TOKENS).long()).detach().numpy()
    np.testing.assert_allclose(target.fn(callables.TOKENS), wanted, atol=1e-4)
    assert not module.training
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_train_that_wants_data_is_no_switch():
    class Trained:
        def train(self, rows):
            raise AssertionError

        eval = train

        def __call__(self, tokens):
            return callables.in_numpy(tokens)

    assert callables.adapt(Trained()).training is None


def test_a_switch_that_raises_is_one_line():
    class Broken:
        def train(self): ...

        def eval(self):
            raise RuntimeError("no weights")

        def __call__(self, tokens): ...

    with pytest.raises(ValueError, match="raised RuntimeError: no weights"):
        callables.adapt(Broken())


class Layer(linen.Module):
    """Dropout and batch statistics, in flax."""

    @linen.compact
    def __call__(self, tokens, train):
        x = linen.Embed(callables.V, callables.V)(tokens)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.BatchNorm(use_running_average=not train)(x)


def test_flax_in_both_modes():
    layer = Layer()
    init = jax.jit(functools.partial(layer.init, train=False))
    variables = init(jax.random.key(0), callables.TOKENS)
    target = callables.adapt(functools.partial(layer.apply, variables))
    table = variables["params"]["Embed_0"]["embedding"]
    np.testing.assert_allclose(
        target.fn(callables.TOKENS), table[callables.TOKENS], atol=1e-4
    )
    training = target.training(callables.TOKENS)
    np.testing.assert_allclose(training.mean((0, 1)), 0, atol=1e-5)
    np.testing.assert_array_equal(training, target.training(callables.TOKENS))


def test_another_method_of_a_flax_module():
    """Whose signature has no `train`, unlike that of the module's call."""

    class Scored(Layer):
        def score(self, tokens):
            return self.variables["params"]["table"][tokens]

    variables = {"params": {"table": jnp.asarray(callables.TABLE)}}
    for method in ("score", Scored.score):
        target = callables.adapt(
            functools.partial(Scored().apply, variables, method=method)
        )
        assert target.training is None
        np.testing.assert_array_equal(
            target.fn(callables.TOKENS), callables.TABLE[callables.TOKENS]
        )


def test_nnx_in_both_modes():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Embed(callables.V, callables.V, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    )
    target = callables.adapt(model)
    table = model.layers[0].embedding[...]
    np.testing.assert_allclose(
        target.fn(callables.TOKENS), table[callables.TOKENS], rtol=1e-6
    )
    training = target.training(callables.TOKENS)
    assert 0.2 < np.mean(training == 0) < 0.8
    np.testing.assert_array_equal(training, target.training(callables.TOKENS))


# Functions whose training mode adds one.
SWITCHED = {
    "required": lambda tokens, deterministic: (
        callables.in_jax(tokens) + (not deterministic)
    ),
    "keyword": lambda tokens, *, train=True: callables.in_jax(tokens) + train,
    "default": lambda tokens, training=False: callables.in_jax(tokens) + training,
    "is_training": lambda tokens, is_training=False: (
        callables.in_jax(tokens) + is_training
    ),
    "is_train": lambda tokens, is_train=False: callables.in_jax(tokens) + is_train,
    "inference": lambda tokens, inference=True: (
        callables.in_jax(tokens) + (not inference)
    ),
    "use_running_average": lambda tokens, use_running_average: (
        callables.in_jax(tokens) + (not use_running_average)
    ),
    "enable_dropout": lambda tokens, enable_dropout: (
        callables.in_jax(tokens) + enable_dropout
    ),
    "key": lambda tokens, key=None: callables.in_jax(tokens) + (key is not None),
    "partial": functools.partial(
        lambda tokens, train: callables.in_jax(tokens) + train, train=1
    ),
    "numpy": lambda tokens, train=False: callables.in_numpy(tokens) + train,
}


@pytest.mark.parametrize("name", SWITCHED)
def test_keywords_that_choose_the_mode(name):
    target = callables.adapt(SWITCHED[name])
    wanted = callables.in_numpy(callables.TOKENS)
    np.testing.assert_allclose(target.fn(callables.TOKENS), wanted, atol=1e-5)
    np.testing.assert_allclose(target.training(callables.TOKENS), wanted + 1, atol=1e-5)


def test_a_key_that_must_be_given_is_no_training_mode():
    def fn(tokens, rng):
        return callables.in_jax(tokens) + jax.random.normal(rng, (1, 1, callables.V))

    target = callables.adapt(fn)
    assert target.training is None
    np.testing.assert_array_equal(
        target.fn(callables.TOKENS), target.fn(callables.TOKENS)
    )


def test_a_key_of_attention_is_no_training_mode():
    def fn(x, key=None):
        keys = x if key is None else key
        return jnp.cumsum(jnp.einsum("bte,bte->bte", x, keys), axis=1)

    assert callables.adapt(fn, vectors=True).training is None


def test_training_mode_is_seeded(torch):
    def fn(tokens, train=False):
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return callables.in_numpy(tokens) + train * sum(noise)

    target = callables.adapt(fn)
    first = target.training(callables.TOKENS)
    np.random.rand()
    np.testing.assert_array_equal(first, target.training(callables.TOKENS))
    assert np.all(first > target.fn(callables.TOKENS))


def test_training_mode_that_no_seed_reaches_is_noted():
    generator = np.random.default_rng(0)

    def fn(tokens, train=False):
        return callables.in_numpy(tokens) + train * generator.normal()

    target = callables.adapt(fn)
    assert target.training is None
    assert target.notes == (
        "training mode draws at random where no seed reaches: not probed",
    )


def test_a_training_mode_that_raises_is_left_to_the_probe():
    def fn(tokens, train=False):
        if train:
            raise RuntimeError("no data")
        return callables.in_numpy(tokens)

    with pytest.raises(calls.Refused, match="raised RuntimeError: no data"):
        callables.adapt(fn).training(callables.TOKENS)
