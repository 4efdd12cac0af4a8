"""attention.linear_sums: sums of features that are given by their logarithms.

Those of features as they are: tests/attention/linear_test.py.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import linear, properties, random_features
from tests.support import linear_by_hand

B, T, N, K, H, D = 2, 7, 4, 2, 3, 5
M, SCALE = 6, 0.7
FORMS = {"quadratic": None, "recurrent": None, "chunked": 3}
PROJECTION = np.random.default_rng(7).normal(size=(M, H))
arrays = linear_by_hand.arrays


def attend(*inputs, form="chunked", is_causal=True, token_mask=None):
    """With the features of one projection, in chunks of 3 of 7 tokens."""
    return linear.attention(
        *inputs,
        feature_map=random_features.positive(PROJECTION, scale=SCALE),
        form=form,
        is_causal=is_causal,
        token_mask=token_mask,
        chunk=FORMS[form] if is_causal else None,
    )


def assert_is_the_loop(form, is_causal, dtype, tolerance):
    by_hand = linear_by_hand.positive(PROJECTION, SCALE)
    run = functools.partial(attend, form=form)
    linear_by_hand.assert_is(
        run, by_hand, is_causal=is_causal, dtype=dtype, tolerance=tolerance
    )


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_loop(form, is_causal):
    """Outputs and gradients, grouped heads, with padding and without."""
    assert_is_the_loop(form, is_causal, "float32", 1e-5)


@pytest.mark.x64
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_loop_in_float64(form, is_causal):
    assert_is_the_loop(form, is_causal, "float64", 1e-10)


def in_logarithms(query, key, value, is_causal):
    """Outputs in float64: softmax over keys of log Σᵣ φᵣ(q) φᵣ(k)."""
    out = np.zeros((B, T, N, D))
    for b, i, n in np.ndindex(B, T, N):
        k, end = n // (N // K), i + 1 if is_causal else T
        y = math.sqrt(SCALE) * np.float64(query[b, i, n])
        x = math.sqrt(SCALE) * np.float64(key[b, :end, k])
        logs = PROJECTION @ y + x @ PROJECTION.T - np.sum(x**2, 1)[:, None] / 2
        scores = np.logaddexp.reduce(logs, axis=1)
        weights = np.exp(scores - np.max(scores))
        out[b, i, n] = weights @ value[b, :end, k] / np.sum(weights)
    return out


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_large_inputs_neither_overflow_nor_vanish(form, is_causal):
    """No feature fits float32, nor does one largest feature serve q and k alike."""
    query, key, value, _ = arrays()

    @jax.jit
    def both(*inputs):
        run = functools.partial(attend, form=form, is_causal=is_causal)
        out, backward = jax.vjp(run, *inputs)
        return out, backward(jnp.ones_like(out))

    for size, tolerance in ((10, 2e-4), (1e4, None)):
        out, gradients = both(size * query, size * key, value)
        assert all(np.all(np.isfinite(x)) for x in (out, *gradients))
        if tolerance is not None:
            wanted = in_logarithms(size * query, size * key, value, is_causal)
            np.testing.assert_allclose(out, wanted, atol=tolerance)
        assert np.all(np.any(np.asarray(out) != 0, axis=-1))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e20])
@pytest.mark.parametrize("form", FORMS)
def test_no_edit_of_a_later_token_moves_an_output(form, size):
    """Not by a bit: the usual stabiliser, a maximum over all keys, fails at 1e4."""
    *inputs, _ = arrays()
    run = jax.jit(functools.partial(attend, form=form))
    wanted = np.asarray(run(*inputs))
    rng = np.random.default_rng(1)
    for edited in range(3):
        for position in (1, 2, 3, 6):
            changed = [x.copy() for x in inputs]
            noise = rng.normal(size=changed[edited][:, position].shape)
            changed[edited][:, position] = size * noise
            found = np.asarray(run(*changed))
            np.testing.assert_array_equal(found[:, :position], wanted[:, :position])
            assert np.all(np.any(found[:, position] != wanted[:, position], axis=-1))


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_reach_the_past_alone(form):
    """case B096."""
    query, key, value, _ = arrays()
    run = functools.partial(attend, form=form)

    def of_one_head(x):
        """All of them from one sequence of vectors [B T E]."""
        parts = (x[..., None, :H], x[..., None, H : 2 * H], x[..., None, 2 * H :])
        return run(*parts)[:, :, 0]

    x = np.concatenate([query[:, :, 0], key[:, :, 0], value[:, :, 0]], axis=-1)
    seen = properties.dependency_matrix(jax.jit(of_one_head), x)
    np.testing.assert_array_equal(seen, np.tri(T, dtype=bool))
    if form == "chunked":
        properties.assert_causal(jax.jit(of_one_head), x, tolerance=0.0)


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_sequence_may_be_cut_anywhere(size):
    """Also where its inputs are large; padding changes no state."""
    query, key, value, _ = arrays()
    key = size * key
    token_mask = linear_by_hand.MASK
    feature_map = random_features.positive(PROJECTION, scale=SCALE)
    options = {"feature_map": feature_map, "chunk": 3}
    extend = jax.jit(functools.partial(linear.extend, **options))
    whole = jax.jit(attend)(query, key, value, token_mask=token_mask)
    start = linear.empty(key, value, feature_map=feature_map)
    assert start.values.shape == (B, K, M, D)
    assert start.peak.shape == start.total.shape == (B, K, M)
    for cuts in (*([t] for t in range(1, T)), range(1, T)):
        state, outputs = start, []
        for first, last in zip([0, *cuts], [*cuts, T], strict=True):
            part = (x[:, first:last] for x in (query, key, value))
            state, out = extend(state, *part, token_mask=token_mask[:, first:last])
            outputs.append(out)
        np.testing.assert_allclose(np.concatenate(outputs, 1), whole, atol=5e-6)
    plain = linear.empty(key, value, feature_map=feature_map.__call__)
    with pytest.raises(ValueError, match="state must fit"):
        extend(plain, query, key, value)


def test_a_step_is_a_token_of_one_head():
    query, key, value, _ = (x[0, :, 0] for x in arrays())
    feature_map = random_features.positive(PROJECTION, scale=SCALE)
    before = query.copy()
    state = jax.tree.map(
        lambda x: x[0, 0],
        linear.empty(key[None, :, None], value[None, :, None], feature_map=feature_map),
    )
    step, outputs = jax.jit(linear.step), []
    for token in zip(feature_map.log(query), feature_map.log(key), value, strict=True):
        state, out = step(state, *token)
        outputs.append(out)
    whole = attend(*(x[None, :, None] for x in (query, key, value)))
    np.testing.assert_allclose(np.stack(outputs), whole[0, :, 0], atol=1e-6)
    np.testing.assert_array_equal(query, before)


@pytest.mark.parametrize("is_causal", [True, False])
def test_padded_keys_reach_nothing(is_causal):
    """NaN and infinities included; their gradients are exactly 0, as are rows' that
    see nothing."""
    *inputs, output_gradient = arrays()
    token_mask = np.array([[False] * 2 + [True] * 3 + [False] * 2, [False] * 7])

    @jax.jit
    def both(*inputs):
        run = functools.partial(attend, is_causal=is_causal, token_mask=token_mask)
        out, backward = jax.vjp(run, *inputs)
        return out, backward(jnp.asarray(output_gradient))

    wanted = both(*inputs)
    hole = ~token_mask[:, :, None, None]
    for padding in (np.nan, np.inf, 1e9):
        query, *rest = inputs
        found = both(query, *(np.where(hole, np.float32(padding), x) for x in rest))
        chex.assert_trees_all_equal(found, wanted)
    out, (by_query, by_key, by_value) = (jax.tree.map(np.asarray, x) for x in wanted)
    for x in (by_key, by_value):
        assert np.all(np.isfinite(x))
        assert np.all(x[~token_mask] == 0)
        assert np.all(x[0, 2:5] != 0)
    blind = [out[1], by_query[1]] + ([out[0, :2], by_query[0, :2]] * is_causal)
    assert all(np.all(x == 0) for x in blind)


@pytest.mark.parametrize("form", FORMS)
def test_lengths_of_zero_and_one(form):
    query, key, value, _ = arrays()
    run = jax.jit(functools.partial(attend, form=form))
    assert run(query[:, :0], key[:, :0], value[:, :0]).shape == (B, 0, N, D)
    one = run(query[:, :1], key[:, :1], value[:, :1])
    np.testing.assert_allclose(one, np.repeat(value[:, :1], N // K, 2), rtol=1e-6)
    run = jax.jit(functools.partial(attend, form=form, is_causal=False))
    assert np.all(np.asarray(run(query, key[:, :0], value[:, :0])) == 0)


def test_shards_and_narrow_inputs():
    *inputs, _ = arrays()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=auto)
    rows = jax.P("batch")

    def gradient(*inputs):
        return jax.grad(lambda *inputs: jnp.sum(attend(*inputs) ** 2))(*inputs)

    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    found, wanted = jax.jit(sharded)(*inputs), jax.jit(gradient)(*inputs)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    with jax.numpy_dtype_promotion("strict"):
        narrow = [jnp.bfloat16(x) for x in inputs]
        assert jax.eval_shape(attend, *narrow).dtype == jnp.bfloat16
