"""RWKV-4's recurrence: every form is the paper's sum, at any size of the keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import rwkv
from tests.support import recurrences

B, T, E = 2, 5, 3
FORMS = list(rwkv.FORMS)


def loop(key, value, log_decay, bonus):
    """Equation 16: both sums anew for every token, as they stand there."""
    output = np.zeros_like(value)
    for b, t, e in np.ndindex(value.shape):
        above = np.exp(bonus[e] + key[b, t, e]) * value[b, t, e]
        below = np.exp(bonus[e] + key[b, t, e])
        for s in range(t):
            weight = np.exp(key[b, s, e] + (t - 1 - s) * log_decay[e])
            above += weight * value[b, s, e]
            below += weight
        output[b, t, e] = above / below
    return [output]


def arrays(dtype=np.float32, length=T):
    key, value, log_decay, bonus = recurrences.normal(
        0, (B, length, E), (B, length, E), (E,), (E,), dtype=dtype
    )
    return key, value, -np.exp(log_decay), bonus


def check(form, dtype, tolerance, length=T):
    def run(*inputs):
        return [rwkv.wkv(*inputs, form=form)[1]]

    recurrences.assert_is_loop(run, loop, arrays(dtype, length), tolerance)


@pytest.mark.parametrize("length", [1, T])
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop(form, length):
    check(form, np.float32, 1e-5, length)


@pytest.mark.x64
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop_in_float64(form):
    check(form, np.float64, 1e-10)


@pytest.mark.parametrize(
    "form, splits",
    [("recurrent", range(1, T)), ("associative", [2]), ("quadratic", [2])],
)
def test_continues_from_every_state(form, splits):
    key, value, log_decay, bonus = arrays()

    def run(inputs, state):
        return rwkv.wkv(*inputs, log_decay, bonus, state=state, form=form)

    recurrences.assert_streams(run, [key, value], splits)


def test_chunks_are_one_sequence(monkeypatch):
    """Of two tokens each, the last one filled up: state, output and gradients."""
    key, value, log_decay, bonus = arrays()

    def run(*inputs):
        state, output = rwkv.wkv(*inputs)
        return jnp.sum(jnp.sin(output)), (state, output)

    gradient = jax.grad(run, argnums=(0, 1, 2, 3), has_aux=True)
    wanted = jax.jit(gradient)(key, value, log_decay, bonus)
    monkeypatch.setattr(rwkv, "CHUNK", 2)
    found = jax.jit(lambda *inputs: gradient(*inputs))(key, value, log_decay, bonus)
    jax.tree.map(lambda x, y: recurrences.assert_close(x, y, 1e-5), found, wanted)


def test_gradients_pass_through_the_state():
    key, value, log_decay, bonus = arrays()

    def whole(*inputs):
        return jnp.sum(jnp.sin(rwkv.wkv(*inputs)[1]))

    def in_two(key, value, *rest):
        state, first = rwkv.wkv(key[:, :2], value[:, :2], *rest)
        _, second = rwkv.wkv(key[:, 2:], value[:, 2:], *rest, state=state)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(second))

    found, wanted = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(key, value, log_decay, bonus)
        for f in (in_two, whole)
    )
    for x, w in zip(found, wanted, strict=True):
        recurrences.assert_close(x, w, 1e-5)


def test_a_peak_that_was_given_has_its_gradient():
    """A state is a token of weight exp(peak) like any other."""
    key, value, log_decay, bonus = arrays()

    def given(peak):
        one = jnp.ones((B, E))
        state = rwkv.State(0.5 * one, one, peak)
        return jnp.sum(jnp.sin(rwkv.wkv(key, value, log_decay, bonus, state=state)[1]))

    def token(peak):
        first = jnp.concatenate([peak[:, None], key], axis=1)
        values = jnp.concatenate([jnp.full((B, 1, E), 0.5), value], axis=1)
        return jnp.sum(jnp.sin(rwkv.wkv(first, values, log_decay, bonus)[1][:, 1:]))

    peak = recurrences.normal(3, (B, E))[0]
    found, wanted = jax.grad(given)(peak), jax.grad(token)(peak)
    recurrences.assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", recurrences.MASKS.values(), ids=recurrences.MASKS)
def test_padding_is_no_token(form, mask):
    key, value, log_decay, bonus = arrays()

    def run(inputs, mask):
        return rwkv.wkv(*inputs, log_decay, bonus, token_mask=mask, form=form)

    recurrences.assert_ignores_padding(run, [key, value], mask)


def test_step_by_step():
    key, value, log_decay, bonus = arrays()
    _, wanted = rwkv.wkv(key, value, log_decay, bonus)
    rows = functools.partial(np.broadcast_to, shape=(B, E))
    state = rwkv.empty(B, E, dtype=jnp.float32)
    for t in range(T):
        state, found = rwkv.step(
            state, key[:, t], value[:, t], rows(log_decay), rows(bonus)
        )
        np.testing.assert_allclose(found, wanted[:, t], atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_key_dominates(form):
    """case B101."""
    key = np.float32([0, 50, 100, 200]).reshape(1, 4, 1)
    value = np.float32([1, 2, 3, 4]).reshape(1, 4, 1)
    zero = np.zeros(1, np.float32)

    def run(key):
        return rwkv.wkv(key, value, zero, zero, form=form)[1][0, :, 0]

    run = jax.jit(run)
    np.testing.assert_allclose(run(key), [1, 2, 3, 4])
    np.testing.assert_allclose(run(-key), 1)
    assert np.isfinite(jax.jit(jax.jacobian(run))(key)).all()
    # At -200 the very first token still counts in full.
    np.testing.assert_allclose(run(key[:, ::-1] - 400), 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_decay", [-0.01, np.log(0.01)])
def test_a_thousand_steps(form, log_decay):
    """case B101: after them exp(Σ log decay) is 0.01^1000, and 1 / it infinite."""
    length = 1000
    key, value = recurrences.normal(5, *[(1, length, 1)] * 2)
    key *= 20
    given = np.full(1, log_decay, np.float32), np.ones(1, np.float32)

    def run(*inputs):
        return rwkv.wkv(*inputs, *given, form=form)[1]

    def loss(*inputs):
        output = run(*inputs)
        return jnp.sum(output**2), output

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    gradients, found = gradient(key, value)
    wide = np.float64(key), np.float64(value), *(np.float64(x) for x in given)
    recurrences.assert_close(found, loop_by_step(*wide), 1e-5)
    assert all(np.isfinite(x).all() for x in gradients)


def loop_by_step(key, value, log_decay, bonus):
    """Both sums in float64, a step at a time: exp(80) is no trouble there."""
    output, above, below = np.zeros_like(value), 0.0, 0.0
    for t in range(value.shape[1]):
        now = np.exp(key[:, t] + bonus)
        output[:, t] = (above + now * value[:, t]) / (below + now)
        above = np.exp(log_decay) * above + np.exp(key[:, t]) * value[:, t]
        below = np.exp(log_decay) * below + np.exp(key[:, t])
    return output


def test_outputs_have_the_dtype_of_the_values():
    key, value, log_decay, bonus = arrays()
    narrow = jnp.bfloat16(value)
    state, found = rwkv.wkv(jnp.bfloat16(key), narrow, log_decay, bonus)
    assert found.dtype == jnp.bfloat16
    assert {x.dtype for x in state} == {jnp.dtype(jnp.float32)}
    wanted = rwkv.wkv(np.float32(jnp.bfloat16(key)), narrow, log_decay, bonus)[1]
    np.testing.assert_array_equal(found, wanted)


def test_outputs_lie_in_the_hull_of_the_values():
    key, value, log_decay, bonus = arrays()
    _, found = rwkv.wkv(10 * key, value, log_decay, bonus)
    least, most = (f.accumulate(value, axis=1) for f in (np.minimum, np.maximum))
    assert (found >= least - 1e-6).all() and (found <= most + 1e-6).all()


@pytest.mark.parametrize("form", FORMS)
def test_transformations(form):
    inputs = arrays()

    def run(*inputs):
        return rwkv.wkv(*inputs, form=form)[1]

    wanted = run(*inputs)
    with jax.disable_jit():
        np.testing.assert_allclose(run(*inputs), wanted, atol=1e-6)
    stacked = jax.jit(jax.vmap(jax.checkpoint(run)))(*(x[None] for x in inputs))
    np.testing.assert_allclose(stacked[0], wanted, atol=1e-6)


def test_what_does_not_fit_is_refused():
    key, value, log_decay, bonus = arrays()
    with pytest.raises(ValueError, match="form must be one of"):
        rwkv.wkv(key, value, log_decay, bonus, form="quick")
    with pytest.raises(ValueError, match=r"value must be \[B T E\]"):
        rwkv.wkv(key, value[0], log_decay, bonus)
    with pytest.raises(ValueError, match=r"key must be \[2, 5, 3\]"):
        rwkv.wkv(key[:, 1:], value, log_decay, bonus)
    with pytest.raises(ValueError, match=r"log_decay must be \[3\]"):
        rwkv.wkv(key, value, log_decay[1:], bonus)
    with pytest.raises(ValueError, match=r"bonus must be \[3\]"):
        rwkv.wkv(key, value, log_decay, bonus[1:])
    with pytest.raises(ValueError, match=r"state.numerator must be \[2, 3\]"):
        state = rwkv.empty(1, E, dtype=jnp.float32)
        rwkv.wkv(key, value, log_decay, bonus, state=state)
