"""report.operations: floating-point operations, counted by hand for a few functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import attention
from attention import masks
from attention.dot_product import flash
from train.report import operations

A, B = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)


def looped(x):
    return lax.scan(lambda c, y: (c + jnp.sum(y * y), y), 0.0, x)


def until(x):
    return lax.while_loop(lambda c: c[0] < 6, lambda c: (c[0] + 2, c[1] * x), (0, x))


def nested(x):
    def row(i):
        return lax.fori_loop(0, i, lambda _, c: c * x, x)

    return lax.map(row, jnp.arange(4))


@pytest.mark.parametrize(
    ("fn", "args", "wanted"),
    [
        (jnp.matmul, (A, B), 2 * 3 * 4 * 5),
        (jax.jit(jnp.matmul), (A, B), 2 * 3 * 4 * 5),
        (jnp.matmul, (np.ones((2, 3, 4)), np.ones((2, 4, 5))), 2 * 2 * 3 * 4 * 5),
        (lambda x: jnp.exp(x) + x.T.T, (A,), 2 * 12),
        (lambda x: jnp.sum(x, axis=0), (A,), 12),
        (lambda x: x + 1, (np.ones(7, np.int32),), 0),
        (looped, (A,), 3 * (4 + 4 + 1)),
        (until, (A,), 3 * 12),
        (nested, (A,), (0 + 1 + 2 + 3) * 12),
    ],
)
def test_counts(fn, args, wanted):
    assert operations.count(fn, *args) == wanted


def test_a_convolution():
    """Width 3, 6 features in, 2 out."""
    x, w = np.ones((1, 8, 6), np.float32), np.ones((3, 6, 2), np.float32)

    def convolve(x, w):
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers)

    assert operations.count(convolve, x, w) == 2 * (8 * 2) * (3 * 6)


def test_gradients_count_what_they_run():
    """Of a product by both factors: two more products."""

    def loss(a, b):
        return jnp.sum(jnp.matmul(a, b))

    counted = operations.count(jax.grad(loss, (0, 1)), A, B)
    assert counted >= 2 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("size", [8, 16])
def test_blocks_that_attention_skips_cost_nothing(size, monkeypatch):
    """A causal window: the products grow with the blocks that are visited."""
    monkeypatch.setattr(flash, "block_sizes", lambda *_: (4, 4))
    x = np.ones((1, size, 1, 2), np.float32)

    def attend(x):
        mask = masks.sliding_window(4)
        return attention.dot_product_attention(
            x, x, x, mask=mask, implementation="flash"
        )

    visited = size // 4 + size // 4 - 1
    one = operations.count(attend, x) / visited
    assert one == pytest.approx(2 * 2 * 4 * 4 * 2 + 100, rel=0.6)
