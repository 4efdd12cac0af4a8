"""The short convolution and the shift: a loop over real tokens, state and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import convolution
from tests.support import recurrences

B, T, W, E = 2, 5, 4, 3


def loop(x, kernel, bias, state):
    y = np.zeros_like(x)
    for b in range(len(x)):
        line = [*state[b], *x[b]]
        for t in range(x.shape[1]):
            for e in range(x.shape[2]):
                y[b, t, e] = bias[e]
                for w in range(len(kernel)):
                    y[b, t, e] += kernel[w, e] * line[t + w][e]
    whole = np.concatenate([state, x], axis=1)
    return [whole[:, whole.shape[1] - state.shape[1] :], y]


def check(dtype, tolerance, length):
    inputs = recurrences.normal(
        0, (B, length, E), (W, E), (E,), (B, W - 1, E), dtype=dtype
    )

    def run(x, kernel, bias, state):
        return list(convolution.depthwise(x, kernel, bias, state=state))

    recurrences.assert_is_loop(run, loop, inputs, tolerance)


@pytest.mark.parametrize("length", [1, T])
def test_is_the_loop(length):
    check(np.float32, 1e-5, length)


@pytest.mark.x64
def test_is_the_loop_in_float64():
    check(np.float64, 1e-10, T)


def test_continues_from_every_state():
    x, kernel = recurrences.normal(1, (B, T, E), (W, E))

    def run(inputs, state):
        return convolution.depthwise(*inputs, kernel, state=state)

    recurrences.assert_streams(run, [x], range(1, T))


@pytest.mark.parametrize("mask", recurrences.MASKS.values(), ids=recurrences.MASKS)
def test_padding_is_no_token(mask):
    x, kernel, bias = recurrences.normal(2, (B, T, E), (W, E), (E,))

    def run(inputs, mask):
        return convolution.depthwise(*inputs, kernel, bias, token_mask=mask)

    recurrences.assert_ignores_padding(run, [x], mask)


def test_padding_keeps_the_state_that_was_given():
    x, kernel, state = recurrences.normal(3, (1, T, E), (W, E), (1, W - 1, E))
    left, right = np.arange(T)[None] >= 2, np.arange(T)[None] < 3
    nothing = np.zeros((1, T), bool)
    alone = convolution.depthwise(x[:, 2:], kernel, state=state)
    padded = convolution.depthwise(x, kernel, token_mask=left, state=state)
    np.testing.assert_allclose(padded[1][:, 2:], alone[1], atol=1e-6)
    np.testing.assert_array_equal(padded[0], alone[0])
    kept, _ = convolution.depthwise(x, kernel, token_mask=nothing, state=state)
    np.testing.assert_array_equal(kept, state)
    short, _ = convolution.depthwise(x, kernel, token_mask=right & left, state=state)
    np.testing.assert_array_equal(short[0], [*state[0, 1:], x[0, 2]])


@pytest.mark.parametrize("mask", [None, *recurrences.MASKS.values()])
def test_shift_gives_the_last_real_token(mask):
    x, state = recurrences.normal(4, (B, T, E), (B, 1, E))
    real = np.ones((B, T), bool) if mask is None else np.asarray(mask, bool)
    token_mask = None if mask is None else real
    last, found = jax.jit(convolution.shift)(x, token_mask=token_mask, state=state)
    for b in range(B):
        before = state[b, 0]
        for t in range(T):
            if real[b, t]:
                np.testing.assert_array_equal(found[b, t], before)
                before = x[b, t]
            else:
                assert not found[b, t].any()
        np.testing.assert_array_equal(last[b, 0], before)


def test_narrow_floats_are_summed_in_float32():
    """256 + 1 is 256 in bfloat16."""
    x, one = jnp.full((1, 1, 1), 256, jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    kernel = jnp.asarray([[1], [1], [-1]], jnp.bfloat16)
    state = jnp.concatenate([x, one], axis=1)
    last, y = convolution.depthwise(x, kernel, state=state)
    assert y.dtype == last.dtype == jnp.bfloat16
    assert y.item() == 1


def test_transformations():
    x, kernel = recurrences.normal(5, (B, T, E), (W, E))
    mask = np.asarray(recurrences.MASKS["holes"], bool)

    def run(x):
        return convolution.depthwise(x, kernel, token_mask=mask)[1]

    wanted = run(x)
    with jax.disable_jit():
        np.testing.assert_allclose(run(x), wanted, atol=1e-6)
    found = jax.jit(jax.vmap(jax.checkpoint(run)))(x[None])
    np.testing.assert_allclose(found[0], wanted, atol=1e-6)


def test_what_does_not_fit_is_refused():
    x, kernel = jnp.ones((1, 3, 2)), jnp.ones((4, 2))
    with pytest.raises(ValueError, match=r"x must be \[B T E\]"):
        convolution.depthwise(x[0], kernel)
    with pytest.raises(ValueError, match=r"kernel must be \[W E\], W > 0"):
        convolution.depthwise(x, kernel[:0])
    with pytest.raises(ValueError, match=r"kernel must be \[4, 2\], got \[4, 1\]"):
        convolution.depthwise(x, kernel[:, :1])
    with pytest.raises(ValueError, match=r"bias must be \[2\]"):
        convolution.depthwise(x, kernel, kernel)
    with pytest.raises(ValueError, match=r"state must be \[1, 3, 2\]"):
        convolution.depthwise(x, kernel, state=x[:, :2])
    with pytest.raises(ValueError, match=r"token_mask must be \[1, 3\]"):
        convolution.shift(x, token_mask=np.ones((1, 2), bool))
