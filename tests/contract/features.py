"""Properties of an implementation on queries, keys and values of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import attention
from attention import masks
from tests.contract import budget, subjects
from tests.contract import values as contract_values
from tests.support import compiling, oracle

B, T, N, H, K = subjects.B, subjects.T, subjects.N, subjects.H, subjects.K
S = T
worst = contract_values.worst
arrays, BIAS = budget.arrays, budget.BIAS
MASKS, SHOWN = budget.MASKS, budget.SHOWN
KEY_LENGTHS = MASKS["key_value_seq_lengths"]
QUERY_LENGTHS = MASKS["query_seq_lengths"]


def log_sum_exp_gradient(subject):
    """∂ lse / ∂ bias = w and ∂ lse / ∂ q = scale · w k; 0 where nothing is seen."""
    query, key, value, _ = arrays("float32")

    @jax.jit
    def gradients(query, bias):
        def total(query, bias):
            _, lse = subject.attend(
                query, key, value, bias, scale=0.5, return_residual=True, **MASKS
            )
            return jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

        return jax.grad(total, argnums=(0, 1))(query, bias)

    by_query, by_bias = gradients(query, np.float32(BIAS))
    weights = oracle.attention(
        query, key, value, scale=0.5, bias=np.float32(BIAS), visible=SHOWN
    )["weights"]
    assert worst(by_bias, weights) <= 1e-5, "the log-sum-exp has another gradient"
    keys = np.repeat(key, N // K, axis=2)
    assert worst(by_query, 0.5 * np.einsum("bnts,bsnh->btnh", weights, keys)) <= 1e-5


def other_width(subject):
    """D != H, and T != S: outputs and gradients of values wider than the keys."""
    *inputs, output_gradient = subjects.normal(
        9, (2, 3, N, H), (2, 5, K, H), (2, 5, K, 6), (2, 3, N, 6)
    )

    @jax.jit
    def both(*inputs):
        out, backward = jax.vjp(subject.attend, *inputs)
        return out, *backward(jnp.asarray(output_gradient))

    wanted = oracle.attention(*inputs, output_gradient=output_gradient)
    for found, name in zip(both(*inputs), ("out", "dq", "dk", "dv"), strict=True):
        assert found.shape == wanted[name].shape
        assert worst(found, wanted[name]) <= 1e-5, name


def means_of_values(subject, *, sizes):
    """Rows sum to 1; each coordinate lies between the least and the largest value.

    With queries and keys of each size, compiled as users do. Values of 1 give 1.
    """
    query, key, value, _ = arrays("float32")
    values = np.repeat(value, N // K, axis=2).swapaxes(1, 2)[:, :, None]
    for arguments, shown in ((MASKS, SHOWN), ({}, np.ones_like(SHOWN))):
        attend = compiling.as_users_do(
            functools.partial(subject.attend, scale=0.7, **arguments)
        )
        sees = shown.any(-1).swapaxes(1, 2)[..., None]
        top, bottom = (
            extreme(np.where(shown[..., None], values, hidden), axis=3).swapaxes(1, 2)
            for extreme, hidden in ((np.max, -np.inf), (np.min, np.inf))
        )
        for size in np.float32(sizes):
            ones = attend(size * query, size * key, np.ones_like(value))
            np.testing.assert_allclose(
                ones, np.broadcast_to(sees, ones.shape), atol=1e-6
            )
            out = np.asarray(attend(size * query, size * key, value))
            assert np.all(out == 0, where=~sees)
            assert np.all(out <= top + 1e-6, where=sees)
            assert np.all(out >= bottom - 1e-6, where=sees)


def sinks(subject):
    """Within the budget; and of any size: a huge one takes all, a tiny one nothing."""
    budget.within_budget(subject, feature="sinks")
    query, key, value, _ = arrays("float32")
    attend = jax.jit(functools.partial(subject.attend, return_residual=True))
    plain, lse = attend(query, key, value)
    out, residual = attend(query, key, value, sinks=np.full(N, 1e4, "float32"))
    assert np.all(np.asarray(out) == 0) and np.all(np.asarray(residual) == 1e4)
    out, residual = attend(query, key, value, sinks=np.full(N, -1e4, "float32"))
    assert worst(out, np.asarray(plain)) <= 1e-6
    assert worst(residual, np.asarray(lse)) <= 1e-6


def leading_dimensions(subject):
    """[*B T N H], with masks and biases that are shared along one of two axes."""
    contract_values.of_leading_dimensions(subject)
    if not isinstance(subject, subjects.Implementation):
        return
    query, key, value, _ = (x.reshape(2, 2, *x.shape[1:]) for x in arrays("float32"))
    array = budget.ARRAY.reshape(2, 2, N, T, S)[:, :1]
    bias = np.float32(BIAS).reshape(2, 2, N, T, S)[:1, :, :1]
    out = jax.jit(subject.attend)(query, key, value, bias, array)
    full = [np.broadcast_to(x, (2, 2, N, T, S)) for x in (array, bias)]
    shown, bias = (x.reshape(B, N, T, S) for x in full)
    wanted = oracle.attention(*arrays("float32")[:3], visible=shown, bias=bias)
    assert worst(out, wanted["out"].reshape(out.shape)) <= 1e-5


def grouped_heads(subject):
    """case B032: head n reads key head n // G, never n % K."""
    for heads, values in ((4, [10, 20]), (6, [10, 20]), (3, [10]), (2, [10, 20])):
        query, key = np.zeros((1, 1, heads, 1)), np.zeros((1, 1, len(values), 1))
        out = jax.jit(subject.attend)(
            np.float32(query), np.float32(key), np.float32(values).reshape(key.shape)
        )
        np.testing.assert_allclose(
            out[0, 0, :, 0], np.repeat(values, heads // len(values)), rtol=1e-6
        )


# Ways to say both lengths, and the window that is shown besides.
SAID = {
    "arguments": lambda keys, queries: {
        "key_value_seq_lengths": keys,
        "query_seq_lengths": queries,
    },
    "and": lambda keys, queries: {
        "mask": masks.lengths(keys, queries) & masks.window(2, 1)
    },
    "or": lambda keys, queries: {
        "mask": masks.lengths(keys - 1, queries) | masks.lengths(keys, queries)
    },
    "both": lambda keys, queries: {
        "mask": masks.window(2, 1) & masks.lengths(keys),
        "query_seq_lengths": queries,
    },
}


def padding_reaches_nothing(subject):
    """NaN, inf and huge numbers beyond the lengths: equal bits, of gradients too."""
    *inputs, output_gradient = arrays("float32")
    inputs = [*inputs, np.float32(BIAS)]
    keys, queries = (
        np.arange(T) >= lengths[:, None] for lengths in (KEY_LENGTHS, QUERY_LENGTHS)
    )
    beyond = [
        queries[:, :, None, None],
        keys[:, :, None, None],
        keys[:, :, None, None],
        keys[:, None, None, :] | queries[:, None, :, None],
    ]
    padded = {
        junk: [
            np.where(b, np.float32(junk), x)
            for x, b in zip(inputs, beyond, strict=True)
        ]
        for junk in (0.0, np.nan, np.inf, -np.inf, 3e38)
    }
    for say in SAID.values():

        @jax.jit
        def both(inputs, keys, queries, say=say):
            def attend(*inputs):
                out, lse = subject.attend(
                    *inputs, **say(keys, queries), return_residual=True
                )
                query, key, _, bias = inputs
                weights = attention.attention_weights(
                    query, key, bias, **say(keys, queries)
                )
                return (out, weights), lse

            (out, weights), backward, lse = jax.vjp(attend, *inputs, has_aux=True)
            cotangents = jnp.asarray(output_gradient), jnp.cos(weights)
            return out, lse, weights, *backward(cotangents)

        wanted = both(padded[0.0], KEY_LENGTHS, QUERY_LENGTHS)
        for given in padded.values():
            for x, y in zip(
                both(given, KEY_LENGTHS, QUERY_LENGTHS), wanted, strict=True
            ):
                np.testing.assert_array_equal(x, y)
        assert np.all(
            np.asarray(wanted[2])[np.broadcast_to(beyond[3], SHOWN.shape)] == 0
        )
        for gradient, b in zip(wanted[3:], beyond, strict=True):
            assert np.all(np.isfinite(gradient))
            assert np.all(np.where(b, gradient, 0) == 0)
            assert np.any(np.asarray(gradient) != 0)


def no_keys(subject):
    """case B044: S = 0 or T = 0 gives zeros, also under jit and grad."""
    attend = functools.partial(subject.attend, is_causal=True)
    for length, key_length in ((3, 0), (0, 3)):
        query = np.ones((2, length, N, H), "float32")
        key = np.ones((2, key_length, K, H), "float32")

        @jax.jit
        def both(*inputs):
            out, backward = jax.vjp(attend, *inputs)
            return out, *backward(jnp.ones_like(out))

        found, like = both(query, key, key), (query, query, key, key)
        for zeros, x in zip(found, like, strict=True):
            assert zeros.shape == x.shape
            assert np.all(np.asarray(zeros) == 0)
        weights = attention.attention_weights(query, key, is_causal=True)
        assert weights.shape == (2, N, length, key_length)


def dropout(subject):
    """What the generator keeps, and no more: outputs and gradients of the loop."""
    *inputs, output_gradient = arrays("float32")
    options = {"dropout_rate": 0.25, "dropout_rng": jax.random.key(3)}

    @jax.jit
    def both(*inputs):
        out, backward = jax.vjp(functools.partial(subject.attend, **options), *inputs)
        return out, *backward(jnp.asarray(output_gradient))

    # Values that are the rows of an identity read the weights out.
    eye = np.broadcast_to(np.eye(S, dtype="float32")[None, :, None], (B, S, K, S))
    weights = both(*inputs[:2], eye)[0]
    keep = np.swapaxes(np.asarray(weights), 1, 2) != 0
    assert 0.5 < np.mean(keep) < 1
    wanted = oracle.attention(
        *inputs, keep=keep, dropout_rate=0.25, output_gradient=output_gradient
    )
    for found, name in zip(both(*inputs), ("out", "dq", "dk", "dv"), strict=True):
        assert worst(found, wanted[name]) <= 1e-5, name
