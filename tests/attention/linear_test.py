"""attention.linear: its forms, of features that are given as they are.

Those that are given by their logarithms: tests/attention/linear_sums_test.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import heads, linear, properties
from tests.support import linear_by_hand

B, T, N, K, H, D = 2, 7, 4, 2, 3, 5
# Chunks of 3 of 7 tokens: two whole ones, and a rest.
FORMS = {"quadratic": None, "recurrent": None, "chunked": 3}
MAPS = {
    "elu_plus_one": (linear.elu_plus_one, linear_by_hand.elu_plus_one),
    "affine": (linear_by_hand.affine_in_jax, linear_by_hand.affine),
}
arrays = linear_by_hand.arrays


def ones(x):
    """One feature, the same everywhere: the mean of what is seen."""
    return jnp.ones_like(x[..., :1])


def test_every_form_is_tested():
    assert set(FORMS) == set(linear.FORMS)
    with pytest.raises(TypeError):
        linear.FORMS["other"] = None


def assert_is_the_loop(form, name, is_causal, dtype, tolerance):
    feature_map, by_hand = MAPS[name]
    chunk = FORMS[form] if is_causal else None
    attend = functools.partial(
        linear.attention, feature_map=feature_map, form=form, chunk=chunk
    )
    linear_by_hand.assert_is(
        attend, by_hand, is_causal=is_causal, dtype=dtype, tolerance=tolerance
    )


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_loop(form, name, is_causal):
    """Outputs and gradients, grouped heads, with padding and without."""
    assert_is_the_loop(form, name, is_causal, "float32", 1e-5)


@pytest.mark.x64
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_loop_in_float64(form, name, is_causal):
    assert_is_the_loop(form, name, is_causal, "float64", 1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_features_of_one_give_the_running_mean(form):
    """case B092."""
    value = np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1, 1)
    run = functools.partial(linear.attention, feature_map=ones, form=form)
    out = run(value, value, value, is_causal=True)
    np.testing.assert_allclose(out[0, :, 0, 0], [1, 1.5, 2, 2.5], rtol=1e-6)
    assert np.all(run(value, value, value) == 2.5)


@pytest.mark.parametrize("padding", [9.0, np.nan, np.inf])
def test_padded_keys_reach_nothing(padding):
    """case B094: neither in the sum of values nor in that of weights."""
    key = value = np.float32([1, 2, padding, padding]).reshape(1, 4, 1, 1)
    query = np.ones_like(key)
    token_mask = np.array([[True, True, False, False]])

    @functools.partial(jax.jit, static_argnames=("feature_map", "is_causal"))
    def both(query, key, value, feature_map, is_causal):
        def loss(*inputs):
            options = {"feature_map": feature_map, "is_causal": is_causal}
            out = linear.attention(*inputs, token_mask=token_mask, **options)
            return jnp.sum(out**2), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)

    _, out = both(query, key, value, ones, False)
    assert np.all(np.asarray(out) == 1.5)
    for is_causal in (False, True):
        gradients, out = both(query, key, value, linear.elu_plus_one, is_causal)
        assert np.all(np.isfinite(out))
        assert np.all(np.isfinite(gradients))
        assert np.all(np.asarray(gradients)[1:, :, 2:] == 0)
        assert np.all(np.asarray(gradients)[1:, :, 0] != 0)


def test_what_sees_nothing_is_zero_and_passes_no_gradient():
    *inputs, output_gradient = arrays()
    token_mask = np.ones((B, T), bool)
    token_mask[0, :2] = False

    def run(form, *inputs):
        attend = functools.partial(linear.attention, is_causal=True, form=form)
        out, backward = jax.vjp(
            functools.partial(attend, token_mask=token_mask), *inputs
        )
        return out, *backward(jnp.asarray(output_gradient))

    for form in FORMS:
        out, by_query, *rest = jax.jit(functools.partial(run, form))(*inputs)
        assert np.all(np.asarray(out)[0, :2] == 0)
        assert np.all(np.asarray(by_query)[0, :2] == 0)
        assert all(np.all(np.isfinite(x)) for x in (out, by_query, *rest))
        assert np.all(np.asarray(out)[0, 2:] != 0)


def test_left_padding_is_as_if_it_were_cut_off():
    query, key, value, _ = arrays()
    token_mask = np.arange(T) >= np.array([[3], [3]])
    run = jax.jit(functools.partial(linear.attention, is_causal=True, chunk=2))
    padded = run(query, key, value, token_mask=token_mask)
    cut = run(*(x[:, 3:] for x in (query, key, value)))
    np.testing.assert_allclose(padded[:, 3:], cut, atol=1e-6)


def on_vectors(attend):
    """[B T E] -> [B T E'], of queries, keys and values side by side."""

    @jax.jit
    def run(x):
        query, key, value = jnp.split(x, [N * H, (N + K) * H], axis=-1)
        out = attend(
            *(
                heads.split(y, n)
                for y, n in zip((query, key, value), (N, K, K), strict=True)
            )
        )
        return heads.merge(out)

    return run


WIDTH = N * H + K * H + K * D


@pytest.mark.parametrize("form", FORMS)
def test_no_later_token_moves_an_output(form):
    """case B096: not by a bit, whatever the edit; nor by the other row."""
    chunk = FORMS[form]
    attend = functools.partial(linear.attention, is_causal=True, form=form, chunk=chunk)
    x = np.random.default_rng(0).normal(size=(B, T, WIDTH)).astype(np.float32)
    properties.assert_causal(on_vectors(attend), x, tolerance=0.0)
    seen = properties.dependency_matrix(on_vectors(attend), x)
    np.testing.assert_array_equal(seen, np.tri(T, dtype=bool))


def test_without_order_it_is_permutation_equivariant():
    x = np.random.default_rng(0).normal(size=(B, T, WIDTH)).astype(np.float32)
    properties.assert_permutation_equivariant(on_vectors(linear.attention), x)


def test_small_features_are_exact_and_the_slope_at_zero_is_one():
    """elu(x) + 1 as it is written would be 0 below -17."""
    x = np.float32([-80, -30, -1, 0, 2])
    wanted = [*np.exp(np.float64(x[:3])), 1, 3]
    np.testing.assert_allclose(linear.elu_plus_one(x), wanted, rtol=1e-6)
    slopes = jax.vmap(jax.grad(linear.elu_plus_one))(x)
    np.testing.assert_allclose(slopes, [*np.exp(np.float64(x[:3])), 1, 1], rtol=1e-6)


def test_outputs_lie_among_the_values():
    query, key, _, _ = arrays()
    eye = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (B, T, K, T))
    weights = np.asarray(linear.attention(query, key, eye, is_causal=True))
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, atol=1e-6)
    assert np.all(weights >= 0)
    assert np.all((weights > 0) == np.tri(T, dtype=bool)[None, :, None])


@pytest.mark.parametrize("is_causal", [True, False])
def test_lengths_of_zero_and_one(is_causal):
    query, key, value, _ = arrays()
    run = jax.jit(functools.partial(linear.attention, is_causal=is_causal))
    assert run(query[:, :0], key[:, :0], value[:, :0]).shape == (B, 0, N, D)
    one = run(query[:, :1], key[:, :1], value[:, :1])
    np.testing.assert_allclose(one, np.repeat(value[:, :1], N // K, 2), rtol=1e-6)
    if not is_causal:
        assert np.all(np.asarray(run(query, key[:, :0], value[:, :0])) == 0)
        np.testing.assert_allclose(
            run(query[:, :2], key, value), run(query, key, value)[:, :2], atol=1e-6
        )


def test_narrow_inputs_are_summed_in_float32():
    """In bfloat16 a sum of ones stops at 256."""
    x = jnp.ones((1, 600, 1, 1), jnp.bfloat16)
    value = jnp.where(jnp.arange(600) < 300, 0, 1).astype(jnp.bfloat16)
    for form in FORMS:
        run = functools.partial(linear.attention, feature_map=ones, form=form)
        run = jax.jit(functools.partial(run, is_causal=True))
        out = run(x, x, value[None, :, None, None])
        assert out.dtype == jnp.bfloat16
        assert abs(float(out[0, -1, 0, 0]) - 0.5) < 2e-3


def test_chunks_need_no_weights_of_all_pairs():
    """Neither forward nor backward, though T is no multiple of a chunk."""
    length = 4001
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)

    def loss(*inputs):
        return jnp.sum(linear.attention(*inputs, is_causal=True) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    assert memory < 4 * length * length / 4


def test_transformations():
    """jit, vmap, grad, remat, scan, shard_map and eager Python: the same numbers."""
    *inputs, _ = arrays()
    attend = functools.partial(linear.attention, is_causal=True, chunk=3)
    wanted = jax.jit(attend)(*inputs)
    with jax.disable_jit():
        np.testing.assert_allclose(attend(*inputs), wanted, atol=1e-6)

    def gradient(*inputs):
        return jax.grad(lambda *inputs: jnp.sum(attend(*inputs) ** 2))(*inputs)

    by_query = jax.jit(gradient)(*inputs)

    @jax.jit
    def in_other_ways(inputs):
        twice = [jnp.stack([x, 2 * x]) for x in inputs]
        outputs = [
            jax.vmap(attend)(*twice)[0],
            jax.lax.map(lambda x: attend(*x), twice)[0],
            sharded(attend)(*inputs),
        ]
        rematerialized = jax.checkpoint(attend)
        loss = jax.grad(lambda *inputs: jnp.sum(rematerialized(*inputs) ** 2))
        gradients = [loss(*inputs), sharded(gradient)(*inputs)]
        return outputs, gradients

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=auto)
    rows = jax.P("batch")

    def sharded(f):
        return jax.shard_map(f, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)

    outputs, gradients = in_other_ways(inputs)
    for found in outputs:
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    for found in gradients:
        np.testing.assert_allclose(found, by_query, atol=1e-5)
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(gradient, *(jnp.bfloat16(x) for x in inputs))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"form": "other"}, ValueError, "form must be one of quadratic"),
        ({"chunk": 0}, ValueError, "chunk=0 must be at least 1"),
        ({"chunk": 2, "is_causal": False}, ValueError, "chunk=2 must"),
        ({"chunk": 2, "form": "recurrent"}, ValueError, "chunk=2 must"),
        (
            {"query": np.zeros((B, T - 1, N, H), np.float32)},
            ValueError,
            "causal needs T = S",
        ),
        ({"query": np.zeros((T, N, H), np.float32)}, ValueError, "must be"),
        ({"query": np.zeros((B, T, 3, H), np.float32)}, ValueError, "multiple"),
        ({"key": np.zeros((B, T, K, H + 1), np.float32)}, ValueError, "key must be"),
        (
            {"value": np.zeros((B, T + 1, K, D), np.float32)},
            ValueError,
            "value must be",
        ),
        ({"token_mask": np.ones((B, T + 1), bool)}, ValueError, "token_mask must be"),
        ({"token_mask": np.ones((B, T))}, TypeError, "token_mask must be boolean"),
        ({"feature_map": lambda x: x[:, :1]}, ValueError, "feature_map must map"),
        ({"value": np.zeros((B, T, K, D), int)}, TypeError, "value must be floating"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, words):
    query, key, value, _ = arrays()
    given = {"query": query, "key": key, "value": value, "is_causal": True} | changes
    positional = [given.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(error, match=words):
        linear.attention(*positional, **given)
