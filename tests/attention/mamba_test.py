"""Mamba's selective scan: every form is the paper's loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import mamba
from tests.support import recurrences

ROWS, T, E, M = 2, 5, 3, 2
FORMS = list(mamba.FORMS)


def loop(x, step_size, A, B, C, D, state):
    """Algorithm 2, a number at a time; the last state beside the outputs."""
    y, state = np.zeros_like(x), state.copy()
    for b, t, e in np.ndindex(x.shape):
        y[b, t, e] = D[e] * x[b, t, e]
        for m in range(A.shape[1]):
            h = np.exp(step_size[b, t, e] * A[e, m]) * state[b, m, e]
            h += step_size[b, t, e] * B[b, t, m] * x[b, t, e]
            y[b, t, e] += C[b, t, m] * h
            state[b, m, e] = h
    return [state, y]


def arrays(dtype=np.float32, length=T, rows=ROWS):
    x, step_size, A, B, C, D, state = recurrences.normal(
        0,
        (rows, length, E),
        (rows, length, E),
        (E, M),
        (rows, length, M),
        (rows, length, M),
        (E,),
        (rows, M, E),
        dtype=dtype,
    )
    return x, np.exp(step_size - 1), -np.exp(A), B, C, D, state


def scan(x, step_size, B, C, given, **options):
    """The scan, its arrays by token first; given: A and D."""
    return mamba.selective_scan(x, step_size, given[0], B, C, given[1], **options)


def by_token(inputs):
    x, step_size, A, B, C, D, _ = inputs
    return [x, step_size, B, C], (A, D)


def check(form, dtype, tolerance, length=T, rows=ROWS):
    def run(*inputs):
        *inputs, state = inputs
        return list(mamba.selective_scan(*inputs, state=state, form=form))

    recurrences.assert_is_loop(run, loop, arrays(dtype, length, rows), tolerance)


@pytest.mark.parametrize("length", [1, T])
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop(form, length):
    check(form, np.float32, 1e-5, length)


def test_ragged_chunks_are_the_loop(monkeypatch):
    monkeypatch.setattr(mamba, "CHUNK", 4)
    check("chunked", np.float32, 1e-5, 11, rows=1)


@pytest.mark.x64
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop_in_float64(form):
    check(form, np.float64, 1e-10)


@pytest.mark.parametrize(
    "form, splits", [("chunked", range(1, T)), ("associative", [2]), ("quadratic", [2])]
)
def test_continues_from_every_state(form, splits):
    inputs, given = by_token(arrays())

    def run(inputs, state):
        return scan(*inputs, given, state=state, form=form)

    recurrences.assert_streams(run, inputs, splits)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", recurrences.MASKS.values(), ids=recurrences.MASKS)
def test_padding_is_no_token(form, mask):
    inputs, given = by_token(arrays())

    def run(inputs, mask):
        return scan(*inputs, given, token_mask=mask, form=form)

    recurrences.assert_ignores_padding(run, inputs, mask)


def test_step_by_step():
    x, step_size, A, B, C, D, state = arrays()
    last, wanted = mamba.selective_scan(x, step_size, A, B, C, D, state=state)
    step = jax.vmap(mamba.step, in_axes=(0, 0, 0, 0, 0, None))
    for t in range(T):
        tokens = x[:, t], step_size[:, t], B[:, t], C[:, t]
        state, read = step(state, *tokens, A.T)
        np.testing.assert_allclose(read + D * x[:, t], wanted[:, t], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.parametrize("form", ["recurrent", "chunked", "associative"])
@pytest.mark.parametrize("log_decay", [-0.01, np.log(0.01), -1e5])
def test_a_thousand_steps(form, log_decay):
    x, step_size, A, B, C, D, state = arrays(length=1000, rows=1)
    step_size[:, ::3] = 1
    inputs = x, step_size, np.full_like(A, log_decay), 200 * B, C, D, state
    found = mamba.selective_scan(*inputs[:-1], state=state, form=form)
    for value, wanted in zip(found, loop(*map(np.float64, inputs)), strict=True):
        recurrences.assert_close(value, wanted, 1e-5)


def test_memory_of_the_derivative_is_that_of_the_tokens():
    """States are kept where chunks begin: T / CHUNK of them, and not T."""
    inputs, given = by_token(arrays(length=8 * mamba.CHUNK, rows=1))

    def loss(*inputs):
        return jnp.sum(scan(*inputs, given)[1])

    _, pullback = jax.vjp(loss, *inputs)
    kept = sum(x.size for x in jax.tree.leaves(pullback))
    assert kept < 2 * sum(x.size for x in inputs)


def test_outputs_have_the_dtype_of_x():
    *inputs, state = (jnp.bfloat16(x) for x in arrays())
    last, found = mamba.selective_scan(*inputs, state=state)
    assert (last.dtype, found.dtype) == (jnp.float32, jnp.bfloat16)
    wide = [np.float32(x) for x in inputs]
    wanted = mamba.selective_scan(*wide, state=np.float32(state))[1]
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16))


@pytest.mark.parametrize("form", ["chunked", "associative"])
def test_transformations(form):
    inputs = arrays()[:-1]

    def run(*inputs):
        return mamba.selective_scan(*inputs, form=form)[1]

    wanted = run(*inputs)
    with jax.disable_jit():
        np.testing.assert_allclose(run(*inputs), wanted, atol=1e-6)
    stacked = jax.jit(jax.vmap(jax.checkpoint(run)))(*(x[None] for x in inputs))
    np.testing.assert_allclose(stacked[0], wanted, atol=1e-6)


def test_what_does_not_fit_is_refused():
    x, step_size, A, B, C, D, state = arrays()
    run = functools.partial(mamba.selective_scan, x, step_size)
    with pytest.raises(ValueError, match="form must be one of"):
        run(A, B, C, D, form="quick")
    with pytest.raises(ValueError, match=r"x must be \[B T E\]"):
        mamba.selective_scan(x[0], step_size, A, B, C, D)
    with pytest.raises(ValueError, match=r"step_size must be \[2, 5, 3\]"):
        mamba.selective_scan(x, step_size[:, 1:], A, B, C, D)
    with pytest.raises(ValueError, match=r"A must be \[3, 2\]"):
        run(A[1:], B, C, D)
    with pytest.raises(ValueError, match=r"B must be \[2, 5, 2\]"):
        run(A, B[1:], C, D)
    with pytest.raises(ValueError, match=r"C must be \[2, 5, 2\]"):
        run(A, B, C[1:], D)
    with pytest.raises(ValueError, match=r"D must be \[3\]"):
        run(A, B, C, D[1:])
    with pytest.raises(ValueError, match=r"state must be \[2, 2, 3\]"):
        run(A, B, C, D, state=state[1:])
