"""Retention: every form is the paper's sum, and the recurrence of its decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import retention
from models import retention as module
from tests.support import recurrences

B, T, N, H, D = 2, 5, 2, 3, 2
LONG = 2 * 4 + 3
FORMS = list(retention.FORMS)
LOG_DECAY = np.log([0.5, 0.9])


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Whole chunks, and a ragged end."""
    monkeypatch.setattr(retention, "CHUNK", 4)


def loop(query, key, value, log_decay, state):
    """Equation 6, a number at a time; the last state beside the outputs."""
    output, state = np.zeros_like(value), state.copy()
    for b, n in np.ndindex(value.shape[0], value.shape[2]):
        for t in range(value.shape[1]):
            for h, d in np.ndindex(*state.shape[2:]):
                state[b, n, h, d] *= np.exp(log_decay[n])
                state[b, n, h, d] += key[b, t, n, h] * value[b, t, n, d]
                output[b, t, n, d] += query[b, t, n, h] * state[b, n, h, d] / H**0.5
    return [state, output]


def arrays(dtype=np.float32, length=T):
    widths = [(B, length, N, width) for width in (H, H, D)]
    *inputs, state = recurrences.normal(0, *widths, (B, N, H, D), dtype=dtype)
    return *inputs, LOG_DECAY.astype(dtype), state


def check(form, dtype, tolerance, length):
    def run(*inputs):
        *inputs, state = inputs
        return list(retention.attention(*inputs, state=state, form=form))

    recurrences.assert_is_loop(run, loop, arrays(dtype, length), tolerance)


@pytest.mark.parametrize("length", [1, LONG])
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop(form, length):
    check(form, np.float32, 1e-5, length)


@pytest.mark.x64
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_loop_in_float64(form):
    check(form, np.float64, 1e-10, LONG)


def test_equation_5_on_one_head():
    """(Q Kᵀ ⊙ D) V, D the matrix of decays."""
    query, key, value, log_decay, _ = arrays()
    t, s = np.indices((T, T))
    for n in range(N):
        decays = np.where(t >= s, np.exp(log_decay[n]) ** np.maximum(t - s, 0), 0)
        wanted = (query[0, :, n] @ key[0, :, n].T / H**0.5 * decays) @ value[0, :, n]
        _, found = retention.attention(query, key, value, log_decay)
        np.testing.assert_allclose(found[0, :, n], wanted, atol=1e-5)


def test_decays_of_the_paper():
    np.testing.assert_allclose(
        np.exp(retention.log_decays(3)), [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128]
    )


def test_continues_from_every_state():
    *inputs, log_decay, _ = arrays()

    def run(inputs, state):
        return retention.attention(*inputs, log_decay, state=state)

    recurrences.assert_streams(run, inputs, range(1, T))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", recurrences.MASKS.values(), ids=recurrences.MASKS)
def test_padding_is_no_token(form, mask):
    *inputs, log_decay, _ = arrays()

    def run(inputs, mask):
        return retention.attention(*inputs, log_decay, token_mask=mask, form=form)

    recurrences.assert_ignores_padding(run, inputs, mask)


def test_step_by_step():
    query, key, value, log_decay, state = arrays()
    last, wanted = retention.attention(query, key, value, log_decay, state=state)
    step = jax.vmap(jax.vmap(retention.step), in_axes=(0, 0, 0, 0, None))
    for t in range(T):
        here = query[:, t] / H**0.5, key[:, t], value[:, t]
        state, found = step(state, *here, log_decay)
        np.testing.assert_allclose(found, wanted[:, t], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


def test_a_thousand_steps_of_little_decay():
    """No quotient of decays: exact where 0.01 is lost per step."""
    query, key, value, _, state = arrays(length=1000)
    inputs = query, 200 * key, value, np.float32([-0.01, -5.0]), state
    found = retention.attention(*inputs[:-1], state=state)
    for x, wanted in zip(found, loop(*map(np.float64, inputs)), strict=True):
        recurrences.assert_close(x, wanted, 1e-5)


def test_dtypes_and_bad_shapes():
    inputs = [jnp.bfloat16(x) for x in arrays()]
    last, found = retention.attention(*inputs[:-1], state=inputs[-1])
    assert (last.dtype, found.dtype) == (jnp.float32, jnp.bfloat16)
    query, key, value, log_decay, _ = arrays()
    for bad, words in [
        ((query[:, :-1], key, value, log_decay), "query must be"),
        ((query, key, value[0], log_decay), r"value must be \[B T N D\]"),
        ((query, key, value, log_decay[:1]), "log_decay must be"),
    ]:
        with pytest.raises(ValueError, match=words):
            retention.attention(*bad)
    with pytest.raises(ValueError, match="form must be one of"):
        retention.attention(query, key, value, log_decay, form="fast")


def test_the_layer_is_equation_8():
    """Retention, a norm of each head by itself, a swish gate, a projection."""
    layer = module.Retention(num_heads=N, use_bias=False)
    x = np.random.default_rng(0).normal(size=(B, T, N * H)).astype(np.float32)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape), shapes)
    query, key, value, gate = (
        np.einsum("bte,enh->btnh", x, params[name]["kernel"])
        for name in ("query", "key", "value", "gate")
    )
    log_decay = retention.log_decays(N)
    _, y = loop(query, key, value, log_decay, np.zeros((B, N, H, H)))
    y /= np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-6)
    y *= params["norm"]["scale"] * gate / (1 + np.exp(-gate))
    wanted = np.einsum("btnh,nhe->bte", y, params["out"]["kernel"])
    found = jax.jit(layer.apply)({"params": params}, x)
    recurrences.assert_close(found, wanted, 1e-5)
