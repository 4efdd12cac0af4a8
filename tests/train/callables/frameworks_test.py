"""train.callables.frameworks: JAX, NumPy or PyTorch, told apart by trying."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.properties import calls
from tests.support import callables


def test_what_numpy_does_in_place_stays_numpy():
    """JAX could trace both, and would see no leak in them: x.sort() returns there."""

    def sort(x):
        x.sort(axis=1)
        return x * 2

    def centred(x):
        kept = x
        x -= x.mean(axis=1, keepdims=True)
        return kept

    wanted = (
        np.sort(callables.VECTORS, axis=1) * 2,
        callables.VECTORS - callables.VECTORS.mean(1, keepdims=True),
    )
    for fn, output in zip((sort, centred), wanted, strict=True):
        target = callables.adapt(fn, vectors=True)
        assert target.framework == "NumPy" and target.gradient is None
        np.testing.assert_array_equal(target.fn(callables.VECTORS), output)


def test_an_object_that_counts_is_not_compiled():
    class Counting:
        count = jnp.zeros(())

        def __call__(self, x):
            self.count = self.count + x.mean()
            return jnp.cumsum(x, axis=1)

    target = callables.adapt(Counting(), vectors=True)
    for rows in (1, 2, 3):
        x = np.resize(callables.VECTORS, (rows, callables.T, callables.E))
        np.testing.assert_allclose(target.fn(x), np.cumsum(x, axis=1), atol=1e-5)


def test_nothing_is_printed(capsys):
    for own in (callables.in_numpy, callables.in_jax):

        def fn(tokens, train=False, own=own):
            print("forward", train, tokens.shape)
            return own(tokens)

        target = callables.adapt(fn)
        target.fn(callables.TOKENS)
        target.training(callables.TOKENS)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("fn", "framework"),
    [
        (callables.in_numpy, "NumPy"),
        (callables.in_jax, "JAX"),
        (callables.in_jax_eagerly, "JAX"),
    ],
)
def test_frameworks_are_told_apart(fn, framework):
    target = callables.adapt(fn)
    assert target.framework == framework
    assert target.training is None and target.gradient is None and not target.notes
    output = target.fn(callables.TOKENS)
    assert type(output) is np.ndarray
    np.testing.assert_allclose(
        output, callables.in_numpy(callables.TOKENS), rtol=1e-5, atol=1e-5
    )


def test_what_jax_can_trace_is_compiled():
    traces = []

    def fn(tokens):
        traces.append(isinstance(tokens, jax.core.Tracer))
        return callables.in_jax(tokens)

    target = callables.adapt(fn)
    # With NumPy's arrays, which it refuses, traced and not.
    assert traces.count(False) == 2
    before = len(traces)
    for _ in range(3):
        target.fn(callables.TOKENS)
    assert len(traces) == before


def test_a_function_of_tensors(torch):
    target = callables.adapt(callables.torch_function(torch))
    assert target.framework == "PyTorch"
    np.testing.assert_allclose(
        target.fn(callables.TOKENS),
        callables.in_numpy(callables.TOKENS),
        rtol=1e-5,
        atol=1e-5,
    )


WEIGHTS = np.tril(np.random.default_rng(3).normal(size=(callables.T, callables.T)))
WEIGHTS[4, 1] = 0


def test_gradients_in_jax_and_pytorch(torch):
    """Of y = W x the largest derivative is |W| times the same for a row."""

    def mixed(x):
        return jnp.einsum("ij,bje->bie", jnp.asarray(WEIGHTS, jnp.float32), x)

    def mixed_in_torch(x):
        return torch.einsum("ij,bje->bie", torch.tensor(WEIGHTS).to(x), x)

    for fn, framework in ((mixed, "JAX"), (mixed_in_torch, "PyTorch")):
        target = callables.adapt(fn, vectors=True)
        assert target.framework == framework
        norms = target.gradient(callables.VECTORS)
        wanted = np.abs(WEIGHTS) * (norms[:, :1] / np.abs(WEIGHTS[:, :1]))
        np.testing.assert_allclose(norms, wanted, rtol=1e-5)
        assert norms[4, 1] == 0 and np.all(norms.diagonal() > 0)


def test_a_derivative_that_there_is_not_is_refused(torch):
    target = callables.adapt(lambda x: x.detach().clone(), vectors=True)
    with pytest.raises(calls.Refused, match="does not require grad"):
        target.gradient(callables.VECTORS)


@pytest.mark.parametrize("wide", [np.float16, np.float32, np.float64, np.int64, bool])
def test_outputs_keep_their_type(wide):
    target = callables.adapt(lambda tokens: callables.in_numpy(tokens).astype(wide))
    np.testing.assert_array_equal(
        target.fn(callables.TOKENS), callables.in_numpy(callables.TOKENS).astype(wide)
    )
    chex.assert_type(target.fn(callables.TOKENS), wide)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_narrow_floats_keep_their_type(name, torch):
    """By which rounding is measured."""
    wanted = jnp.asarray(callables.TABLE[callables.TOKENS]).astype(getattr(jnp, name))
    narrow = torch.tensor(callables.TABLE).to(getattr(torch, name))
    for fn in (
        lambda tokens: jnp.asarray(callables.TABLE)[tokens].astype(wanted.dtype),
        lambda tokens: narrow.float()[tokens.long()].to(narrow.dtype),
    ):
        output = callables.adapt(fn).fn(callables.TOKENS)
        assert type(output) is np.ndarray and output.dtype == wanted.dtype
        np.testing.assert_array_equal(output, np.asarray(wanted))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_a_module_gets_vectors_as_wide_as_its_parameters(name, torch):
    dtype = getattr(torch, name)
    target = callables.adapt(
        torch.nn.Linear(callables.E, callables.E).to(dtype), vectors=True
    )
    chex.assert_type(target.fn(callables.VECTORS), getattr(jnp, name))
    norms = target.gradient(callables.VECTORS)
    assert np.all(norms.diagonal() > 0)
    assert np.count_nonzero(norms) == callables.T
