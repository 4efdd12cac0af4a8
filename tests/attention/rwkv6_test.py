"""RWKV-6's recurrence: every form is the paper's sum, whatever the decays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import rwkv6
from tests.support import recurrences

B, T, N, H, D = 2, 5, 2, 3, 2
# Whole chunks, and a ragged end.
LONG = 2 * rwkv6.CHUNK + 3
FORMS = list(rwkv6.FORMS)


def loop(receptance, key, value, log_decay, bonus, state):
    """Section 4.2, a number at a time; the last state beside the outputs."""
    output, state = np.zeros_like(value), state.copy()
    for b in range(value.shape[0]):
        for n in range(value.shape[2]):
            S = state[b, n]
            for t in range(value.shape[1]):
                for h in range(S.shape[0]):
                    for d in range(S.shape[1]):
                        kv = key[b, t, n, h] * value[b, t, n, d]
                        read = S[h, d] + bonus[n, h] * kv
                        output[b, t, n, d] += receptance[b, t, n, h] * read
                        S[h, d] = np.exp(log_decay[b, t, n, h]) * S[h, d] + kv
    return [state, output]


def arrays(dtype=np.float32, length=T, rows=B):
    receptance, key, value, log_decay, bonus, state = recurrences.normal(
        0,
        *[(rows, length, N, width) for width in (H, H, D, H)],
        (N, H),
        (rows, N, H, D),
        dtype=dtype,
    )
    return receptance, key, value, -np.exp(log_decay - 1), bonus, state


def check(form, dtype, tolerance, length, rows=1):
    def run(*inputs):
        *inputs, state = inputs
        return list(rwkv6.wkv(*inputs, state=state, form=form))

    recurrences.assert_is_loop(run, loop, arrays(dtype, length, rows), tolerance)


@pytest.mark.parametrize("length", [1, LONG])
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop(form, length):
    check(form, np.float32, 1e-5, length)


def test_rows_are_apart():
    check("chunked", np.float32, 1e-5, T, rows=B)


@pytest.mark.x64
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop_in_float64(form):
    check(form, np.float64, 1e-10, LONG)


def test_continues_from_every_state(monkeypatch):
    monkeypatch.setattr(rwkv6, "CHUNK", 2)
    *inputs, bonus, _ = arrays()

    def run(inputs, state):
        return rwkv6.wkv(*inputs, bonus, state=state)

    recurrences.assert_streams(run, inputs, range(1, T))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", recurrences.MASKS.values(), ids=recurrences.MASKS)
def test_padding_is_no_token(form, mask):
    *inputs, bonus, _ = arrays()

    def run(inputs, mask):
        return rwkv6.wkv(*inputs, bonus, token_mask=mask, form=form)

    recurrences.assert_ignores_padding(run, inputs, mask)


def test_step_by_step():
    *inputs, bonus, state = arrays()
    last, wanted = rwkv6.wkv(*inputs, bonus, state=state)
    step = jax.vmap(jax.vmap(rwkv6.step), in_axes=(0, 0, 0, 0, 0, None))
    for t in range(T):
        state, found = step(state, *(x[:, t] for x in inputs), bonus)
        np.testing.assert_allclose(found, wanted[:, t], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_decay_of_zero_forgets_the_past(form):
    """Finite too, and with finite gradients: -inf - -inf is formed nowhere."""
    *inputs, log_decay, bonus, _ = arrays()
    log_decay = np.array(log_decay)
    log_decay[:, 2] = -np.inf

    def run(*inputs):
        return rwkv6.wkv(*inputs, log_decay, bonus, form=form)[1]

    found = run(*inputs)
    rest = [x[:, 3:] for x in (*inputs, log_decay)]
    # The token that decays by 0 comes after it: it is all that the state holds.
    _, key, value = inputs
    state = key[:, 2, :, :, None] * value[:, 2, :, None]
    _, wanted = rwkv6.wkv(*rest, bonus, state=state)
    np.testing.assert_allclose(found[:, 3:], wanted, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(run(*x) ** 2), argnums=(0, 1, 2)))
    assert all(np.isfinite(x).all() for x in gradient(*inputs))


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize("log_decay", [-0.01, np.log(0.01), -1000.0])
def test_a_thousand_steps(form, log_decay):
    """Small decays beside large ones lose nothing: no difference of long sums."""
    receptance, key, value, decays, bonus, state = arrays(length=1000, rows=1)
    decays[:, ::3] = log_decay
    inputs = 10 * receptance, 200 * key, value, decays, bonus, state
    found = rwkv6.wkv(*inputs[:-1], state=state, form=form)
    for x, wanted in zip(found, loop(*map(np.float64, inputs)), strict=True):
        recurrences.assert_close(x, wanted, 1e-5)


def test_memory_of_the_derivative_is_that_of_the_states():
    """Nothing of the size T x chunk x H is kept."""
    *inputs, bonus, _ = arrays(length=64 * rwkv6.CHUNK, rows=1)

    def loss(*inputs):
        return jnp.sum(rwkv6.wkv(*inputs, bonus)[1])

    _, pullback = jax.vjp(loss, *inputs)
    kept = sum(x.size for x in jax.tree.leaves(pullback))
    assert kept < 3 * sum(x.size for x in inputs)


def test_outputs_have_the_dtype_of_the_values():
    *inputs, bonus, state = (jnp.bfloat16(x) for x in arrays())
    last, found = rwkv6.wkv(*inputs, bonus, state=state)
    assert (last.dtype, found.dtype) == (jnp.float32, jnp.bfloat16)
    wide = [np.float32(x) for x in inputs]
    wanted = rwkv6.wkv(*wide, np.float32(bonus), state=np.float32(state))[1]
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16))


def test_transformations():
    *inputs, bonus, _ = arrays()

    def run(*inputs):
        return rwkv6.wkv(*inputs, bonus)[1]

    wanted = run(*inputs)
    with jax.disable_jit():
        np.testing.assert_allclose(run(*inputs), wanted, atol=1e-6)
    stacked = jax.jit(jax.vmap(jax.checkpoint(run)))(*(x[None] for x in inputs))
    np.testing.assert_allclose(stacked[0], wanted, atol=1e-6)


def test_what_does_not_fit_is_refused():
    receptance, key, value, log_decay, bonus, state = arrays()
    wkv = functools.partial(rwkv6.wkv, receptance, key)
    with pytest.raises(ValueError, match="form must be one of"):
        wkv(value, log_decay, bonus, form="quick")
    with pytest.raises(ValueError, match=r"value must be \[B T N D\]"):
        wkv(value[0], log_decay, bonus)
    with pytest.raises(ValueError, match=r"log_decay must be \[2, 5, 2, 3\]"):
        wkv(value, value, bonus)
    with pytest.raises(ValueError, match=r"bonus must be \[2, 3\]"):
        wkv(value, log_decay, bonus[:1])
    with pytest.raises(ValueError, match=r"state must be \[2, 2, 3, 2\]"):
        wkv(value, log_decay, bonus, state=state[:1])
