"""attention.lowrank: attention to mixtures of the keys and values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import lowrank
from tests.contract import subjects
from tests.support import oracle

B, T, S, N, K, H, D, M = 2, 5, 7, 4, 2, 3, 6, 4
MASK = np.array([[False] + [True] * 4 + [False] * 2, [True] * 7])
NAMES = ("out", "dq", "dk", "dv", "by_key_projection", "by_value_projection")


def arrays(dtype="float32", *, per_head=False):
    """Query, key, value, both projections, and the gradient of the output."""
    projection = (K, M, S) if per_head else (M, S)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D), *[projection] * 2, (B, T, N, D)
    return subjects.normal(0, *shapes, dtype=dtype)


def by_hand(query, key, value, *others, token_mask):
    """Outputs and gradients in float64: sums over positions, and the loop."""
    *projections, output_gradient = (np.float64(x) for x in others)
    real = token_mask[:, :, None, None]
    inputs = [np.where(real, np.float64(x), 0) for x in (key, value)]
    whole = [np.broadcast_to(x, (K, M, S)) for x in projections]
    mixed = [np.zeros((B, M, *x.shape[2:])) for x in inputs]
    for y, E, x in zip(mixed, whole, inputs, strict=True):
        for b, m, k, j in np.ndindex(B, M, K, S):
            y[b, m, k] += E[k, m, j] * x[b, j, k]
    found = oracle.attention(query, *mixed, output_gradient=output_gradient)
    wanted = {"out": found["out"], "dq": found["dq"]}
    for name, x, E, projection in zip(
        ("key", "value"), inputs, whole, projections, strict=True
    ):
        short = f"d{name[0]}"
        by_input, by_projection = np.zeros_like(x), np.zeros((K, M, S))
        for b, m, k, j in np.ndindex(B, M, K, S):
            if token_mask[b, j]:
                by_input[b, j, k] += E[k, m, j] * found[short][b, m, k]
                by_projection[k, m, j] += found[short][b, m, k] @ x[b, j, k]
        shared = projection.ndim == 2
        wanted[short] = by_input
        wanted[f"by_{name}_projection"] = (
            by_projection.sum(0) if shared else by_projection
        )
    return wanted


def assert_is_the_loop(dtype, per_head, tolerance):
    *inputs, output_gradient = arrays(dtype, per_head=per_head)

    @jax.jit
    def both(token_mask, output_gradient, *inputs):
        run = functools.partial(lowrank.attention, token_mask=token_mask)
        out, backward = jax.vjp(run, *inputs)
        return dict(zip(NAMES, (out, *backward(output_gradient)), strict=True))

    for token_mask in (np.ones_like(MASK), MASK):
        found = both(token_mask, output_gradient, *inputs)
        wanted = by_hand(*inputs, output_gradient, token_mask=token_mask)
        for name, x in found.items():
            assert x.dtype == dtype
            largest = np.max(np.abs(wanted[name]))
            np.testing.assert_allclose(
                x, wanted[name], rtol=0, atol=tolerance * largest, err_msg=name
            )


@pytest.mark.parametrize("per_head", [False, True])
def test_it_is_attention_to_the_mixtures(per_head):
    """Outputs and all gradients, with padding and without."""
    assert_is_the_loop("float32", per_head, 1e-5)


@pytest.mark.x64
@pytest.mark.parametrize("per_head", [False, True])
def test_it_is_attention_to_the_mixtures_in_float64(per_head):
    assert_is_the_loop("float64", per_head, 1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_head", [False, True])
def test_identity_projections_give_softmax_attention(per_head, dtype):
    """To the bit."""
    query, key, value, *_ = (jnp.asarray(x, dtype) for x in arrays())
    eye = np.eye(S, dtype=np.float32)
    eye = np.stack([eye] * K) if per_head else eye
    found = lowrank.attention(query, key, value, eye, eye, scale=0.3)
    wanted = attention.dot_product_attention(query, key, value, scale=0.3)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.float32(found), np.float32(wanted))


def test_causal_is_refused_with_the_reason():
    """case B095."""
    *inputs, _ = arrays()
    with pytest.raises(ValueError, match="mixes all positions"):
        lowrank.attention(*inputs, is_causal=True)


def test_padding_is_as_if_projections_were_cut():
    """Whatever stands there, NaN included, and with a gradient of exactly 0."""
    query, key, value, *projections, output_gradient = arrays()
    cut = [x[:, :4] for x in (key, value)] + [x[:, :4] for x in projections]
    wanted = lowrank.attention(query, *cut)
    token_mask = np.broadcast_to(np.arange(S) < 4, (B, S))

    @jax.jit
    def both(*inputs):
        run = functools.partial(lowrank.attention, token_mask=token_mask)
        out, backward = jax.vjp(run, *inputs)
        return out, backward(jnp.asarray(output_gradient))

    for padding in (0, 1e6, np.inf, np.nan):
        key[:, 4:], value[:, 4:] = padding, padding
        out, gradients = both(query, key, value, *projections)
        np.testing.assert_allclose(out, wanted, atol=1e-6)
        assert all(np.all(np.isfinite(x)) for x in gradients)
        for x in gradients[1:3]:
            assert np.all(np.asarray(x)[:, 4:] == 0)
            assert np.all(np.asarray(x)[:, :4] != 0)


def test_transformations():
    *inputs, _ = arrays()
    wanted = jax.jit(lowrank.attention)(*inputs)
    with jax.disable_jit():
        np.testing.assert_allclose(lowrank.attention(*inputs), wanted, atol=1e-6)
    twice = [np.stack([x, 2 * x]) for x in inputs]
    np.testing.assert_allclose(
        jax.vmap(lowrank.attention)(*twice)[0], wanted, atol=1e-6
    )
    flash = functools.partial(lowrank.attention, implementation="flash")
    np.testing.assert_allclose(jax.jit(flash)(*inputs), wanted, atol=1e-6)
    with jax.numpy_dtype_promotion("strict"):
        narrow = [jnp.bfloat16(x) for x in inputs[:3]]
        out = jax.eval_shape(lowrank.attention, *narrow, *inputs[3:])
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"key_projection": np.ones((M, S + 1))}, ValueError, "key_projection must"),
        ({"value_projection": np.ones((M + 1, S))}, ValueError, "value_projection"),
        ({"value_projection": np.ones((N, M, S))}, ValueError, "value_projection"),
        ({"key_projection": np.ones(S)}, ValueError, "key_projection must"),
        ({"query": np.ones((T, N, H))}, ValueError, "must be"),
        ({"value": np.ones((B, S, N, D))}, ValueError, "value must be"),
        ({"token_mask": np.ones((B, M), bool)}, ValueError, "token_mask must be"),
        ({"token_mask": np.ones((B, S))}, TypeError, "token_mask must be boolean"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, words):
    names = "query", "key", "value", "key_projection", "value_projection"
    given = dict(zip(names, arrays(), strict=False)) | {"token_mask": None}
    given |= {
        name: x if name == "token_mask" else np.float32(x)
        for name, x in changes.items()
    }
    with pytest.raises(error, match=words):
        lowrank.attention(*(given[x] for x in names), token_mask=given["token_mask"])
