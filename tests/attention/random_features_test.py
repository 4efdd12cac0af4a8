"""attention.random_features: what is drawn, its means and its errors.

Sums over these features stay finite and causal: tests/attention/linear_sums_test.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import linear, random_features
from tests.contract import subjects
from tests.support import linear_by_hand

M, H = 6, linear_by_hand.H
DRAWS = 4000


@functools.partial(jax.jit, static_argnames=("num_features", "width", "orthogonal"))
def draws(rng, num_features, width, orthogonal):
    """Many projections [DRAWS M H]."""
    draw = functools.partial(
        random_features.gaussian,
        num_features=num_features,
        width=width,
        orthogonal=orthogonal,
    )
    return jax.vmap(draw)(jax.random.split(rng, DRAWS))


def z_scores(samples, mean):
    """How many standard errors the mean of samples [DRAWS ...] is off."""
    samples = np.asarray(samples, np.float64)
    errors = np.std(samples, axis=0, ddof=1) / math.sqrt(len(samples))
    return (np.mean(samples, axis=0) - mean) / errors


def on_sphere(count, width):
    """Two times so many vectors of length 1. Of longer ones samples lie: a product of
    features is log-normal, and its mean hides in rare draws."""
    pair = subjects.normal(3, (count, width), (count, width))
    return [x / np.linalg.norm(x, axis=1, keepdims=True) for x in pair]


@pytest.mark.parametrize("scale", [None, 0.8])
@pytest.mark.parametrize("orthogonal", [False, True])
def test_products_of_features_are_exp_of_those_of_vectors_on_average(orthogonal, scale):
    """z-test over 4,000 draws of 6 rows of width 4: one block and a half."""
    query, key = (0.7 * x for x in on_sphere(5, 4))
    projections = draws(jax.random.key(1), 6, 4, orthogonal)

    @jax.jit
    @jax.vmap
    def products(projection):
        feature_map = random_features.positive(projection, scale=scale)
        return feature_map(query) @ feature_map(key).T

    wanted = np.exp((1 / 2 if scale is None else scale) * query @ key.T)
    z = z_scores(products(projections), wanted)
    assert np.max(np.abs(z)) < 4.5
    assert np.sqrt(np.mean(z**2)) < 1.6


@pytest.mark.parametrize("orthogonal", [False, True])
def test_rows_are_standard_normal(orthogonal):
    """Means, variances and squared lengths of every row, over 4,000 draws."""
    rows = draws(jax.random.key(2), 6, 4, orthogonal)
    assert np.max(np.abs(z_scores(rows, 0))) < 4.5
    assert np.max(np.abs(z_scores(rows**2, 1))) < 4.5
    assert np.max(np.abs(z_scores(rows**4, 3))) < 4.5
    lengths = np.sum(np.asarray(rows) ** 2, axis=-1)
    assert np.max(np.abs(z_scores(lengths, 4))) < 4.5
    assert np.max(np.abs(z_scores((lengths - 4) ** 2, 2 * 4))) < 4.5


def test_rows_of_a_block_are_orthogonal():
    rows = np.asarray(draws(jax.random.key(3), 6, 4, True))
    products = rows @ rows.swapaxes(1, 2)
    same = np.kron(np.eye(2), np.ones((4, 4)))[:6, :6] - np.eye(6) > 0
    assert np.max(np.abs(products[:, same])) < 1e-5
    other = products[:, :4, 4:]
    assert np.min(np.std(other, axis=0)) > 1


def test_another_key_redraws():
    one, again, other = (
        random_features.gaussian(jax.random.key(seed), M, H) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert np.min(np.abs(one - other)) > 0
    assert one.shape == (M, H)
    narrow = random_features.gaussian(jax.random.key(0), M, H, dtype=jnp.float16)
    assert narrow.dtype == jnp.float16


def test_the_error_falls_with_the_number_of_features():
    """As 1/M; and where rows are orthogonal, it is smaller."""
    query, key = (0.5 * x for x in on_sphere(1, 8))

    def errors(num_features, orthogonal):
        """Squares of them [DRAWS]."""
        projections = draws(jax.random.key(6), num_features, 8, orthogonal)

        @jax.jit
        @jax.vmap
        def products(projection):
            feature_map = random_features.positive(projection, scale=1.0)
            return jnp.sum(feature_map(query) * feature_map(key))

        wanted = np.exp(np.sum(query * key))
        return np.square(np.float64(products(projections)) - wanted)

    few, more, most = (errors(m, False) for m in (8, 32, 128))
    assert 3 < np.mean(few) / np.mean(more) < 5.3
    assert 3 < np.mean(more) / np.mean(most) < 5.3
    assert np.max(z_scores(errors(8, True)[:, None], np.mean(few))) < -3


def test_many_features_give_softmax_attention():
    """Scaled by 1/√H, as it is."""
    query, key, value, _ = linear_by_hand.arrays()
    query, key = query / 2, key / 2
    feature_map = random_features.positive(
        random_features.gaussian(jax.random.key(0), 5_000, H)
    )
    run = jax.jit(functools.partial(linear.attention, feature_map=feature_map))
    wanted = attention.dot_product_attention(query, key, value)
    found = run(query, key, value)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.01


def test_what_does_not_fit_is_refused():
    for sizes in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="sizes must be at least 1"):
            random_features.gaussian(jax.random.key(0), *sizes)
    with pytest.raises(ValueError, match=r"projection must be \[M H\]"):
        random_features.positive(np.ones(3))
    for scale in (0.0, -1.0):
        with pytest.raises(ValueError, match="scale must be positive"):
            random_features.positive(np.ones((M, H)), scale=scale)
