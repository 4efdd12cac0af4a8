"""Callables of a stranger, for the tests of `train.callables.adapter` and its rooms."""

import jax
import jax.numpy as jnp
import numpy as np

from train.callables import adapter

T, V, E = 6, 11, 4
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(V, size=(2, T)).astype(np.int32)
VECTORS = np.random.default_rng(2).normal(size=(2, T, E)).astype(np.float32)


def adapt(fn, *, vectors=False, length=T):
    return adapter.adapt(
        fn,
        name="tests:fn",
        length=length,
        vocab_size=None if vectors else V,
        width=E if vectors else None,
        seed=0,
        token_edit_budget=100,
    )


def in_numpy(tokens):
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.int32
    return np.cumsum(TABLE[tokens], axis=1)


def in_jax(tokens):
    assert isinstance(tokens, jax.Array) and tokens.dtype == jnp.int32
    return jnp.cumsum(jnp.asarray(TABLE)[tokens], axis=1)


def in_jax_eagerly(tokens):
    logits = in_jax(tokens)
    return logits if logits.max() < 1e9 else -logits


def torch_function(torch):
    def fn(tokens):
        assert tokens.dtype == torch.int64
        return torch.tensor(TABLE)[tokens].cumsum(1)

    return fn
