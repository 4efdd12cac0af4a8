"""Dot-product attention against the float64 loop, PyTorch's numbers and jax.nn."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks
from tests import oracle

GOLDEN = pathlib.Path(__file__).parent / "golden"
B, T, S, N, K, H, D = 2, 5, 7, 4, 2, 8, 6
CPU_IMPLEMENTATIONS = ("reference", "xla")


def inputs(seed, dtype, *, value_width=D):
    rng = np.random.default_rng(seed)
    shapes = (
        (B, T, N, H),
        (B, S, K, H),
        (B, S, K, value_width),
        (B, T, N, value_width),
    )
    # Scores of a standard deviation of about 2: rows neither flat nor one-hot.
    sizes = (1.5, 1.5, 1.0, 1.0)
    return [
        jnp.asarray(c * rng.normal(size=s), dtype)
        for c, s in zip(sizes, shapes, strict=True)
    ]


def visible_array():
    """What `FEATURES['masks']` shows: a row of the second batch entry sees nothing."""
    array = np.zeros((B, N, T, S), bool)
    for b, n, i, j in np.ndindex(array.shape):
        array[b, n, i, j] = j <= i + 1 and j < (6, 4)[b] and not (b == 1 and i == 2)
    return array


def alibi_like(score, q_index, kv_index, *, batch, head):
    distance = jnp.abs(q_index - kv_index).astype(score.dtype)
    factor = 1 + jnp.asarray(head, score.dtype) / 10
    return score * factor - distance / 4 + jnp.asarray(batch, score.dtype) * 0.125


def alibi_like_number(score, i, j, b, n):
    return score * (1 + n / 10) - abs(i - j) / 4 + b * 0.125, 1 + n / 10


RNG = np.random.default_rng(7)
BIAS = RNG.normal(size=(B, N, T, S))
SINKS = RNG.normal(size=N)

# name -> (arguments of ours, arguments of the oracle)
FEATURES = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "bias": ({"bias": BIAS}, {"bias": BIAS}),
    "masks": (
        {
            "mask": masks.causal(offset=1)
            & ~masks.dense(np.arange(B * T).reshape(B, 1, T, 1) == T + 2),
            "key_value_seq_lengths": np.array([6, 4]),
        },
        {"visible": visible_array()},
    ),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "score_mod": ({"score_mod": alibi_like}, {"score_mod": alibi_like_number}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
    "all": (
        {
            "scale": 0.4,
            "bias": BIAS,
            "mask": visible_array(),
            "softcap": 2.0,
            "score_mod": alibi_like,
            "sinks": SINKS,
        },
        {
            "scale": 0.4,
            "bias": BIAS,
            "visible": visible_array(),
            "softcap": 2.0,
            "score_mod": alibi_like_number,
            "sinks": SINKS,
        },
    ),
}
JAX_NN_FEATURES = ("plain", "scale", "bias", "masks")


@functools.cache
def expected(name, dtype):
    """The oracle's answers on inputs rounded to the dtype; once per process."""
    query, key, value, output_gradient = inputs(0, dtype)
    arguments = dict(FEATURES[name][1])
    for array in ("bias", "sinks"):
        if array in arguments:
            arguments[array] = np.asarray(jnp.asarray(arguments[array], dtype))
    return oracle.attention(
        *(np.asarray(x, np.float64) for x in (query, key, value)),
        output_gradient=np.asarray(output_gradient, np.float64),
        **arguments,
    )


def answers(name, dtype, attend, *, value_width=D):
    """Outputs and gradients of `attend`, under the oracle's names."""
    query, key, value, output_gradient = inputs(0, dtype)
    arguments = dict(FEATURES[name][0])
    arrays = {
        array: jnp.asarray(arguments.pop(array), dtype)
        for array in ("bias", "sinks")
        if array in arguments
    }

    @jax.jit
    def outputs_and_gradients(query, key, value, arrays):
        def attend_all(query, key, value, arrays):
            return attend(query, key, value, **arrays, **arguments)

        out, backward = jax.vjp(attend_all, query, key, value, arrays)
        return out, backward(output_gradient)

    out, (dq, dk, dv, darrays) = outputs_and_gradients(query, key, value, arrays)
    found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    return found | {f"d{array}": gradient for array, gradient in darrays.items()}


def worst_error(found, wanted):
    return np.max(np.abs(np.asarray(found, np.float64) - wanted))


def jax_nn(query, key, value, bias=None, **arguments):
    """jax.nn's dense form, with 0 in rows that see nothing."""
    mask, lengths = arguments.pop("mask", None), None
    if mask is not None:
        mask = mask.materialize(T, S, batch_size=B, num_heads=N)
        lengths = jnp.asarray(arguments.pop("key_value_seq_lengths"), jnp.int32)
    widened = jnp.concatenate([value, jnp.zeros((B, S, K, H - D), value.dtype)], -1)
    out = jax.nn.dot_product_attention(
        query, key, widened, bias, mask, key_value_seq_lengths=lengths, **arguments
    )[..., :D]
    if mask is None:
        return out
    sees = visible_array().any(-1).swapaxes(1, 2)[..., None]
    return jnp.where(sees, out, 0)


def plain_dense(query, key, value, bias=None, sinks=None, **arguments):
    """What jax.nn would do with softcap, score_mod and sinks: the same roundings."""
    grouped = query.reshape(B, T, K, N // K, H)
    products = dict(preferred_element_type=jnp.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, **products)
    scores = scores.reshape(B, N, T, S) * arguments.get("scale", H**-0.5)
    if softcap := arguments.get("softcap"):
        scores = softcap * jnp.tanh(scores / softcap)
    if score_mod := arguments.get("score_mod"):
        b, n, i, j = jnp.meshgrid(*map(np.arange, (B, N, T, S)), indexing="ij")
        scores = score_mod(scores, i, j, batch=b, head=n)
    if bias is not None:
        scores = (scores + bias).astype(jnp.float32)
    visible = np.ones((1, 1, 1, 1), bool)
    if "mask" in arguments:
        visible = visible_array()
    scores = jnp.where(visible, scores, -1e30)
    if sinks is not None:
        column = jnp.broadcast_to(
            sinks.astype(jnp.float32)[None, :, None, None], (B, N, T, 1)
        )
        scores = jnp.concatenate([scores, column], -1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :S].astype(query.dtype)
    weights = jnp.where(visible, weights, 0)
    weights = weights.reshape(B, K, N // K, T, S)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(B, T, N, D)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reference_is_within_the_error_budget(name, dtype):
    """Twice the plain dense form's error, and 4 ulp of the largest value."""
    wanted = expected(name, dtype)
    ours = answers(
        name,
        dtype,
        functools.partial(attention.dot_product_attention, implementation="reference"),
    )
    # jax.nn's products of float16 do not compile for a CPU.
    has_peer = name in JAX_NN_FEATURES and dtype != "float16"
    peer = answers(name, dtype, jax_nn if has_peer else plain_dense)
    for array, found in ours.items():
        assert found.dtype == dtype
        largest = np.max(np.abs(wanted[array]))
        ulp = float(np.spacing(np.asarray(largest, jnp.dtype(dtype))))
        budget = 2 * worst_error(peer[array], wanted[array]) + 4 * ulp
        assert worst_error(found, wanted[array]) <= budget, array


@pytest.mark.x64
@pytest.mark.parametrize("name", FEATURES)
def test_reference_in_float64(name):
    """Every feature, outputs and gradients, within 1e-12 of the loop."""
    wanted = expected(name, "float64")
    ours = answers(
        name,
        "float64",
        functools.partial(attention.dot_product_attention, implementation="reference"),
    )
    for array, found in ours.items():
        assert found.dtype == jnp.float64
        largest = max(1, np.max(np.abs(wanted[array])))
        assert worst_error(found, wanted[array]) <= 1e-12 * largest, array


@pytest.mark.parametrize("name", JAX_NN_FEATURES)
def test_xla_equals_the_loop(name):
    """jax.nn behind our entry; rows that see nothing give 0."""
    query, key, value, output_gradient = inputs(3, "float32", value_width=H)
    wanted = oracle.attention(
        query, key, value, output_gradient=output_gradient, **FEATURES[name][1]
    )
    out, backward = jax.vjp(
        functools.partial(
            attention.dot_product_attention,
            implementation="xla",
            **FEATURES[name][0],
        ),
        query,
        key,
        value,
    )
    for found, array in zip(
        (out, *backward(output_gradient)), ("out", "dq", "dk", "dv"), strict=True
    ):
        np.testing.assert_allclose(found, wanted[array], atol=1e-5)


@pytest.mark.parametrize("name", ("plain", "masks", "sinks", "all"))
def test_weights_and_log_sum_exp(name):
    query, key, value, _ = inputs(0, "float32")
    arguments = FEATURES[name][0]
    wanted = expected(name, "float32")
    weights = attention.attention_weights(query, key, **arguments)
    np.testing.assert_allclose(weights, wanted["weights"], atol=2e-6)
    _, lse = attention.dot_product_attention(
        query, key, value, return_residual=True, **arguments
    )
    np.testing.assert_allclose(lse, wanted["lse"], atol=1e-5)


def test_log_sum_exp_has_a_gradient():
    """d lse / d scale · q = Σⱼ wⱼ kⱼ, and nothing comes from rows that see nothing."""
    query, key, value, _ = inputs(0, "float32")
    arguments = FEATURES["masks"][0]

    def total(query):
        _, lse = attention.dot_product_attention(
            query, key, value, return_residual=True, scale=1.0, **arguments
        )
        return jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    gradient = jax.grad(total)(query)
    weights = np.asarray(
        attention.attention_weights(query, key, scale=1.0, **arguments)
    )
    keys = np.repeat(np.asarray(key), N // K, axis=2)
    wanted = np.einsum("bnts,bsnh->btnh", weights, keys)
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"local_window_size": 1},
        {"local_window_size": (2, 0), "is_causal": True},
        {"key_value_seq_lengths": [3, 7], "query_seq_lengths": [5, 2]},
        {"scale": 0.3, "bias": BIAS[:1, :, :, :1]},
    ],
    ids=str,
)
def test_equals_jax_nn_wherever_every_row_sees_a_key(implementation, arguments):
    """Output, log-sum-exp and gradients; rows past query_seq_lengths are 0 too."""
    query, key, value, output_gradient = inputs(1, "float32", value_width=H)
    arguments = dict(arguments)
    for name in ("key_value_seq_lengths", "query_seq_lengths"):
        if name in arguments:
            arguments[name] = jnp.array(arguments[name], jnp.int32)
    if "bias" in arguments:
        arguments["bias"] = jnp.asarray(arguments["bias"], jnp.float32)

    def both(attend):
        out, backward = jax.vjp(
            lambda *arrays: attend(*arrays, **arguments), query, key, value
        )
        return (out, *backward(output_gradient))

    ours = both(
        functools.partial(
            attention.dot_product_attention, implementation=implementation
        )
    )
    theirs = both(jax.nn.dot_product_attention)
    for found, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, wanted, atol=3e-6)


@pytest.mark.x64
@pytest.mark.parametrize("case", range(10))
def test_pytorch_in_float64(case):
    """PyTorch's SDPA in float64: forward and gradients, grouped heads, T ≠ S."""
    golden = np.load(GOLDEN / "sdpa_float64.npz")
    assert golden["count"] == 10
    arrays = [jnp.asarray(golden[f"{case}_{name}"]) for name in ("q", "k", "v", "do")]
    out, backward = jax.vjp(
        functools.partial(
            attention.dot_product_attention,
            is_causal=bool(golden[f"{case}_causal"]),
            implementation="reference",
        ),
        *arrays[:3],
    )
    names = ("out", "dq", "dk", "dv")
    for name, found in zip(names, (out, *backward(arrays[3])), strict=True):
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, golden[f"{case}_{name}"], rtol=0, atol=1e-12)


def test_dropout_keeps_what_the_generator_says():
    """The oracle with the kept weights; the generator alone is tested elsewhere."""
    query, key, value, output_gradient = inputs(2, "float32")
    rng = jax.random.key(3)
    ones = jnp.ones((B, S, K, S)) * jnp.eye(S)[None, :, None, :]
    weights = attention.attention_weights(query, key)
    dropped = attention.dot_product_attention(
        query, key, ones, dropout_rate=0.25, dropout_rng=rng
    )
    keep = np.swapaxes(np.asarray(dropped), 1, 2) != 0
    assert 0 < np.mean(keep) < 1
    out, backward = jax.vjp(
        functools.partial(
            attention.dot_product_attention, dropout_rate=0.25, dropout_rng=rng
        ),
        query,
        key,
        value,
    )
    wanted = oracle.attention(
        query,
        key,
        value,
        keep=keep,
        dropout_rate=0.25,
        output_gradient=output_gradient,
    )
    np.testing.assert_allclose(weights, wanted["weights"], atol=2e-6)
    for found, name in zip(
        (out, *backward(output_gradient)), ("out", "dq", "dk", "dv"), strict=True
    ):
        np.testing.assert_allclose(found, wanted[name], atol=1e-5)
