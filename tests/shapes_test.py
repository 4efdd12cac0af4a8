"""Heads, scale, sinks, and shapes that are odd or empty.

Where a probe is made, all scores are equal: the output of a query is the mean of the
values it sees, 1 for key 0, 2 for key 1 and so on.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import heads, masks
from models import multihead
from tests import oracle, probes

B, T, S, N, K, H = 2, 3, 5, 4, 2, 4


@pytest.mark.parametrize(
    ("num_heads", "values"),
    [(4, [10, 20]), (6, [10, 20]), (3, [10]), (2, [10, 20])],
)
@probes.on_cpu
def test_query_heads_share_keys_in_blocks(implementation, num_heads, values):
    """case B032: head n reads key head n // G, never n % K."""
    kv_heads = len(values)
    out = probes.attend(
        jnp.zeros((1, 1, num_heads, 1)),
        jnp.zeros((1, 1, kv_heads, 1)),
        jnp.array(values, jnp.float32)[None, None, :, None],
        implementation=implementation,
    )
    probes.assert_reads(out[0, 0, :, 0], np.repeat(values, num_heads // kv_heads))


@probes.on_cpu
def test_lengths_come_before_heads(implementation):
    """case B035: [B T N H], told apart by values that differ per position."""
    for length, num_heads in ((4, 32), (32, 4)):
        zeros = jnp.zeros((1, length, num_heads, 64))
        value = zeros + jnp.arange(1.0, length + 1)[None, :, None, None]
        out = probes.attend(
            zeros, zeros, value, is_causal=True, implementation=implementation
        )
        wanted = np.arange(2, length + 2)[None, :, None, None] / 2
        probes.assert_reads(out, np.broadcast_to(wanted, out.shape))


def test_the_module_keeps_lengths_apart_from_heads():
    """case B035: every head of each position is the running mean."""
    module = multihead.MultiHeadAttention(num_heads=2, use_bias=False)
    x = jnp.broadcast_to(jnp.arange(1.0, 6)[None, :, None], (1, 5, 8))
    out = jax.jit(module.apply)(identity(0.0), x, mask=masks.causal())
    wanted = np.array([1, 1.5, 2, 2.5, 3])[None, :, None]
    probes.assert_reads(out, np.broadcast_to(wanted, (1, 5, 8)))


def identity(of_queries):
    """Parameters of a module of two heads of width 4 that hardly projects."""
    eye = jnp.eye(8)
    split, merge = eye.reshape(8, 2, 4), eye.reshape(2, 4, 8)
    kernels = {"query": of_queries * split, "key": split, "value": split, "out": merge}
    return {"params": {name: {"kernel": kernel} for name, kernel in kernels.items()}}


def test_merging_heads():
    """case B036: position l of the result depends on position l only."""
    by_head = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])  # [N T H]
    x = jnp.asarray(by_head.swapaxes(0, 1))[None]
    np.testing.assert_array_equal(heads.merge(x), [[[1, 2, 5, 6], [3, 4, 7, 8]]])
    (x,) = probes.random_arrays(11, (2, 3, 12))
    for num_heads in (1, 2, 12):
        np.testing.assert_array_equal(heads.merge(heads.split(x, num_heads)), x)
    assert heads.split(x, 3)[1, 2, 1, 0] == x[1, 2, 4]
    with pytest.raises(ValueError, match="12 does not divide into 5 heads"):
        heads.split(x, 5)


@probes.on_cpu
def test_scale_is_applied_once(implementation):
    """case B037: the logit is 2, in the primitive and in the module."""
    query = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(2.0)
    key = jnp.concatenate([query, 0 * query], axis=1)
    out = probes.attend(query, key, key / 2, implementation=implementation)
    np.testing.assert_allclose(out[0, 0, 0], [0.880797, 0, 0, 0], atol=1e-6)
    module = multihead.MultiHeadAttention(
        num_heads=2, use_bias=False, implementation=implementation
    )
    query, key = (jnp.pad(x[:, :, 0], ((0, 0), (0, 0), (0, 4))) for x in (query, key))
    out = jax.jit(module.apply)(identity(1.0), query, key, key / 2)
    np.testing.assert_allclose(out[0, 0], [0.880797] + [0] * 7, atol=1e-6)


@probes.on_cpu
def test_scale_of_equal_entries(implementation):
    """case B039: the score, here the log-sum-exp of one key, is exactly 8."""
    x = jnp.ones((1, 1, 1, 64))
    _, score = probes.attend(
        x, x, x, return_residual=True, implementation=implementation
    )
    np.testing.assert_array_equal(score, [[[8]]])


@probes.with_every_feature
def test_sinks_take_weight_and_softcaps_bound_scores(implementation):
    """Against the loop; a query that sees only its sink gives 0."""
    *arrays, output_gradient = probes.random_arrays(
        9, (B, T, N, H), (B, S, K, H), (B, S, K, H), (N,), (B, T, N, H)
    )
    visible = np.tri(T, S, -1, dtype=bool)

    @jax.jit
    def answers(*arrays):
        def f(*arrays):
            return attention.dot_product_attention(
                *arrays[:3],
                mask=visible,
                sinks=arrays[3],
                softcap=1.5,
                scale=2.0,
                return_residual=True,
                implementation=implementation,
            )

        out, backward, residual = jax.vjp(f, *arrays, has_aux=True)
        return out, *backward(output_gradient), residual

    wanted = oracle.attention(
        *arrays[:3],
        sinks=arrays[3],
        visible=np.broadcast_to(visible, (B, N, T, S)),
        softcap=1.5,
        scale=2.0,
        output_gradient=output_gradient,
    )
    names = ("out", "dq", "dk", "dv", "dsinks", "lse")
    for found, name in zip(answers(*arrays), names, strict=True):
        np.testing.assert_allclose(found, wanted[name], atol=1e-5, err_msg=name)


# Odd shapes


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ({"key_value_seq_lengths": [2, 4]}, [[1.5] * 3, [2.5] * 3]),
        ({"query_seq_lengths": [1, 3]}, [[2.5, 0, 0], [2.5] * 3]),
        (
            {"key_value_seq_lengths": [2, 4], "query_seq_lengths": [1, 3]},
            [[1.5, 0, 0], [2.5] * 3],
        ),
    ],
    ids=["keys", "queries", "both"],
)
@probes.on_cpu
def test_lengths_of_rows(implementation, lengths, wanted):
    """case B040: also as one mask value."""
    query, key = jnp.zeros((2, 3, 1, 1)), jnp.zeros((2, 4, 1, 1))
    value = key + jnp.arange(1.0, 5)[None, :, None, None]
    lengths = {name: np.array(n) for name, n in lengths.items()}
    read = functools.partial(
        probes.attend, query, key, value, implementation=implementation
    )
    mask = masks.lengths(
        lengths.get("key_value_seq_lengths"), lengths.get("query_seq_lengths")
    )
    for out in (read(**lengths), read(mask=mask)):
        probes.assert_reads(out[:, :, 0, 0], wanted)


@pytest.mark.parametrize(
    ("query_shape", "key_shape"),
    [
        ((1, 3, 2, 8), (1, 0, 2, 8)),
        ((1, 0, 2, 8), (1, 3, 2, 8)),
        ((0, 3, 2, 8), (0, 3, 2, 8)),
        ((0, 0, 2, 8), (0, 0, 1, 8)),
    ],
    ids=["keys", "queries", "batch", "all"],
)
@probes.with_every_feature
def test_empty_inputs(implementation, query_shape, key_shape):
    """case B044: zeros, also under jit and grad."""
    query, key = jnp.ones(query_shape), jnp.ones(key_shape)

    @jax.jit
    def both(query, key, value):
        f = functools.partial(
            attention.dot_product_attention,
            is_causal=True,
            implementation=implementation,
        )
        out, backward = jax.vjp(f, query, key, value)
        return out, backward(jnp.ones_like(out))

    out, gradients = both(query, key, key)
    assert out.shape == query_shape
    for x, gradient in zip((query, key, key), gradients, strict=True):
        assert gradient.shape == x.shape
    for zeros in (out, *gradients):
        assert np.all(np.asarray(zeros) == 0)
    weights = probes.attend_weights(query, key, is_causal=True)
    length, num_heads = query_shape[1:3]
    assert weights.shape == (query_shape[0], num_heads, length, key_shape[1])


@probes.on_cpu
def test_one_token_is_its_value(implementation):
    query, value = probes.random_arrays(12, (1, 1, 2, 4), (1, 1, 1, 4))
    out = probes.attend(
        query, value, value, is_causal=True, implementation=implementation
    )
    np.testing.assert_array_equal(out, np.repeat(value, 2, axis=2))


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@probes.on_cpu
def test_any_leading_dimensions(implementation, batch):
    """Equal to the flattened batch, masks and lengths included."""
    rows = int(np.prod(batch))
    query, key, value = probes.random_arrays(
        13, (rows, T, N, 4), *[(rows, S, K, 4)] * 2
    )
    mask = np.random.default_rng(14).random((rows, N, T, S)) < 0.7
    arguments = {
        "bias": probes.random_arrays(15, (rows, 1, T, S))[0],
        "mask": mask,
        "key_value_seq_lengths": np.arange(rows) % S + 1,
    }
    flat = probes.attend(
        query,
        key,
        value,
        **arguments,
        return_residual=True,
        implementation=implementation,
    )

    def unflatten(x):
        return x.reshape((*batch, *x.shape[1:]))

    deep = probes.attend(
        *map(unflatten, (query, key, value)),
        **jax.tree.map(unflatten, arguments),
        return_residual=True,
        implementation=implementation,
    )
    for found, wanted in zip(deep, flat, strict=True):
        np.testing.assert_allclose(found, unflatten(wanted), atol=1e-6)
    weights = probes.attend_weights(*map(unflatten, (query, key)))
    assert weights.shape == (*batch, N, T, S)


@probes.with_every_feature
def test_values_of_another_width(implementation):
    """D ≠ H, T ≠ S and K < N: each column of the values by itself."""
    query, key, value = probes.random_arrays(
        16, (B, T, N, 4), (B, S, K, 4), (B, S, K, 7)
    )
    out = probes.attend(query, key, value, implementation=implementation)
    wanted = oracle.attention(query, key, value)["out"]
    assert out.shape == (B, T, N, 7)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    for width in (0, 1):
        narrow = probes.attend(
            query, key, value[..., :width], implementation=implementation
        )
        np.testing.assert_allclose(narrow, wanted[..., :width], atol=2e-6)
