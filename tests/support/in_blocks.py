"""Attention in blocks of a given size, for its tests."""

import functools

import jax
import jax.numpy as jnp
import pytest

import attention
from attention.dot_product import api, flash
from tests.contract import subjects

B, N, K, H, D = 2, 4, 2, 4, 3

NAMES = ("out", "dq", "dk", "dv")


def attend(*arrays, sizes=None, implementation=None, **options):
    """The public entry, in blocks of the given sizes."""
    rows = {"flash": functools.partial(flash.attention, sizes=sizes)}
    table = {**attention.IMPLEMENTATIONS, **rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "IMPLEMENTATIONS", table)
        return attention.dot_product_attention(
            *arrays, implementation=implementation or "flash", **options
        )


def arrays(T, S, seed=0):
    """Query, key, value and dL/do."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D), (B, T, N, D)
    return subjects.normal(seed, *shapes)


def both(attend, inputs, output_gradient):
    """Outputs and gradients, by name."""
    out, backward = jax.vjp(attend, *inputs)
    found = (out, *backward(jnp.asarray(output_gradient)))
    return dict(zip(NAMES, found, strict=True))
