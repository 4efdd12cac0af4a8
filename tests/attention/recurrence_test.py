"""h = a h + b: every form is the loop, and continues from any state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import recurrence
from tests.support import recurrences

FORMS = list(recurrence.FORMS)


def loop(decay, inputs, state):
    states = []
    for t in range(decay.shape[1]):
        state = decay[:, t] * state + inputs[:, t]
        states.append(state)
    return [np.stack(states, axis=1)]


def check(form, dtype, tolerance, length):
    inputs = recurrences.normal(0, *[(2, length, 3)] * 2, (2, 3), dtype=dtype)

    def run(decay, inputs, state):
        return [recurrence.states(decay, inputs, state=state, form=form)]

    recurrences.assert_is_loop(run, loop, inputs, tolerance)


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop(form, length):
    check(form, np.float32, 1e-5, length)


@pytest.mark.x64
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop_in_float64(form):
    check(form, np.float64, 1e-10, 7)


@pytest.mark.parametrize("form", FORMS)
def test_a_known_row(form):
    """case B099."""
    decay, inputs = np.full((1, 4), 0.5), np.arange(1.0, 5)[None]
    found = recurrence.states(np.float32(decay), np.float32(inputs), form=form)
    np.testing.assert_allclose(found, [[1, 2.5, 4.25, 6.125]])


@pytest.mark.parametrize("length", [2, 3, 64])
def test_forms_agree_at_any_length(length):
    """case B099."""
    inputs = recurrences.normal(length, *[(1, length, 2)] * 2)
    first, second = (recurrence.states(*inputs, form=form) for form in FORMS)
    recurrences.assert_close(first, second, 1e-5)


def test_steps_compose_associatively_and_do_not_commute():
    """case B099."""
    a, b, c = [(jnp.float32(x), jnp.float32(y)) for x, y in ((2, 3), (5, 7), (0.5, 1))]
    compose = recurrence.compose
    np.testing.assert_array_equal(compose(compose(a, b), c), compose(a, compose(b, c)))
    assert compose(a, b)[1] != compose(b, a)[1]
    step = functools.partial(recurrence.step, jnp.float32(4))
    assert recurrence.step(step(*a), *b) == step(*compose(a, b))


@pytest.mark.parametrize("form", FORMS)
def test_continues_from_every_state(form):
    inputs = recurrences.normal(1, *[(2, 5, 3)] * 2)

    def run(inputs, state):
        states = recurrence.states(*inputs, state=state, form=form)
        return states[:, -1], states

    recurrences.assert_streams(run, inputs, range(1, 5))


@pytest.mark.parametrize("mask", recurrences.MASKS.values(), ids=recurrences.MASKS)
def test_padding_leaves_the_state(mask):
    decay, inputs = recurrences.normal(2, *[(2, 5, 3)] * 2)
    mask = np.asarray(mask, bool)
    holed = np.where(mask[..., None], inputs, np.nan)
    found = recurrence.states(decay, holed, token_mask=mask)
    before = np.zeros((2, 3))
    for t in range(5):
        after = decay[:, t] * before + inputs[:, t]
        before = np.where(mask[:, t, None], after, before)
        np.testing.assert_allclose(found[:, t], before, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_summed_in_float32(form):
    inputs = jnp.full((1, 600, 1), 1, jnp.bfloat16)
    found = recurrence.states(jnp.ones_like(inputs), inputs, form=form)
    assert found.dtype == jnp.bfloat16 and found[0, -1, 0] == 600


def test_segment_sums_survive_a_decay_of_zero():
    log_decay = jnp.asarray([-1.0, -jnp.inf, -2.0, -3.0])
    found = recurrence.segment_sums(log_decay)
    wanted = np.full((4, 4), -np.inf)
    for t in range(4):
        for s in range(t + 1):
            wanted[t, s] = sum(np.float64(log_decay[s + 1 : t + 1]))
    np.testing.assert_allclose(found, wanted)


def test_transformations():
    decay, inputs = recurrences.normal(3, *[(2, 4, 3)] * 2)
    wanted = recurrence.states(decay, inputs)
    with jax.disable_jit():
        np.testing.assert_allclose(recurrence.states(decay, inputs), wanted, atol=1e-6)
    stacked = jax.jit(jax.vmap(jax.checkpoint(recurrence.states)))(
        decay[None], inputs[None]
    )
    np.testing.assert_allclose(stacked[0], wanted, atol=1e-6)


def test_what_does_not_fit_is_refused():
    x = jnp.ones((1, 3, 2))
    with pytest.raises(ValueError, match="form must be one of recurrent, associative"):
        recurrence.states(x, x, form="quick")
    with pytest.raises(ValueError, match=r"decay must be \[1, 3, 2\], got \[3, 2\]"):
        recurrence.states(x[0], x)
    with pytest.raises(ValueError, match=r"state must be \[1, 2\]"):
        recurrence.states(x, x, state=x)
    with pytest.raises(ValueError, match=r"token_mask must be \[1, 3\]"):
        recurrence.states(x, x, token_mask=np.ones((3, 1), bool))
    with pytest.raises(ValueError, match=r"T > 0"):
        recurrence.states(x[:, :0], x[:, :0])
