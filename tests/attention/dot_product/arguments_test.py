"""Arguments of attention: masks, biases, score modifiers; and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import attention
from attention import masks, score_mods
from models import multihead
from tests.support import oracle, readouts

B, T, S, N, K, H = 2, 3, 5, 4, 2, 4
KEYS = ("key", "value")


def test_dtypes_are_not_mixed():
    """Not even two of one size."""
    shape = (1, 3, 1, 4)
    for dtypes in (("float16", "bfloat16"), ("float32", "bfloat16")):
        query, key = (jnp.zeros(shape, dtype) for dtype in dtypes)
        with pytest.raises(ValueError, match="one dtype, got " + dtypes[0]):
            attention.dot_product_attention(query, key, key)
        with pytest.raises(ValueError, match="one dtype, got " + dtypes[1]):
            attention.dot_product_attention(key, key, query)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8"])
def test_masks_of_numbers_are_refused(dtype):
    """case B024: never the softmax of score + 1."""
    x = jnp.zeros((1, 3, 1, 4))
    with pytest.raises(TypeError, match="mask must be boolean; use bias= for additive"):
        attention.dot_product_attention(x, x, x, mask=jnp.tri(3, dtype=dtype))


def test_the_module_takes_masks_as_flax_makes_them():
    """case B024: 0 and 1 in float32; other floats are no masks."""
    module = multihead.MultiHeadAttention(num_heads=2)
    (x,) = readouts.random_arrays(4, (2, 3, 8))
    parameters = jax.jit(module.init)(jax.random.key(0), x)
    apply = functools.partial(module.apply, parameters, x)
    traced = jax.jit(apply)
    wanted = traced(mask=masks.causal())
    flax_mask = nn.make_causal_mask(jnp.ones((2, 3)))
    assert flax_mask.dtype == jnp.float32
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8, bool):
        found = apply(mask=flax_mask.astype(dtype))
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    for other in (0.5 * flax_mask, -1e9 * (1 - flax_mask)):
        with pytest.raises(TypeError, match="bias"):
            apply(mask=other)
        # What is traced cannot be looked at: non-zero = may attend, as in flax.
        non_zero = np.asarray(other) != 0
        np.testing.assert_array_equal(traced(mask=other), traced(mask=non_zero))


@pytest.mark.parametrize("kind", ["array", "mask", "argument"])
@readouts.on_cpu
def test_padding_goes_to_rows_and_not_to_heads(implementation, kind):
    """case B026: with B = K, grouped heads."""
    lengths = np.array([1, 2])
    arguments = {
        "array": {"mask": (np.arange(2) < lengths[:, None])[:, None, None, :]},
        "mask": {"mask": masks.lengths(lengths)},
        "argument": {"key_value_seq_lengths": lengths},
    }[kind]
    value = jnp.broadcast_to(jnp.array([1.0, 2])[None, :, None, None], (2, 2, 2, 1))
    query = jnp.zeros((2, 1, 4, 1))
    out = readouts.attend(
        query, 0 * value, value, implementation=implementation, **arguments
    )
    readouts.assert_reads(out[:, 0, :, 0], [[1] * 4, [1.5] * 4])


@readouts.on_cpu
def test_masks_broadcast_from_the_right(implementation):
    """case B028: against [B N T S], as in jax.nn."""
    inputs = readouts.random_arrays(5, (B, T, N, 4), (B, S, 2, 4), (B, S, 2, 4))
    read = functools.partial(readouts.attend, *inputs, implementation=implementation)
    rng = np.random.default_rng(6)
    for shape in [(S,), (T, S), (1, 1, S), (1, 1, T, S), (B, 1, 1, S), (B, N, T, S)]:
        mask = rng.random(shape) < 0.6
        full = np.broadcast_to(mask, (B, N, T, S))
        np.testing.assert_allclose(read(mask=mask), read(mask=full), atol=1e-6)


@pytest.mark.parametrize(
    "shape", [(T,), (S, T), (B, S), (B, T, S), (3, 1, 1, S), (1, B, N, T, S)], ids=str
)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_misfits_name_the_axes_and_what_came(shape, name):
    """case B028."""
    query, key = readouts.random_arrays(5, (B, T, N, 4), (B, S, 2, 4))
    array = np.ones(shape, bool if name == "mask" else np.float32)
    with pytest.raises(ValueError, match=rf"{name}.*\[\*B N T S\]") as error:
        attention.dot_product_attention(query, key, key, **{name: array})
    assert str(list(shape)) in str(error.value)


def test_one_padding_mask_per_row_in_bfloat16():
    """case B030: the same in every implementation on this platform."""
    inputs = [
        x.astype("bfloat16") for x in readouts.random_arrays(7, *[(4, 32, 4, 16)] * 3)
    ]
    mask = (np.arange(32) < np.array([[32], [5], [17], [1]]))[:, None, None, :]
    outputs = [
        np.asarray(readouts.attend(*inputs, mask=mask, implementation=name), np.float32)
        for name in readouts.CPU
    ]
    for other in outputs[1:]:
        np.testing.assert_allclose(outputs[0], other, atol=2e-2)
    np.testing.assert_array_equal(
        outputs[0][3, :, 0], np.tile(np.float32(inputs[2][3, :1, 0]), (32, 1))
    )


@pytest.mark.parametrize(
    "shape", [(4, 4), (1, 4), (4, 1), (4, 1, 4), (4, 1, 1, 4), (4, 4, 4, 1)], ids=str
)
@readouts.on_cpu
def test_axes_of_one_size_are_not_confused(implementation, shape):
    """case B026: B = N = T = S = H with K < N, against the loop."""
    inputs = readouts.random_arrays(8, (4, 4, 4, 4), (4, 4, 2, 4), (4, 4, 2, 4))
    rng = np.random.default_rng(9)
    mask, bias = rng.random(shape) < 0.6, rng.normal(size=shape)
    arguments = {"mask": mask, "bias": jnp.asarray(bias, jnp.float32)}
    out = readouts.attend(*inputs, implementation=implementation, **arguments)
    wanted = oracle.attention(
        *inputs,
        visible=np.broadcast_to(mask, (4, 4, 4, 4)),
        bias=np.broadcast_to(bias, (4, 4, 4, 4)),
    )
    np.testing.assert_allclose(out, wanted["out"], atol=2e-6)
    weights = readouts.attend_weights(*inputs[:2], **arguments)
    np.testing.assert_allclose(weights, wanted["weights"], atol=2e-6)


def slopes_to_bias(slopes):
    distance = np.abs(np.arange(T)[:, None] - np.arange(S))
    return -slopes[None, :, None, None] * distance[None, None]


@pytest.mark.parametrize(
    ("shape", "to_bias"),
    [((1, N, T, S), None), ((B, 1, 1, S), None), ((N,), slopes_to_bias)],
    ids=["heads", "rows", "slopes"],
)
@readouts.on_cpu
def test_gradient_of_a_bias_has_its_shape(implementation, shape, to_bias):
    """case B079: summed over the axes along which it was broadcast."""
    *inputs, output_gradient, given, direction = readouts.random_arrays(
        10, (B, T, N, 4), (B, S, K, 4), (B, S, K, 4), (B, T, N, 4), shape, shape
    )

    @jax.jit
    def loss_and_gradient(given):
        def loss(given):
            bias = given if to_bias is None else to_bias(given)
            out = attention.dot_product_attention(
                *inputs, bias, implementation=implementation
            )
            return jnp.sum(out * output_gradient)

        return jax.value_and_grad(loss)(given)

    _, gradient = loss_and_gradient(given)
    assert gradient.shape == shape
    step = 0.01 * direction
    upper, lower = (loss_and_gradient(given + s)[0] for s in (step, -step))
    along = jnp.sum(gradient * direction)
    np.testing.assert_allclose(along, (upper - lower) / 0.02, atol=1e-3 * N)
    full = np.asarray(given if to_bias is None else to_bias(given))
    full = np.broadcast_to(full, (B, N, T, S))
    dbias = oracle.attention(*inputs, bias=full, output_gradient=output_gradient)
    dbias = dbias["dbias"]
    if to_bias is None:
        axes = tuple(axis for axis in range(4) if shape[axis] == 1)
        wanted = np.sum(dbias, axis=axes, keepdims=True)
    else:
        wanted = np.einsum("bnts,ts->n", dbias, slopes_to_bias(np.ones(1))[0, 0])
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)


def bucket_bias(table):
    """T5's relative bias, read from a table [buckets N]."""

    def score_mod(score, q_index, kv_index, *, batch, head):
        bucket = score_mods.relative_buckets(
            kv_index - q_index, num_buckets=4, max_distance=4, bidirectional=True
        )
        return score + table[bucket, head]

    return score_mod


@readouts.with_every_feature
def test_gradients_reach_what_a_score_mod_closes_over(implementation):
    """ALiBi slopes and T5's table, against the loop's gradient of the scores."""
    *inputs, output_gradient, slopes, table = readouts.random_arrays(
        8, (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H), (N,), (4, N)
    )
    # Distances -2 … 4: at 0 bucket 0, at -1 bucket 1, at +1 bucket 3 of both halves.
    distance = np.arange(S) - np.arange(T)[:, None]
    bucket = np.where(distance > 0, 3, np.where(distance < 0, 1, 0))

    def gradient(to_score_mod, parameters):
        def out_of(parameters):
            return attention.dot_product_attention(
                *inputs,
                score_mod=to_score_mod(parameters),
                implementation=implementation,
            )

        out, backward = jax.vjp(out_of, parameters)
        return out, *backward(output_gradient)

    for to_score_mod, parameters, score_mod, dscore_mod in (
        (
            score_mods.alibi,
            slopes,
            lambda s, i, j, b, n: (s - float(slopes[n]) * abs(i - j), 1.0),
            lambda dscores: -np.einsum("bnts,ts->n", dscores, np.abs(distance)),
        ),
        (
            bucket_bias,
            table,
            lambda s, i, j, b, n: (s + float(table[bucket[i, j], n]), 1.0),
            lambda dscores: np.stack(
                [np.einsum("bnts,ts->n", dscores, bucket == c) for c in range(4)]
            ),
        ),
    ):
        compute = jax.jit(functools.partial(gradient, to_score_mod))
        out, found = compute(parameters)
        wanted = oracle.attention(
            *inputs, score_mod=score_mod, output_gradient=output_gradient
        )
        np.testing.assert_allclose(out, wanted["out"], atol=2e-6)
        # The gradient of a bias is that of the score.
        np.testing.assert_allclose(found, dscore_mod(wanted["dbias"]), atol=1e-5)
        assert np.any(np.abs(np.asarray(found)) > 0.01)


def identity(score, q_index, kv_index, *, batch, head):
    return score


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"score_mod": identity}, "score_mod"),
        ({"softcap": 1.0}, "softcap"),
        ({"sinks": np.zeros(N, np.float32)}, "sinks"),
        ({"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "dropout"),
        ({"precision": "highest"}, "precision"),
        ({"value": np.zeros((B, S, K, 1), np.float32)}, "values of another width"),
        ({name: np.zeros((B, 0, K, H), np.float32) for name in KEYS}, "no keys"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_nothing_is_silently_ignored(implementation, arguments, words):
    """jax.nn has none of these; None finds an implementation that has."""
    x = jnp.zeros((B, S, K, H))
    arguments = {"query": jnp.zeros((B, T, N, H)), "key": x, "value": x} | arguments
    with pytest.raises(ValueError, match=f"'{implementation}' does not .*{words}"):
        attention.dot_product_attention(**arguments, implementation=implementation)
    out = jax.eval_shape(
        functools.partial(attention.dot_product_attention, **arguments)
    )
    assert out.shape == (B, T, N, arguments["value"].shape[-1])


def test_implementations_that_are_not_there():
    x = jnp.zeros((1, 2, 1, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="reference.*xla.*cudnn.*got 'fast'"):
        attention.dot_product_attention(x, x, x, implementation="fast")
    with pytest.raises(ValueError, match="needs a CUDA device, got cpu"):
        attention.dot_product_attention(x, x, x, implementation="cudnn")


@pytest.mark.parametrize("size", [(0, 0, 1), (1,), -1, (2, -1), 1.5, (None, 0)])
def test_windows_that_are_none(size):
    x = jnp.zeros((1, 3, 1, 4))
    with pytest.raises(ValueError, match="a distance or .left, right."):
        attention.dot_product_attention(x, x, x, local_window_size=size)


def test_windows_of_numpy_are_windows():
    x = jnp.zeros((1, 3, 1, 4))
    value = jnp.arange(3.0).reshape(1, 3, 1, 1) + 1
    for size in (np.int64(1), 1, (1, 1), np.array([1, 1])):
        found = attention.dot_product_attention(x, x, value, local_window_size=size)
        np.testing.assert_allclose(found.ravel(), [1.5, 2, 2.5], atol=1e-6)


@pytest.mark.parametrize("dtype", [bool, jnp.int32])
def test_a_bias_must_be_floating(dtype):
    """The mirror of case B024: a mask in the place of the bias is no score."""
    x = jnp.zeros((1, 3, 1, 4))
    with pytest.raises(TypeError, match="bias must be floating"):
        attention.dot_product_attention(x, x, x, jnp.ones((3, 3), dtype))
    with pytest.raises(TypeError, match="sinks must be floating"):
        attention.dot_product_attention(x, x, x, sinks=jnp.ones(1, dtype))


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan")])
def test_soft_caps_are_positive(softcap):
    x = jnp.zeros((1, 2, 1, 4))
    with pytest.raises(ValueError, match="softcap must be positive"):
        attention.dot_product_attention(x, x, x, softcap=softcap)


def test_each_query_head_has_its_sink():
    x = jnp.zeros((1, 2, 2, 4))
    with pytest.raises(ValueError, match="one score per query head"):
        attention.dot_product_attention(x, x, x, sinks=jnp.zeros(1))
