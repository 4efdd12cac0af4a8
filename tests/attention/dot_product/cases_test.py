"""Small inputs about masks that broke other people's attention code.

Most are probes: all scores are equal, so that the output of a query is the mean of
the values it sees, 1 for key 0, 2 for key 1 and so on, and 0 if it sees nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks, softmax
from models import multihead
from tests.support import compiling, readouts

# Fully masked rows


def padded_band():
    """Query i sees keys i-1 and i; keys 2 and 3 of row 1 are padding."""
    keys = np.array([[True] * 4, [True, True, False, False]])
    return masks.window(1, 0) & masks.dense(keys[:, None, None, :])


@readouts.on_cpu
def test_a_row_that_sees_nothing_is_zero_and_passes_no_gradient(implementation):
    """case B001: finite, 0, and equal to the sequence cut to its two tokens."""
    inputs = readouts.random_arrays(0, *[(2, 4, 2, 4)] * 3)

    @jax.jit
    def both(*inputs):
        def loss(*inputs):
            out = attention.dot_product_attention(
                *inputs, mask=padded_band(), implementation=implementation
            )
            return jnp.sum(out[0]) + jnp.sum(out[1, :2]), out

        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)
        return out, gradients

    @jax.jit
    def of_cut(*inputs):
        def loss(*inputs):
            return jnp.sum(
                attention.dot_product_attention(
                    *inputs, mask=masks.window(1, 0), implementation=implementation
                )
            )

        return jax.grad(loss, argnums=(0, 1, 2))(*inputs)

    out, gradients = both(*inputs)
    assert np.all(np.isfinite(out))
    assert np.all(np.asarray(out[1, 3]) == 0)
    for whole, cut in zip(gradients, of_cut(*(x[1:, :2] for x in inputs)), strict=True):
        np.testing.assert_allclose(whole[1:, :2], cut, atol=1e-6)
        assert np.all(np.asarray(whole[1, 2:]) == 0)
        assert np.all(np.isfinite(whole))


@readouts.on_cpu
def test_a_module_row_that_sees_nothing_passes_no_gradient(implementation):
    """case B001: of every kernel and bias, as with the sequence cut."""
    module = multihead.MultiHeadAttention(num_heads=2, implementation=implementation)
    (x,) = readouts.random_arrays(1, (2, 4, 8))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    parameters = jax.tree.map(
        lambda p: 0.1 + jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape),
        shapes,
    )

    @compiling.as_users_do
    def padded(parameters):
        def loss(parameters):
            out = module.apply(parameters, x, mask=padded_band())
            return jnp.sum(out[0]) + jnp.sum(out[1, :2]), out

        return jax.grad(loss, has_aux=True)(parameters)

    @compiling.as_users_do
    @jax.grad
    def cut(parameters):
        rows = (x[:1], x[1:, :2])
        band = masks.window(1, 0)
        return sum(jnp.sum(module.apply(parameters, r, mask=band)) for r in rows)

    gradients, out = padded(parameters)
    np.testing.assert_array_equal(out[1, 3], parameters["params"]["out"]["bias"])
    for found, wanted in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(cut(parameters)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mask": np.zeros((1, 1, 3, 4), bool)},
        {"mask": masks.causal(offset=-3)},
        {"key_value_seq_lengths": np.array([0])},
        {"query_seq_lengths": np.array([0])},
    ],
    ids=["array", "causal", "keys", "queries"],
)
@readouts.on_cpu
def test_nothing_seen_is_zero_in_every_implementation(implementation, arguments):
    """jax.nn gives the mean of the values here: our one deviation."""
    inputs = readouts.random_arrays(2, (1, 3, 2, 4), (1, 4, 2, 4), (1, 4, 2, 4))

    @jax.jit
    def answers(inputs, arguments):
        def f(*inputs):
            return attention.dot_product_attention(
                *inputs,
                implementation=implementation,
                return_residual=True,
                **arguments,
            )

        out, backward, residual = jax.vjp(f, *inputs, has_aux=True)
        weights = attention.attention_weights(*inputs[:2], **arguments)
        return out, *backward(jnp.ones_like(out)), weights, residual

    *zeros, residual = answers(inputs, arguments)
    for array in zeros:
        assert np.all(np.asarray(array) == 0)
    assert np.all(np.asarray(residual) == -np.inf)


def test_softmax_of_a_masked_peak():
    """case B004: alone and under vmap, with its gradient."""

    def value_and_gradient(scores, mask):
        weights, backward = jax.vjp(
            lambda scores: softmax.masked_softmax(scores, mask), scores
        )
        return weights, *backward(jnp.array([1.0, 2, 3]))

    scores = jnp.array([1.0, 1, 100])
    mask = jnp.array([True, True, False])
    rows = [jnp.broadcast_to(x, (8, 3)) for x in (scores, mask)]
    alone = jax.jit(value_and_gradient)(scores, mask)
    mapped = jax.jit(jax.vmap(value_and_gradient))(*rows)
    for weights, gradient in (alone, *zip(*mapped, strict=True)):
        np.testing.assert_array_equal(weights, [0.5, 0.5, 0])
        np.testing.assert_allclose(gradient, [-0.25, 0.25, 0], atol=1e-7)
        assert gradient[2] == 0


def test_entropy_has_a_finite_gradient_at_zero_weights():
    """case B005."""

    def entropy(scores):
        mask = jnp.array([True, True, False])
        return softmax.entropy(softmax.masked_softmax(scores, mask))

    value, gradient = jax.jit(jax.value_and_grad(entropy))(jnp.zeros(3))
    np.testing.assert_allclose(value, 0.693147, rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 0, 0], atol=1e-7)
    small = jnp.array([0.5, 0.5, 0], jnp.float16)
    np.testing.assert_allclose(softmax.entropy(small), 0.693147, rtol=1e-3)


@readouts.on_cpu
def test_a_masked_key_weighs_exactly_nothing(implementation):
    """case B007: whatever finite score it has, and far above the visible one."""
    query = jnp.ones((1, 1, 1, 1))
    value = jnp.array([1.0, 100])[None, :, None, None]
    arguments = {"mask": np.array([True, False]), "scale": 1.0}

    @jax.jit
    def answers(key):
        out, backward = jax.vjp(
            lambda *inputs: attention.dot_product_attention(
                *inputs, implementation=implementation, **arguments
            ),
            query,
            key,
            value,
        )
        weights = attention.attention_weights(query, key, **arguments)
        return out, weights, *backward(jnp.ones_like(out))

    for masked_score in (0, 3e38):
        key = jnp.array([-20.0, masked_score])[None, :, None, None]
        out, weights, dq, dk, dv = (np.ravel(x) for x in answers(key))
        np.testing.assert_array_equal(out, [1])
        np.testing.assert_array_equal(weights, [1, 0])
        np.testing.assert_array_equal(dq, [0])
        np.testing.assert_array_equal(dk, [0, 0])
        np.testing.assert_array_equal(dv, [1, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@readouts.on_cpu
def test_masks_combine_as_booleans(implementation, dtype):
    """case B010: no cell below the dtype's minimum where two masks meet."""
    inputs = [x.astype(dtype) for x in readouts.random_arrays(3, *[(1, 4, 1, 8)] * 3)]
    for keys in ([False, True, True, True], [False, True, True, False]):
        out = readouts.attend(
            *inputs, mask=np.array(keys), is_causal=True, implementation=implementation
        )
        assert out.dtype == dtype
        assert np.all(np.asarray(out[0, 0]) == 0)
        np.testing.assert_array_equal(out[0, 1], inputs[2][0, 1])
        assert np.all(np.isfinite(np.asarray(out, np.float32)))


# Causal alignment and windows


@readouts.on_cpu
def test_one_query_after_all_keys(implementation):
    """case B011: the flag aligns top-left; a decoding step states its offset."""
    read = functools.partial(readouts.read, 1, 8, implementation=implementation)
    readouts.assert_reads(read(is_causal=True), [1])
    readouts.assert_reads(read(mask=masks.causal(offset=7)), [4.5])


@readouts.on_cpu
def test_causal_when_lengths_differ(implementation):
    """case B012: both alignments, with more keys and with more queries."""
    read = functools.partial(readouts.read, implementation=implementation)
    readouts.assert_reads(read(2, 5, is_causal=True), [1, 1.5])
    readouts.assert_reads(read(5, 2, is_causal=True), [1, 1.5, 1.5, 1.5, 1.5])
    readouts.assert_reads(read(2, 5, mask=masks.causal(offset=3)), [2.5, 3])
    readouts.assert_reads(read(5, 2, mask=masks.causal(offset=-3)), [0, 0, 0, 1, 1.5])


@readouts.on_cpu
def test_ways_to_say_causal(implementation):
    """case B015: a mask beside the flag neither replaces it nor is dropped."""
    read = functools.partial(readouts.read, 4, 4, implementation=implementation)
    everything = np.ones((4, 4), bool)
    for arguments in (
        {"is_causal": True},
        {"is_causal": True, "mask": everything},
        {"mask": np.tri(4, dtype=bool)},
        {"mask": masks.causal()},
    ):
        readouts.assert_reads(read(**arguments), [1, 1.5, 2, 2.5])
    last_only = everything & (np.arange(4) == 3)
    readouts.assert_reads(read(is_causal=True, mask=last_only), [0, 0, 0, 4])


@readouts.on_cpu
def test_window_without_a_mask(implementation):
    """case B016: distances, both inclusive, with and without another mask."""
    read = functools.partial(readouts.read, 6, 6, implementation=implementation)
    wanted = [1, 1.5, 2, 3, 4, 5]
    readouts.assert_reads(read(local_window_size=(2, 0)), wanted)
    everything = np.ones((6, 6), bool)
    readouts.assert_reads(read(local_window_size=(2, 0), mask=everything), wanted)
    readouts.assert_reads(read(local_window_size=1), [1.5, 2, 3, 4, 5, 5.5])
    readouts.assert_reads(read(local_window_size=(0, 2)), [2, 3, 4, 5, 5.5, 6])


@readouts.on_cpu
def test_sliding_window_counts_the_query_itself(implementation):
    """case B018: W keys; 1 is the value itself, and W = T all that is causal."""
    read = functools.partial(readouts.read, 6, 6, implementation=implementation)
    readouts.assert_reads(read(mask=masks.sliding_window(3)), [1, 1.5, 2, 3, 4, 5])
    readouts.assert_reads(read(mask=masks.sliding_window(1)), [1, 2, 3, 4, 5, 6])
    causal = read(is_causal=True)
    for size in (6, 10**6):
        readouts.assert_reads(read(mask=masks.sliding_window(size)), causal)
    for size in (0, -1):
        with pytest.raises(ValueError, match="size"):
            masks.sliding_window(size)
    with pytest.raises(ValueError, match="left"):
        read(local_window_size=(-1, 0))


@readouts.on_cpu
def test_sliding_window_at_the_end(implementation):
    """case B020: queries that stand behind the first key."""
    window = masks.sliding_window
    read = functools.partial(readouts.read, implementation=implementation)
    readouts.assert_reads(read(1, 10, mask=window(3, offset=9)), [9])
    readouts.assert_reads(read(4, 10, mask=window(3, offset=6)), [6, 7, 8, 9])


@readouts.on_cpu
def test_true_means_may_attend(implementation):
    """case B023: the first row of a lower triangle sees exactly itself."""
    read = functools.partial(readouts.read, 3, 3, implementation=implementation)
    lower = np.tri(3, dtype=bool)
    readouts.assert_reads(read(mask=lower), [1, 1.5, 2])
    readouts.assert_reads(read(mask=~lower), [2.5, 3, 0])


def test_a_sink_above_every_score():
    """Its exponential would overflow, were the peak that of the scores alone."""
    weights, log = softmax.masked_softmax_and_log_normalizer(
        jnp.zeros((1, 3)), sink=jnp.float32(200)
    )
    np.testing.assert_array_equal(weights, np.zeros((1, 3)))
    np.testing.assert_allclose(log, [200], rtol=1e-6)
