"""train.targets: a stranger's callable, found by name and called as it wants to be."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from attention import leaks
from train import targets

T, V, E = 6, 11, 4
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(V, size=(2, T)).astype(np.int32)
VECTORS = np.random.default_rng(2).normal(size=(2, T, E)).astype(np.float32)


def adapt(fn, *, vectors=False, length=T):
    return targets.adapt(
        fn,
        length=length,
        vocab_size=None if vectors else V,
        width=E if vectors else None,
        seed=0,
        edits=100,
    )


def in_numpy(tokens):
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.int32
    return np.cumsum(TABLE[tokens], axis=1)


def in_jax(tokens):
    assert isinstance(tokens, jax.Array) and tokens.dtype == jnp.int32
    return jnp.cumsum(jnp.asarray(TABLE)[tokens], axis=1)


def in_jax_eagerly(tokens):
    logits = in_jax(tokens)
    return logits if logits.max() < 1e9 else -logits


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_what_numpy_does_in_place_stays_numpy():
    """JAX could trace both, and would see no leak in them: x.sort() returns there."""

    def sort(x):
        x.sort(axis=1)
        return x * 2

    def centred(x):
        kept = x
        x -= x.mean(axis=1, keepdims=True)
        return kept

    wanted = np.sort(VECTORS, axis=1) * 2, VECTORS - VECTORS.mean(1, keepdims=True)
    for fn, output in zip((sort, centred), wanted, strict=True):
        target = adapt(fn, vectors=True)
        assert target.framework == "NumPy" and target.gradient is None
        np.testing.assert_array_equal(target.fn(VECTORS), output)


def test_an_object_that_counts_is_not_compiled():
    class Counting:
        count = jnp.zeros(())

        def __call__(self, x):
            self.count = self.count + x.mean()
            return jnp.cumsum(x, axis=1)

    target = adapt(Counting(), vectors=True)
    for rows in (1, 2, 3):
        x = np.resize(VECTORS, (rows, T, E))
        np.testing.assert_allclose(target.fn(x), np.cumsum(x, axis=1), atol=1e-5)


def test_nothing_is_printed(capsys):
    def fn(tokens):
        print("forward", tokens.shape)
        return in_numpy(tokens)

    adapt(fn).fn(TOKENS)
    assert capsys.readouterr().out == ""


def torch_function(torch):
    def fn(tokens):
        assert tokens.dtype == torch.int64
        return torch.tensor(TABLE)[tokens].cumsum(1)

    return fn


@pytest.mark.parametrize(
    ("fn", "framework"),
    [(in_numpy, "NumPy"), (in_jax, "JAX"), (in_jax_eagerly, "JAX")],
)
def test_frameworks_are_told_apart(fn, framework):
    target = adapt(fn)
    assert target.framework == framework
    assert target.training is None and target.gradient is None and not target.notes
    output = target.fn(TOKENS)
    assert type(output) is np.ndarray
    np.testing.assert_allclose(output, in_numpy(TOKENS), rtol=1e-5, atol=1e-5)


def test_what_jax_can_trace_is_compiled():
    traces = []

    def fn(tokens):
        traces.append(isinstance(tokens, jax.core.Tracer))
        return in_jax(tokens)

    target = adapt(fn)
    # With NumPy's arrays, which it refuses, traced and not.
    assert traces.count(False) == 2
    before = len(traces)
    for _ in range(3):
        target.fn(TOKENS)
    assert len(traces) == before


def test_a_function_of_tensors(torch):
    target = adapt(torch_function(torch))
    assert target.framework == "PyTorch"
    np.testing.assert_allclose(
        target.fn(TOKENS), in_numpy(TOKENS), rtol=1e-5, atol=1e-5
    )


def dropped(torch):
    """A module of tokens that drops half of what it reads, and averages over time."""

    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(V, V)
            self.dropout = torch.nn.Dropout(0.5)
            self.norm = torch.nn.BatchNorm1d(V)

        def forward(self, tokens, key=None):
            assert key is None and not torch.is_grad_enabled()
            x = self.dropout(self.embedding(tokens))
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    return Dropped()


@pytest.mark.parametrize("method", [False, True])
def test_a_module_in_both_modes(torch, method):
    module = dropped(torch)
    mean = module.norm.running_mean.clone()
    target = adapt(module.forward if method else module)
    assert target.framework == "PyTorch"
    wanted = module.embedding(torch.tensor(TOKENS).long()).detach().numpy()
    evaluation, training = target.fn(TOKENS), target.training(TOKENS)
    np.testing.assert_allclose(evaluation, wanted, atol=1e-4)
    # In training half is dropped, and the rest has the statistics of the batch.
    np.testing.assert_allclose(training.mean((0, 1)), 0, atol=1e-5)
    np.testing.assert_array_equal(training, target.training(TOKENS))
    np.testing.assert_array_equal(evaluation, target.fn(TOKENS))
    # The stranger's own object is as it was.
    assert module.training and torch.equal(module.norm.running_mean, mean)


def test_a_module_without_a_copy_is_restored(torch):
    """It holds a tensor that is no leaf, as PyTorch's old weight_norm does."""
    module = dropped(torch).eval()
    module.held = module.embedding.weight * 1
    module.dropout.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    target = adapt(module)
    training = target.training(TOKENS)
    np.testing.assert_allclose(training.mean((0, 1)), 0, atol=1e-5)
    np.testing.assert_array_equal(training, target.training(TOKENS))
    wanted = module.embedding(torch.tensor(TOKENS).long()).detach().numpy()
    np.testing.assert_allclose(target.fn(TOKENS), wanted, atol=1e-4)
    assert not module.training
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_train_that_wants_data_is_no_switch():
    class Trained:
        def train(self, rows):
            raise AssertionError

        eval = train

        def __call__(self, tokens):
            return in_numpy(tokens)

    assert adapt(Trained()).training is None


def test_a_switch_that_raises_is_one_line():
    class Broken:
        def train(self): ...

        def eval(self):
            raise RuntimeError("no weights")

        def __call__(self, tokens): ...

    with pytest.raises(ValueError, match="raised RuntimeError: no weights"):
        adapt(Broken())


class Layer(linen.Module):
    """Dropout and batch statistics, in flax."""

    @linen.compact
    def __call__(self, tokens, train):
        x = linen.Embed(V, V)(tokens)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.BatchNorm(use_running_average=not train)(x)


def test_flax_in_both_modes():
    layer = Layer()
    init = jax.jit(functools.partial(layer.init, train=False))
    variables = init(jax.random.key(0), TOKENS)
    target = adapt(functools.partial(layer.apply, variables))
    table = variables["params"]["Embed_0"]["embedding"]
    np.testing.assert_allclose(target.fn(TOKENS), table[TOKENS], atol=1e-4)
    training = target.training(TOKENS)
    np.testing.assert_allclose(training.mean((0, 1)), 0, atol=1e-5)
    np.testing.assert_array_equal(training, target.training(TOKENS))


def test_another_method_of_a_flax_module():
    """Whose signature has no `train`, unlike that of the module's call."""

    class Scored(Layer):
        def score(self, tokens):
            return self.variables["params"]["table"][tokens]

    variables = {"params": {"table": jnp.asarray(TABLE)}}
    for method in ("score", Scored.score):
        target = adapt(functools.partial(Scored().apply, variables, method=method))
        assert target.training is None
        np.testing.assert_array_equal(target.fn(TOKENS), TABLE[TOKENS])


def test_nnx_in_both_modes():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Embed(V, V, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    target = adapt(model)
    table = model.layers[0].embedding[...]
    np.testing.assert_allclose(target.fn(TOKENS), table[TOKENS], rtol=1e-6)
    training = target.training(TOKENS)
    assert 0.2 < np.mean(training == 0) < 0.8
    np.testing.assert_array_equal(training, target.training(TOKENS))


# Functions whose training mode adds one.
SWITCHED = {
    "required": lambda tokens, deterministic: in_jax(tokens) + (not deterministic),
    "keyword": lambda tokens, *, train=True: in_jax(tokens) + train,
    "default": lambda tokens, training=False: in_jax(tokens) + training,
    "is_training": lambda tokens, is_training=False: in_jax(tokens) + is_training,
    "is_train": lambda tokens, is_train=False: in_jax(tokens) + is_train,
    "inference": lambda tokens, inference=True: in_jax(tokens) + (not inference),
    "use_running_average": lambda tokens, use_running_average: (
        in_jax(tokens) + (not use_running_average)
    ),
    "enable_dropout": lambda tokens, enable_dropout: in_jax(tokens) + enable_dropout,
    "key": lambda tokens, key=None: in_jax(tokens) + (key is not None),
    "partial": functools.partial(lambda tokens, train: in_jax(tokens) + train, train=1),
    "numpy": lambda tokens, train=False: in_numpy(tokens) + train,
}


@pytest.mark.parametrize("name", SWITCHED)
def test_keywords_that_choose_the_mode(name):
    target = adapt(SWITCHED[name])
    wanted = in_numpy(TOKENS)
    np.testing.assert_allclose(target.fn(TOKENS), wanted, atol=1e-5)
    np.testing.assert_allclose(target.training(TOKENS), wanted + 1, atol=1e-5)


def test_a_key_that_must_be_given_is_no_training_mode():
    def fn(tokens, rng):
        return in_jax(tokens) + jax.random.normal(rng, (1, 1, V))

    target = adapt(fn)
    assert target.training is None
    np.testing.assert_array_equal(target.fn(TOKENS), target.fn(TOKENS))


def test_a_key_of_attention_is_no_training_mode():
    def fn(x, key=None):
        keys = x if key is None else key
        return jnp.cumsum(jnp.einsum("bte,bte->bte", x, keys), axis=1)

    assert adapt(fn, vectors=True).training is None


def test_training_mode_is_seeded(torch):
    def fn(tokens, train=False):
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return in_numpy(tokens) + train * sum(noise)

    target = adapt(fn)
    first = target.training(TOKENS)
    np.random.rand()
    np.testing.assert_array_equal(first, target.training(TOKENS))
    assert np.all(first > target.fn(TOKENS))


def test_training_mode_that_no_seed_reaches_is_noted():
    generator = np.random.default_rng(0)

    def fn(tokens, train=False):
        return in_numpy(tokens) + train * generator.normal()

    target = adapt(fn)
    assert target.training is None
    assert target.notes == (
        "training mode draws at random where no seed reaches: not probed",
    )


def test_a_training_mode_that_raises_is_left_to_the_probe():
    def fn(tokens, train=False):
        if train:
            raise RuntimeError("no data")
        return in_numpy(tokens)

    with pytest.raises(RuntimeError, match="no data"):
        adapt(fn).training(TOKENS)


WEIGHTS = np.tril(np.random.default_rng(3).normal(size=(T, T)))
WEIGHTS[4, 1] = 0


def test_gradients_in_jax_and_pytorch(torch):
    """Of y = W x the largest derivative is |W| times the same for a row."""

    def mixed(x):
        return jnp.einsum("ij,bje->bie", jnp.asarray(WEIGHTS, jnp.float32), x)

    def mixed_in_torch(x):
        return torch.einsum("ij,bje->bie", torch.tensor(WEIGHTS).to(x), x)

    for fn, framework in ((mixed, "JAX"), (mixed_in_torch, "PyTorch")):
        target = adapt(fn, vectors=True)
        assert target.framework == framework
        norms = target.gradient(VECTORS)
        wanted = np.abs(WEIGHTS) * (norms[:, :1] / np.abs(WEIGHTS[:, :1]))
        np.testing.assert_allclose(norms, wanted, rtol=1e-5)
        assert norms[4, 1] == 0 and np.all(norms.diagonal() > 0)


def test_a_derivative_that_there_is_not_is_refused(torch):
    target = adapt(lambda x: x.detach().clone(), vectors=True)
    with pytest.raises(leaks.Refused, match="does not require grad"):
        target.gradient(VECTORS)


@pytest.mark.parametrize("wide", [np.float16, np.float32, np.float64, np.int64, bool])
def test_outputs_keep_their_type(wide):
    target = adapt(lambda tokens: in_numpy(tokens).astype(wide))
    np.testing.assert_array_equal(target.fn(TOKENS), in_numpy(TOKENS).astype(wide))
    assert target.fn(TOKENS).dtype == wide


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_narrow_floats_keep_their_type(name, torch):
    """By which rounding is measured."""
    wanted = jnp.asarray(TABLE[TOKENS]).astype(getattr(jnp, name))
    narrow = torch.tensor(TABLE).to(getattr(torch, name))
    for fn in (
        lambda tokens: jnp.asarray(TABLE)[tokens].astype(wanted.dtype),
        lambda tokens: narrow.float()[tokens.long()].to(narrow.dtype),
    ):
        output = adapt(fn).fn(TOKENS)
        assert type(output) is np.ndarray and output.dtype == wanted.dtype
        np.testing.assert_array_equal(output, np.asarray(wanted))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_a_module_gets_vectors_as_wide_as_its_parameters(name, torch):
    dtype = getattr(torch, name)
    target = adapt(torch.nn.Linear(E, E).to(dtype), vectors=True)
    assert target.fn(VECTORS).dtype == getattr(jnp, name)
    norms = target.gradient(VECTORS)
    assert np.all(norms.diagonal() > 0)
    assert np.count_nonzero(norms) == T


def test_a_callable_that_writes_into_its_arrays():
    buffer = np.zeros((2, T, V), np.float32)

    def fn(tokens):
        output = buffer if len(tokens) == 2 else np.zeros((len(tokens), T, V))
        output[:] = in_numpy(tokens)
        tokens[:] = 0
        return output

    target = adapt(fn)
    tokens = TOKENS.copy()
    first = target.fn(tokens)
    np.testing.assert_array_equal(tokens, TOKENS)
    target.fn((TOKENS + 1) % V)
    np.testing.assert_array_equal(first, in_numpy(TOKENS))


class Output(tuple):
    """Stands for the output object of a library."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y[:, 1:], r"tokens int32 \[2 6\] it returned \[2 5 11\], expected"),
        (lambda y: y[0], r"returned \[6 11\], expected \[2 6 11\]: the batch axis is"),
        (lambda y: y.swapaxes(0, 1), r"\[6 2 11\], expected \[2 6 11\]: time stands"),
        (lambda y: y[:2, :, 0], r"\[2 6\], expected \[2 6 11\]"),
        (lambda y: y[..., :8], r"\[2 6 8\], expected .*: is --vocab_size=8 meant"),
        (lambda y: y.sum(), r"returned 'float64?', expected one array"),
        (
            lambda y: (y, y),
            r"returned 'tuple', .*: return the logits or the vectors al",
        ),
        (lambda y: {"logits": y}, "returned 'dict', expected one array"),
        (lambda y: Output([y]), "returned 'Output', expected one array"),
        (lambda y: None, "returned 'NoneType', expected one array"),
        (lambda y: y + 1j, "returned complex128, expected real numbers"),
        (lambda y: y.astype(str), "returned <U32, expected real numbers"),
        (lambda y: y.astype(object), "returned object, expected real numbers"),
        (
            lambda y: y[:2],
            r"tokens int32 \[3 6\] it returned \[2 6 11\], expected \[3 6",
        ),
    ],
)
def test_outputs_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        adapt(lambda tokens: change(in_numpy(tokens).astype(float)))


def test_two_batch_sizes_tell_a_batch_from_time():
    with pytest.raises(ValueError, match=r"int32 \[3 2\] it returned \[2 3 11\]"):
        adapt(lambda tokens: in_numpy(tokens).swapaxes(0, 1), length=2)


def test_ids_are_no_logits():
    with pytest.raises(ValueError, match=r"returned \[2 11\], expected \[2 11 11\]"):
        adapt(lambda tokens: in_numpy(tokens).argmax(-1), length=V)


def test_vectors_may_become_anything_that_keeps_batch_and_time():
    for shape in ((2, T), (2, T, 3), (2, T, 3, 2)):
        zeros = np.zeros((3, *shape[1:]), np.float32)
        target = adapt(functools.partial(lambda y, x: y[: len(x)], zeros), vectors=True)
        assert target.fn(VECTORS).shape == shape
    with pytest.raises(
        ValueError, match=r"vectors float32 \[2 6 4\] it .* \[2 6 \.\.\.\]"
    ):
        adapt(lambda x: x.sum(1), vectors=True)


@pytest.mark.parametrize("kind", ["numpy", "jax", "torch"])
def test_hidden_randomness_is_refused(kind, torch):
    fn = {
        "numpy": lambda tokens: in_numpy(tokens) + np.random.normal(),
        "jax": lambda tokens: in_jax(tokens) + np.random.normal(),
        "torch": lambda tokens: torch.tensor(TABLE)[tokens] + torch.rand(()),
    }[kind]
    with pytest.raises(ValueError, match="not deterministic on equal input: output 0"):
        adapt(fn)


def test_hidden_rounding_is_noted():
    def noisy(size):
        calls = []

        def fn(tokens):
            calls.append(tokens)
            return in_numpy(tokens) * np.float32(1 + size * (len(calls) == 4))

        return fn

    (note,) = adapt(noisy(1e-6)).notes
    assert "differ by" in note
    with pytest.raises(ValueError, match="not deterministic"):
        adapt(noisy(1e-4))


def test_a_memory_is_refused():
    """Of the call before: equal inputs in a row would give equal outputs."""
    memory = []

    def fn(x):
        memory.append(x.copy())
        before = memory[-2] if len(memory) > 1 else x
        return np.cumsum(x, axis=1) + (before if before.shape == x.shape else 0)

    with pytest.raises(ValueError, match="does it .* remember earlier calls"):
        adapt(fn, vectors=True)


def test_another_dtype_is_another_number_only_if_it_is():
    """Equal numbers of two types are one answer, noted as nothing."""
    calls = []

    def fn(tokens):
        calls.append(tokens)
        return in_numpy(tokens).astype(np.float64 if len(calls) % 2 else np.float32)

    target = adapt(fn)
    assert not target.notes
    types = {leaks.call(target.fn, TOKENS).dtype for _ in range(2)}
    assert types == {np.dtype(np.float32), np.dtype(np.float64)}
    np.testing.assert_array_equal(leaks.call(target.fn, TOKENS), in_numpy(TOKENS))


def test_other_shapes_may_be_refused():
    def fn(tokens):
        if tokens.shape != (2, T):
            raise RuntimeError("only two rows of six")
        return in_numpy(tokens)

    target = adapt(fn)
    with pytest.raises(leaks.Refused, match="RuntimeError: only two rows of six"):
        leaks.call(target.fn, TOKENS[:1])
