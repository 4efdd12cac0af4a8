"""The GRU against a loop written from the paper, its derivative too, and as a mixer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import properties
from models import recurrent

B, T, E, M = 2, 7, 6, 5
RNG = np.random.default_rng(0)
KERNELS = RNG.normal(size=(3, M, M))
INPUTS, STATE = RNG.normal(size=(T, 3, M)), RNG.normal(size=M)
GRADIENT, LAST_GRADIENT = RNG.normal(size=(T, M)), RNG.normal(size=M)
REAL = np.array([0, 1, 1, 0, 1, 1, 0], bool)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(kernels, inputs, state, real, order):
    """States and gradients of Σ GRADIENT · states + LAST_GRADIENT · last, in NumPy."""
    reset_kernel, update_kernel, kernel = kernels
    states, kept = np.zeros((T, M)), {}
    for t in order:
        if real[t]:
            r = sigmoid(inputs[t, 0] + state @ reset_kernel)
            z = sigmoid(inputs[t, 1] + state @ update_kernel)
            c = np.tanh(inputs[t, 2] + (r * state) @ kernel)
            kept[t] = r, z, c, state
            state = z * state + (1 - z) * c
        states[t] = state
    d_kernels, d_inputs = np.zeros((3, M, M)), np.zeros((T, 3, M))
    dh = LAST_GRADIENT.copy()
    for t in reversed(order):
        dh = dh + GRADIENT[t]
        if not real[t]:
            continue
        r, z, c, h = kept[t]
        d_candidate = dh * (1 - z) * (1 - c**2)
        d_reset_state = kernel @ d_candidate
        d_reset = d_reset_state * h * r * (1 - r)
        d_update = dh * (h - c) * z * (1 - z)
        d_inputs[t] = d_reset, d_update, d_candidate
        d_kernels[0] += np.outer(h, d_reset)
        d_kernels[1] += np.outer(h, d_update)
        d_kernels[2] += np.outer(r * h, d_candidate)
        dh = dh * z + d_reset_state * r
        dh += reset_kernel @ d_reset + update_kernel @ d_update
    return states, state, (d_kernels, d_inputs, dh)


@functools.partial(jax.jit, static_argnames="reverse")
def run(kernels, inputs, state, real, *, reverse):
    def both(kernels, inputs, state):
        kernels = recurrent.Kernels(*kernels)
        return recurrent.scan(kernels, inputs, state, real, reverse=reverse)

    out, pull = jax.vjp(both, kernels, inputs, state)
    return *out, pull((jnp.asarray(GRADIENT, state.dtype), LAST_GRADIENT))


def assert_as_by_hand(real, *, reverse, dtype, rtol):
    arrays = [jnp.asarray(x, dtype) for x in (KERNELS, INPUTS, STATE)]
    found = run(*arrays, real, reverse=reverse)
    order = range(T - 1, -1, -1) if reverse else range(T)
    real = np.ones(T, bool) if real is None else real
    wanted = by_hand(*map(np.float64, arrays), real, order)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(x, y, atol=rtol * np.max(np.abs(y)), rtol=0)
    assert np.all(np.asarray(found[2][1])[~real] == 0)


@pytest.mark.parametrize("real", [None, REAL])
@pytest.mark.parametrize("reverse", [False, True])
def test_states_and_gradients_by_hand(real, reverse):
    assert_as_by_hand(real, reverse=reverse, dtype=jnp.float32, rtol=1e-5)


@pytest.mark.x64
@pytest.mark.parametrize("real", [None, REAL])
@pytest.mark.parametrize("reverse", [False, True])
def test_float64(real, reverse):
    assert_as_by_hand(real, reverse=reverse, dtype=jnp.float64, rtol=1e-12)


def test_steps_and_pieces_are_the_whole():
    """`step` by `step`, and in two parts, one of them empty, too."""
    kernels = recurrent.Kernels(*jnp.asarray(KERNELS, jnp.float32))
    inputs, state = jnp.asarray(INPUTS, jnp.float32), jnp.asarray(STATE, jnp.float32)
    wanted, last = recurrent.scan(kernels, inputs, state)
    one = jax.jit(recurrent.step)
    here = state
    for t in range(T):
        here = one(kernels, here, inputs[t])
        np.testing.assert_allclose(here, wanted[t], atol=1e-6)
    for t in (0, 3, T):
        first, middle = recurrent.scan(kernels, inputs[:t], state)
        rest, end = recurrent.scan(kernels, inputs[t:], middle)
        np.testing.assert_allclose(jnp.concatenate([first, rest]), wanted, atol=1e-6)
        np.testing.assert_allclose(end, last, atol=1e-6)


def test_saturated_gates_stay_finite():
    """Over 1000 steps, inputs of 1e4 in either direction, forward and backward."""
    kernels = recurrent.Kernels(*jnp.asarray(3 * KERNELS, jnp.float32))
    inputs = 1e4 * jax.random.normal(jax.random.key(0), (1000, 3, M))

    def loss(kernels, inputs):
        return jnp.sum(recurrent.scan(kernels, inputs, jnp.zeros(M))[0])

    found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(kernels, inputs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


MIXER = recurrent.GRUMixer(state_size=M)
X = jnp.asarray(RNG.normal(size=(B, T, E)), jnp.float32)


def variables():
    """Parameters by NumPy: an initialiser takes longer to compile."""
    shapes = jax.eval_shape(MIXER.init, jax.random.key(0), X)
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes
    )


VARIABLES = variables()


@jax.jit
def mix(x, token_mask=None):
    return MIXER.apply(VARIABLES, x, token_mask=token_mask)


@functools.partial(jax.jit, static_argnames="module")
def continue_(cache, x, token_mask=None, *, module=MIXER):
    module = module.clone(decode=True)
    out, changed = module.apply(
        VARIABLES | cache, x, token_mask=token_mask, mutable=["cache"]
    )
    return changed, out


def test_the_mixer_by_hand():
    """W x + b, the recurrence from 0, and the output's projection."""
    params = jax.tree.map(np.float64, VARIABLES["params"])
    gru = params["gru"]
    kernels = [gru[f"{name}_kernel"] for name in ("reset", "update", "candidate")]
    out = mix(X)
    assert out.dtype == jnp.float32
    for x, found in zip(np.float64(X), out, strict=True):
        inputs = np.einsum("te,egm->tgm", x, gru["input"]["kernel"])
        inputs += gru["input"]["bias"]
        states, _, _ = by_hand(kernels, inputs, np.zeros(M), np.ones(T, bool), range(T))
        wanted = states @ params["out"]["kernel"] + params["out"]["bias"]
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_no_token_sees_the_future():
    properties.assert_causal(mix, X)


def test_padding_changes_no_state():
    """In front, behind and between; whatever stands there, and its gradient is 0."""
    real = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1, 0]], bool)
    for bad in (0.0, 7.0, np.nan, np.inf):
        found = mix(jnp.where(real[..., None], X, bad), real)
        assert np.isfinite(found).all()
        for row in range(B):
            kept = X[row][real[row]]
            wanted = mix(jnp.zeros_like(X).at[0, : len(kept)].set(kept))
            np.testing.assert_allclose(
                found[row][real[row]], wanted[0, : len(kept)], atol=1e-6
            )

    @jax.jit
    @jax.grad
    def gradient(x):
        return jnp.sum(jnp.where(real[..., None], mix(x, real), 0) ** 2)

    found = np.asarray(gradient(jnp.where(real[..., None], X, np.nan)))
    assert np.all(found[~real] == 0)
    assert np.all(found[real] != 0)


def test_decoding_is_one_pass_in_pieces():
    """Prefill of many, then one by one, with and without padding."""
    fresh = jax.eval_shape(MIXER.clone(decode=True).init, jax.random.key(0), X)
    assert fresh["cache"]["state"].shape == (B, M)
    empty = {"cache": {"state": jnp.zeros((B, M))}}
    real = np.array([[0, 0, 1, 1, 1, 1, 1], [1] * T], bool)
    for token_mask in (None, real):
        wanted = mix(X, token_mask)
        cache, pieces = empty, []
        for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7)):
            piece = None if token_mask is None else token_mask[:, start:stop]
            cache, out = continue_(cache, X[:, start:stop], piece)
            pieces.append(out)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), wanted, atol=1e-6)


def test_initializing_leaves_the_cache_empty():
    module = MIXER.clone(decode=True)
    cache = jax.jit(lambda rng: module.init(rng, X)["cache"])(jax.random.key(0))
    np.testing.assert_array_equal(cache["state"], np.zeros((B, M)))
    started, out = continue_({}, X)
    np.testing.assert_allclose(out, mix(X), atol=1e-6)
    assert np.any(started["cache"]["state"] != 0)


def test_recurrent_kernels_start_orthogonal():
    params = jax.jit(recurrent.GRU(state_size=M).init)(jax.random.key(0), X)["params"]
    for name in ("reset", "update", "candidate"):
        kernel = params[f"{name}_kernel"]
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(M), atol=1e-5)
    assert params["input"]["kernel"].shape == (E, 3, M)


def test_computation_in_bfloat16_keeps_the_state_in_float32():
    module = MIXER.clone(dtype="bfloat16")
    cache, out = continue_({}, X, module=module)
    assert out.dtype == jnp.bfloat16
    assert cache["cache"]["state"].dtype == jnp.float32
    np.testing.assert_allclose(np.float32(out), mix(X), atol=0.1)
    states, last = jax.eval_shape(
        recurrent.GRU(M, dtype="bfloat16").init_with_output, jax.random.key(0), X
    )[0]
    assert (states.dtype, last.dtype) == (jnp.bfloat16, jnp.float32)


def test_transformations():
    """vmap, remat, shard_map, without compilation or promotion: the same numbers."""
    wanted = mix(X)
    apply = functools.partial(MIXER.apply, VARIABLES)
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=axis_types)
    rows = jax.P("batch")
    by_devices = jax.shard_map(apply, mesh=mesh, in_specs=rows, out_specs=rows)
    np.testing.assert_allclose(jax.jit(by_devices)(X), wanted, atol=1e-6)
    with jax.numpy_dtype_promotion("strict"):
        real = jnp.ones((B, T), bool)
        jax.eval_shape(MIXER.clone(dtype="bfloat16").apply, VARIABLES, X)
        jax.eval_shape(functools.partial(apply, token_mask=real), X)
    by_rows = jax.jit(jax.vmap(lambda x: apply(x[None])[0]))(X)
    np.testing.assert_allclose(by_rows, wanted, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.checkpoint(apply))(X), wanted, atol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(apply(X), wanted, atol=1e-6)


def test_the_width_is_the_default_state_size():
    shapes = jax.eval_shape(recurrent.GRUMixer().init, jax.random.key(0), X[:, :1])
    assert shapes["params"]["out"]["kernel"].shape == (E, E)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((T, E), {}, r"x must be \[B T E\]"),
        ((B, T, E), {"token_mask": np.ones((B, T + 1), bool)}, "token_mask must be"),
        ((B, T, E), {"state": np.zeros((B, M + 1))}, r"state must be .* \[2, 5\]"),
    ],
)
def test_errors_name_what_does_not_fit(shape, options, words):
    module = recurrent.GRU(state_size=M)
    with pytest.raises(ValueError, match=words):
        module.init(jax.random.key(0), jnp.zeros(shape), **options)
