"""train.callables.adapter: a stranger's callable, and what it must be."""

import functools

import chex
import numpy as np
import pytest

from attention.properties import calls
from tests.support import callables


def test_a_callable_that_writes_into_its_arrays():
    buffer = np.zeros((2, callables.T, callables.V), np.float32)

    def fn(tokens):
        output = (
            buffer
            if len(tokens) == 2
            else np.zeros((len(tokens), callables.T, callables.V))
        )
        output[:] = callables.in_numpy(tokens)
        tokens[:] = 0
        return output

    target = callables.adapt(fn)
    tokens = callables.TOKENS.copy()
    first = target.fn(tokens)
    np.testing.assert_array_equal(tokens, callables.TOKENS)
    target.fn((callables.TOKENS + 1) % callables.V)
    np.testing.assert_array_equal(first, callables.in_numpy(callables.TOKENS))


class Output(tuple):
    """Stands for the output object of a library."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y[:, 1:], r"tokens int32 \[2 6\] it returned \[2 5 11\], expected"),
        (lambda y: y[0], r"returned \[6 11\], expected \[2 6 11\]: the batch axis is"),
        (lambda y: y.swapaxes(0, 1), r"\[6 2 11\], expected \[2 6 11\]: time stands"),
        (lambda y: y[:2, :, 0], r"\[2 6\], .*: the axis of the vocabulary is missing"),
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
        callables.adapt(lambda tokens: change(callables.in_numpy(tokens).astype(float)))


def test_two_batch_sizes_tell_a_batch_from_time():
    with pytest.raises(ValueError, match=r"int32 \[3 2\] it returned \[2 3 11\]"):
        callables.adapt(
            lambda tokens: callables.in_numpy(tokens).swapaxes(0, 1), length=2
        )


def test_ids_are_no_logits():
    with pytest.raises(ValueError, match=r"returned \[2 11\], expected \[2 11 11\]"):
        callables.adapt(
            lambda tokens: callables.in_numpy(tokens).argmax(-1), length=callables.V
        )


def test_vectors_may_become_anything_that_keeps_batch_and_time():
    for shape in ((2, callables.T), (2, callables.T, 3), (2, callables.T, 3, 2)):
        zeros = np.zeros((3, *shape[1:]), np.float32)
        target = callables.adapt(
            functools.partial(lambda y, x: y[: len(x)], zeros), vectors=True
        )
        chex.assert_shape(target.fn(callables.VECTORS), shape)
    with pytest.raises(
        ValueError, match=r"vectors float32 \[2 6 4\] it .* \[2 6 \.\.\.\]"
    ):
        callables.adapt(lambda x: x.sum(1), vectors=True)


@pytest.mark.parametrize("kind", ["numpy", "jax", "torch"])
def test_hidden_randomness_is_refused(kind, torch):
    fn = {
        "numpy": lambda tokens: callables.in_numpy(tokens) + np.random.normal(),
        "jax": lambda tokens: callables.in_jax(tokens) + np.random.normal(),
        "torch": lambda tokens: torch.tensor(callables.TABLE)[tokens] + torch.rand(()),
    }[kind]
    with pytest.raises(ValueError, match="not deterministic on equal input: output 0"):
        callables.adapt(fn)


def test_hidden_rounding_is_noted():
    def noisy(size):
        called = []

        def fn(tokens):
            called.append(tokens)
            return callables.in_numpy(tokens) * np.float32(
                1 + size * (len(called) == 4)
            )

        return fn

    (note,) = callables.adapt(noisy(1e-6)).notes
    assert "differ by" in note
    with pytest.raises(ValueError, match="not deterministic"):
        callables.adapt(noisy(1e-4))


def test_a_memory_is_refused():
    """Of the call before: equal inputs in a row would give equal outputs."""
    memory = []

    def fn(x):
        memory.append(x.copy())
        before = memory[-2] if len(memory) > 1 else x
        return np.cumsum(x, axis=1) + (before if before.shape == x.shape else 0)

    with pytest.raises(ValueError, match="does it .* remember earlier calls"):
        callables.adapt(fn, vectors=True)


def test_another_dtype_is_another_number_only_if_it_is():
    """Equal numbers of two types are one answer, noted as nothing."""
    called = []

    def fn(tokens):
        called.append(tokens)
        return callables.in_numpy(tokens).astype(
            np.float64 if len(called) % 2 else np.float32
        )

    target = callables.adapt(fn)
    assert not target.notes
    types = {calls.call(target.fn, callables.TOKENS).dtype for _ in range(2)}
    assert types == {np.dtype(np.float32), np.dtype(np.float64)}
    np.testing.assert_array_equal(
        calls.call(target.fn, callables.TOKENS), callables.in_numpy(callables.TOKENS)
    )


def test_other_shapes_may_be_refused():
    def fn(tokens):
        if tokens.shape != (2, callables.T):
            raise RuntimeError("only two rows of six")
        return callables.in_numpy(tokens)

    target = callables.adapt(fn)
    message = r"^raised RuntimeError: only two rows .* \(.*adapter_test.py, line \d+\)$"
    with pytest.raises(calls.Refused, match=message):
        calls.call(target.fn, callables.TOKENS[:1])
