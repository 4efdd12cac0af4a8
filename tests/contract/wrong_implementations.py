"""Implementations that the contract suite must find out, each wrong in one way."""

import dataclasses

import jax.numpy as jnp

from attention.dot_product import reference


def ignores_the_mask(query, key, value, options):
    options = dataclasses.replace(
        options,
        mask=None,
        is_causal=False,
        local_window_size=None,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
    )
    return reference.attention(query, key, value, options)


def scales_twice(query, key, value, options):
    options = dataclasses.replace(options, scale=options.scale**2)
    return reference.attention(query, key, value, options)


def reads_head_n_mod_k(query, key, value, options):
    """All groups of query heads in another order, and back."""
    batch, length, heads, width = query.shape
    groups = heads // key.shape[2]

    def turned(x, first, second):
        by_group = x.reshape(*x.shape[:2], first, second, x.shape[-1])
        return jnp.swapaxes(by_group, 2, 3).reshape(x.shape)

    query = turned(query, groups, heads // groups)
    out, residual = reference.attention(query, key, value, options)
    return turned(out, heads // groups, groups), residual


def sees_the_last_token(query, key, value, options):
    out, residual = reference.attention(query, key, value, options)
    return out.at[:, 0].add(1e-6 * value[:, -1:, 0]), residual


def mixes_rows(query, key, value, options):
    out, residual = reference.attention(query, key, value, options)
    return out + 1e-6 * jnp.roll(out, 1, axis=0), residual


def rounds_its_scores(query, key, value, options):
    query = query.astype(jnp.bfloat16).astype(query.dtype)
    return reference.attention(query, key, value, options)


def casts_in_silence(query, key, value, options):
    return reference.attention(query * jnp.ones(1)[0], key, value, options)


WRONG = {
    "ignores the mask": ignores_the_mask,
    "scales twice": scales_twice,
    "reads head n % K": reads_head_n_mod_k,
    "sees the last token": sees_the_last_token,
    "mixes rows": mixes_rows,
    "rounds its scores": rounds_its_scores,
    "casts in silence": casts_in_silence,
}
