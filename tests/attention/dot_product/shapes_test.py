"""Small inputs about heads, scale and lengths that broke other people's code.

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
from tests.support import readouts


@readouts.on_cpu
def test_lengths_come_before_heads(implementation):
    """case B035: [B T N H], told apart by values that differ per position."""
    for length, num_heads in ((4, 32), (32, 4)):
        zeros = jnp.zeros((1, length, num_heads, 64))
        value = zeros + jnp.arange(1.0, length + 1)[None, :, None, None]
        out = readouts.attend(
            zeros, zeros, value, is_causal=True, implementation=implementation
        )
        wanted = np.arange(2, length + 2)[None, :, None, None] / 2
        readouts.assert_reads(out, np.broadcast_to(wanted, out.shape))


def test_the_module_keeps_lengths_apart_from_heads():
    """case B035: every head of each position is the running mean."""
    module = multihead.MultiHeadAttention(num_heads=2, use_bias=False)
    x = jnp.broadcast_to(jnp.arange(1.0, 6)[None, :, None], (1, 5, 8))
    out = jax.jit(module.apply)(identity(0.0), x, mask=masks.causal())
    wanted = np.array([1, 1.5, 2, 2.5, 3])[None, :, None]
    readouts.assert_reads(out, np.broadcast_to(wanted, (1, 5, 8)))


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
    (x,) = readouts.random_arrays(11, (2, 3, 12))
    for num_heads in (1, 2, 12):
        np.testing.assert_array_equal(heads.merge(heads.split(x, num_heads)), x)
    assert heads.split(x, 3)[1, 2, 1, 0] == x[1, 2, 4]
    with pytest.raises(ValueError, match="got width=12 and num_heads=5"):
        heads.split(x, 5)


@readouts.on_cpu
def test_scale_is_applied_once(implementation):
    """case B037: the logit is 2, in the primitive and in the module."""
    query = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(2.0)
    key = jnp.concatenate([query, 0 * query], axis=1)
    out = readouts.attend(query, key, key / 2, implementation=implementation)
    np.testing.assert_allclose(out[0, 0, 0], [0.880797, 0, 0, 0], atol=1e-6)
    module = multihead.MultiHeadAttention(
        num_heads=2, use_bias=False, implementation=implementation
    )
    query, key = (jnp.pad(x[:, :, 0], ((0, 0), (0, 0), (0, 4))) for x in (query, key))
    out = jax.jit(module.apply)(identity(1.0), query, key, key / 2)
    np.testing.assert_allclose(out[0, 0], [0.880797] + [0] * 7, atol=1e-6)


@readouts.on_cpu
def test_scale_of_equal_entries(implementation):
    """case B039: the score, here the log-sum-exp of one key, is exactly 8."""
    x = jnp.ones((1, 1, 1, 64))
    _, score = readouts.attend(
        x, x, x, return_residual=True, implementation=implementation
    )
    np.testing.assert_array_equal(score, [[[8]]])


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
@readouts.on_cpu
def test_lengths_of_rows(implementation, lengths, wanted):
    """case B040: also as one mask value."""
    query, key = jnp.zeros((2, 3, 1, 1)), jnp.zeros((2, 4, 1, 1))
    value = key + jnp.arange(1.0, 5)[None, :, None, None]
    lengths = {name: np.array(n) for name, n in lengths.items()}
    read = functools.partial(
        readouts.attend, query, key, value, implementation=implementation
    )
    mask = masks.lengths(
        lengths.get("key_value_seq_lengths"), lengths.get("query_seq_lengths")
    )
    for out in (read(**lengths), read(mask=mask)):
        readouts.assert_reads(out[:, :, 0, 0], wanted)


def test_heads_that_do_not_divide_are_named():
    lifted = heads.over_heads(lambda q, k, v: q, out_axis=1)
    x = jnp.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match="got num_heads=3 and num_kv_heads=2"):
        lifted(x, x[:, :, :2], x[:, :, :2])


@pytest.mark.parametrize("shape", [(2, 1, 1, 3, 5), (3, 1, 3, 5)])
def test_some_of_several_batch_dimensions(shape):
    """A mask and a bias [2|1 3|1 N T S] of one of two batch dimensions."""
    rng = np.random.default_rng(0)
    query, key = (
        jnp.asarray(rng.normal(size=(2, 3, n, 2, 4)), jnp.float32) for n in (3, 5)
    )
    mask = rng.random(shape) < 0.6
    full = np.broadcast_to(mask, (2, 3, 2, 3, 5))
    for name, array in (("mask", mask), ("bias", mask.astype("float32"))):
        found, wanted = (
            attention.dot_product_attention(query, key, key, **{name: jnp.asarray(x)})
            for x in (array, full if name == "mask" else full.astype("float32"))
        )
        np.testing.assert_allclose(found, wanted, atol=1e-6)
