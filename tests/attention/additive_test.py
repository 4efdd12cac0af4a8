"""Additive attention against a loop written from the paper, derivatives included."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import additive, masks, properties

B, T, S, N, K, H, D = 2, 5, 7, 4, 2, 3, 6
RNG = np.random.default_rng(0)
SHAPES = ((B, T, N, H), (B, S, K, H), (B, S, K, D), (N, H))
ARRAYS = tuple(RNG.normal(size=shape) for shape in SHAPES)
GRADIENT = RNG.normal(size=(B, T, N, D))
DENSE = RNG.random((B, N, T, S)) < 0.6
DENSE[0, 1, 2] = False
REAL = np.ones((B, S), bool)
REAL[0, :2] = REAL[1, 4:] = False


def by_hand(query, key, value, score_vector, visible):
    """Outputs, weights and the gradients for GRADIENT, one number at a time."""
    out, weights = np.zeros((B, T, N, D)), np.zeros((B, N, T, S))
    grads = [np.zeros(shape) for shape in SHAPES]
    for b, i, n in np.ndindex(B, T, N):
        k = n // (N // K)
        seen = [j for j in range(S) if visible[b, n, i, j]]
        tanh = {j: np.tanh(query[b, i, n] + key[b, j, k]) for j in seen}
        fits = {j: math.exp(score_vector[n] @ tanh[j]) for j in seen}
        for j in seen:
            weights[b, n, i, j] = fits[j] / sum(fits.values())
            out[b, i, n] += weights[b, n, i, j] * value[b, j, k]
        for j in seen:
            w, do = weights[b, n, i, j], GRADIENT[b, i, n]
            de = w * do @ (value[b, j, k] - out[b, i, n])
            inner = de * score_vector[n] * (1 - tanh[j] ** 2)
            grads[0][b, i, n] += inner
            grads[1][b, j, k] += inner
            grads[2][b, j, k] += w * do
            grads[3][n] += de * tanh[j]
    return out, weights, grads


MASKS = {
    "all": (None, None, np.ones((B, N, T, S), bool)),
    "dense": (masks.dense(DENSE), None, DENSE),
    "array and padding": (
        jnp.asarray(DENSE[:, :1]),
        REAL,
        DENSE[:, :1] & REAL[:, None, None],
    ),
    "of heads": (
        masks.where(lambda i, j, *, batch, head: (i + j + batch + head) % 3 > 0),
        None,
        np.sum(np.indices((B, N, T, S)), axis=0) % 3 > 0,
    ),
}


@jax.jit
def outputs_and_gradients(arrays, mask, token_mask):
    weights = additive.weights(*arrays[:2], arrays[3], mask, token_mask=token_mask)
    out, pull = jax.vjp(
        lambda *arrays: additive.attention(*arrays, mask, token_mask=token_mask),
        *arrays,
    )
    return out, weights, pull(jnp.asarray(GRADIENT, out.dtype))


attend = jax.jit(additive.attention)


def assert_as_by_hand(name, *, dtype, rtol):
    mask, token_mask, visible = MASKS[name]
    visible = np.broadcast_to(visible, (B, N, T, S))
    arrays = tuple(jnp.asarray(x, dtype) for x in ARRAYS)
    found = outputs_and_gradients(arrays, mask, token_mask)
    for x, y in zip(
        jax.tree.leaves(found),
        jax.tree.leaves(by_hand(*map(np.float64, arrays), visible)),
        strict=True,
    ):
        assert x.dtype == dtype
        np.testing.assert_allclose(x, y, atol=rtol * np.max(np.abs(y)), rtol=0)
    assert np.all(np.asarray(found[1])[~visible] == 0)


@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_gradients_by_hand(name):
    assert_as_by_hand(name, dtype=jnp.float32, rtol=1e-5)


@pytest.mark.x64
@pytest.mark.parametrize("name", ["all", "array and padding"])
def test_float64(name):
    assert_as_by_hand(name, dtype=jnp.float64, rtol=1e-12)


def test_bahdanau_with_projections():
    """eᵢⱼ = vᵀ tanh(W s + U h) of one sentence, as the paper prints it."""
    states, annotations = RNG.normal(size=(T, 8)), RNG.normal(size=(S, D))
    W, U, v = RNG.normal(size=(8, H)), RNG.normal(size=(D, H)), RNG.normal(size=H)
    found = additive.attention(
        jnp.float32(states @ W)[:, None],
        jnp.float32(annotations @ U)[:, None],
        jnp.float32(annotations)[:, None],
        jnp.float32(v)[None],
    )
    for i in range(T):
        energies = [v @ np.tanh(states[i] @ W + h @ U) for h in annotations]
        alpha = np.exp(energies) / np.sum(np.exp(energies))
        np.testing.assert_allclose(found[i, 0], alpha @ annotations, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_padding_reaches_nothing(bad):
    """Whatever stands there: neither outputs nor gradients, and its own are 0."""
    clean = [jnp.asarray(x, jnp.float32) for x in ARRAYS]
    dirty = [*clean]
    for at in (1, 2):
        dirty[at] = jnp.where(REAL[:, :, None, None], clean[at], bad)
    lengths = jnp.asarray([S, 4])
    short = masks.lengths(lengths) & masks.causal()
    for mask, token_mask, hidden in (
        (None, REAL, ~REAL),
        (short, None, np.arange(S)[None] >= lengths[:, None]),
    ):
        if token_mask is None:
            dirty[1:3] = (
                jnp.where(hidden[:, :, None, None], bad, x) for x in clean[1:3]
            )
        wanted = outputs_and_gradients(tuple(clean), mask, token_mask)
        found = outputs_and_gradients(tuple(dirty), mask, token_mask)
        chex.assert_trees_all_equal(found, wanted)
        for gradient in found[2][1:3]:
            assert np.all(np.asarray(gradient)[hidden] == 0)


def test_left_padding_changes_nothing():
    query, key, value, vector = (jnp.asarray(x, jnp.float32) for x in ARRAYS)
    wanted = attend(query, key, value, vector)
    front = ((0, 0), (3, 0), (0, 0), (0, 0))
    key, value = (jnp.pad(x, front, constant_values=9) for x in (key, value))
    real = jnp.arange(S + 3) >= 3
    found = attend(
        query, key, value, vector, token_mask=jnp.broadcast_to(real, (B, S + 3))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_no_query_sees_the_future():
    query, _, _, vector = (jnp.asarray(x, jnp.float32) for x in ARRAYS)

    def mix(x):
        x = x.reshape(B, -1, 1, 2 * H)
        out = additive.attention(x[..., :H], x[..., H:], x, vector[:1], masks.causal())
        return out[:, :, 0]

    properties.assert_causal(jax.jit(mix), query.reshape(B, 2 * T, 2 * H))


def test_odd_shapes():
    """One query, one key, no query, no key, leading dimensions, one head of many."""
    query, key, value, vector = (jnp.asarray(x, jnp.float32) for x in ARRAYS)
    wanted = attend(query, key, value, vector)
    one = attend(query[:, :1], key, value, vector)
    np.testing.assert_allclose(one, wanted[:, :1], atol=1e-6)
    alone = attend(query, key[:, :1], value[:, :1], vector)
    np.testing.assert_allclose(
        alone,
        np.broadcast_to(np.repeat(value[:, :1], N // K, 2), alone.shape),
        atol=1e-6,
    )
    assert attend(query[:, :0], key, value, vector).shape == (B, 0, N, D)
    nothing = attend(query, key[:, :0], value[:, :0], vector)
    np.testing.assert_array_equal(nothing, np.zeros((B, T, N, D)))
    leading = attend(
        *(x.reshape(2, 1, *x.shape[1:]) for x in (query, key, value)),
        vector,
        token_mask=jnp.asarray(REAL)[:, None],
    )
    flat = attend(query, key, value, vector, token_mask=jnp.asarray(REAL))
    np.testing.assert_allclose(leading[:, 0], flat, atol=1e-6)
    row = additive.weights(query[0], key[0], vector)
    assert row.shape == (N, T, S)


def test_narrow_floats_are_computed_in_float32():
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in ARRAYS]
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(additive.attention, *narrow)
    found = attend(*narrow)
    wide = [x.astype(jnp.float32) for x in narrow]
    assert found.dtype == jnp.bfloat16
    assert additive.weights(narrow[0], narrow[1], narrow[3]).dtype == jnp.float32
    np.testing.assert_array_equal(found, attend(*wide).astype(jnp.bfloat16))


def test_transformations():
    """vmap, remat, scan, shard_map and without compilation: the same numbers."""
    query, key, value, vector = (jnp.asarray(x, jnp.float32) for x in ARRAYS)
    wanted = attend(query, key, value, vector)

    def row(query, key, value):
        return additive.attention(query, key, value, vector)

    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=axis_types)
    spec = jax.P("batch")
    by_devices = jax.shard_map(row, mesh=mesh, in_specs=spec, out_specs=spec)
    found = {
        "shard_map": jax.jit(by_devices)(query, key, value),
        "vmap": jax.jit(jax.vmap(row))(query, key, value),
        "remat": jax.jit(jax.checkpoint(row))(query, key, value),
        "scan": jax.lax.map(lambda rows: row(*rows), (query, key, value)),
    }
    for name, out in found.items():
        np.testing.assert_allclose(out, wanted, atol=1e-6, err_msg=name)
    with jax.disable_jit():
        eager = row(query[:, :2], key, value)
    np.testing.assert_allclose(eager, wanted[:, :2], atol=1e-6)


def test_memory_does_not_grow_with_queries_times_keys():
    """Forward and backward in less than T·S numbers, let alone T·S·H."""
    T, H = 512, 32
    shapes = [(1, T, 1, H), (1, T, 1, H), (1, T, 1, H), (1, H)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def loss(*arrays):
        return jnp.sum(additive.attention(*arrays, masks.causal()) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T * 4


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"key": (B, S, 3, H), "value": (B, S, 3, D)}, ValueError, "multiple"),
        ({"key": (B, S, K, H + 1)}, ValueError, "key must be"),
        ({"value": (B, S + 1, K, D)}, ValueError, "value must be"),
        ({"score_vector": (K, H)}, ValueError, r"one vector per query head, \[4, 3\]"),
        (
            {"token_mask": np.ones((B, T), bool)},
            ValueError,
            r"token_mask must be .*2, 7",
        ),
        ({"token_mask": np.ones((B, S))}, TypeError, "must be boolean"),
        ({"mask": np.ones((T, S))}, TypeError, "must be boolean"),
        ({"mask": np.ones((T, T), bool)}, ValueError, "must broadcast"),
        ({"mask": np.ones((3, 1, T, S), bool)}, ValueError, "B = 2 or 1"),
    ],
)
def test_errors_name_what_does_not_fit(change, error, words):
    names = ("query", "key", "value", "score_vector")
    given = dict(zip(names, map(np.float32, ARRAYS), strict=True))
    for name, x in change.items():
        given[name] = np.zeros(x, np.float32) if isinstance(x, tuple) else x
    with pytest.raises(error, match=words):
        additive.attention(**given)
