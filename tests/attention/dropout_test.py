"""Dropout of attention weights: what it depends on, and what it does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks
from tests.support import readouts

B, T, S, N, K = 2, 5, 7, 4, 2
RATE = 0.25


def sizes(**changed):
    return {"B": B, "T": T, "S": S, "N": N, "K": K} | changed


@functools.partial(
    jax.jit, static_argnames=("broadcast_dropout", "implementation", *"BTSNK")
)
def _dropped(rng, *, B, T, S, N, K, implementation, **arguments):
    """Equal weights of [B N T S] after dropout, times S."""
    query, key = jnp.zeros((B, T, N, 4)), jnp.zeros((B, S, K, 4))
    value = jnp.broadcast_to(S * jnp.eye(S)[None, :, None], (B, S, K, S))
    out = attention.dot_product_attention(
        query,
        key,
        value,
        dropout_rate=RATE,
        dropout_rng=rng,
        implementation=implementation,
        **arguments,
    )
    return jnp.swapaxes(out, 1, 2)


def kept(rng, **arguments):
    """Which weights survive; those that do have grown by 1/(1 - RATE)."""
    weights = np.asarray(_dropped(rng, **arguments))
    keep = weights != 0
    np.testing.assert_allclose(weights[keep], 1 / (1 - RATE), rtol=1e-6)
    return keep


@readouts.with_every_feature
def test_what_is_dropped_depends_on_the_place_alone(implementation):
    """Growing any size, or K, adds places and changes none."""
    rng = jax.random.key(0)
    base = kept(rng, **sizes(), implementation=implementation)
    for grown in (sizes(B=3, T=9, N=6), sizes(B=1, S=12, K=4)):
        other = kept(rng, **grown, implementation=implementation)
        shared = tuple(map(slice, np.minimum(base.shape, other.shape)))
        np.testing.assert_array_equal(other[shared], base[shared])


@readouts.with_every_feature
def test_every_place_is_drawn_by_itself(implementation):
    """The share that is kept, and how often two places agree, in their intervals."""
    rng = jax.random.key(1)
    large = sizes(T=64, S=64)
    keep = kept(rng, **large, implementation=implementation)
    assert_share(keep, 1 - RATE)
    agree = RATE**2 + (1 - RATE) ** 2
    for axis in range(4):
        neighbours = np.moveaxis(keep, axis, 0)
        assert_share(neighbours[:-1] == neighbours[1:], agree)
    upper = np.triu_indices(64, 1)
    transposed = np.swapaxes(keep, 2, 3)
    assert_share((keep == transposed)[:, :, *upper], agree)
    assert_share(keep[0, 1] == keep[1, 0], agree)
    other = kept(jax.random.key(2), **large, implementation=implementation)
    assert_share(keep == other, agree)


def assert_share(events, probability):
    """The interval of 99.9 % of as many independent events."""
    error = np.sqrt(probability * (1 - probability) / events.size)
    assert abs(np.mean(events) - probability) < 3.3 * error


@readouts.with_every_feature
def test_expectation_is_kept(implementation):
    """The mean over many keys is the output without dropout, within its interval."""
    inputs = readouts.random_arrays(3, (1, 3, 2, 4), (1, 6, 1, 4), (1, 6, 1, 4))

    def attend(rng):
        return attention.dot_product_attention(
            *inputs,
            dropout_rate=RATE,
            dropout_rng=rng,
            implementation=implementation,
        )

    rngs = jax.random.split(jax.random.key(4), 4000)
    outs = np.asarray(jax.jit(jax.vmap(attend))(rngs))
    np.testing.assert_allclose(attend(rngs[7]), outs[7], atol=1e-6)
    wanted = attention.dot_product_attention(*inputs, implementation=implementation)
    error = np.std(outs, axis=0) / np.sqrt(len(outs))
    assert np.all(error > 0)
    # 24 numbers, each in its interval of 99.99 %.
    assert np.all(np.abs(np.mean(outs, axis=0) - wanted) < 3.9 * error)


@readouts.with_every_feature
def test_broadcast_dropout_shares_rows_and_heads(implementation):
    keep = kept(
        jax.random.key(5),
        **sizes(T=64, S=64),
        broadcast_dropout=True,
        implementation=implementation,
    )
    assert np.all(keep == keep[:1, :1])
    assert_share(keep[0, 0], 1 - RATE)


@readouts.with_every_feature
def test_dropout_and_masks(implementation):
    """Dropout takes from what is seen; what is not seen stays 0."""
    rng = jax.random.key(8)
    free = kept(rng, **sizes(), implementation=implementation)
    weights = _dropped(
        rng, **sizes(), implementation=implementation, mask=masks.causal()
    )
    seen = np.tri(T, S, dtype=bool)
    np.testing.assert_array_equal(np.asarray(weights) != 0, free & seen)
    count = np.sum(seen, axis=-1)[:, None]
    wanted = free * seen * S / count / (1 - RATE)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)


@readouts.on_cpu
def test_no_dropout(implementation):
    """Rate 0 needs no key, and a key makes no difference: the same program."""
    x, y = readouts.random_arrays(9, (B, T, N, 4), (B, S, K, 4))

    def program(**arguments):
        attend = functools.partial(
            attention.dot_product_attention,
            implementation=implementation,
            **arguments,
        )
        return str(jax.make_jaxpr(attend)(x, y, y))

    with_key = program(dropout_rate=0.0, dropout_rng=jax.random.key(0))
    assert with_key == program()


def test_unusable_dropout_is_refused():
    x = jnp.zeros((1, 2, 1, 4))
    attend = functools.partial(attention.dot_product_attention, x, x, x)
    with pytest.raises(ValueError, match="needs a dropout_rng"):
        attend(dropout_rate=0.5)
    for rate in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\)"):
            attend(dropout_rate=rate, dropout_rng=jax.random.key(0))


def test_all_but_nothing_is_dropped():
    x = jnp.ones((1, 2, 1, 4))
    out = attention.dot_product_attention(
        x, x, x, dropout_rate=1 - 1e-12, dropout_rng=jax.random.key(0)
    )
    np.testing.assert_array_equal(out, 0 * x)
