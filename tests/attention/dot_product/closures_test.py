"""dot_product.closures: what functions of the caller close over, in blocks."""

import functools
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np

from attention import masks
from tests.contract import subjects
from tests.support import in_blocks

B, N = in_blocks.B, in_blocks.N
attend, arrays, both = in_blocks.attend, in_blocks.arrays, in_blocks.both


def test_gradients_reach_what_a_score_mod_closes_over():
    """ALiBi slopes and a T5 table, given as arguments of the jitted function."""
    *inputs, output_gradient = arrays(9, 9)
    slopes, table = subjects.normal(3, (N,), (8, N))

    def loss(implementation, slopes, table):
        def score_mod(score, q_index, kv_index, *, batch, head):
            bucket = jnp.clip(q_index - kv_index, 0, 7)
            distance = (q_index - kv_index).astype(score.dtype)
            return score - slopes[head] * distance + table[bucket, head]

        out = attend(
            *inputs,
            sizes=(4, 2),
            implementation=implementation,
            is_causal=True,
            score_mod=score_mod,
        )
        return jnp.sum(out * output_gradient)

    found, wanted = (
        jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1)))(slopes, table)
        for name in ("flash", "reference")
    )
    assert np.all(np.asarray(wanted[1])[:8] != 0)
    chex.assert_trees_all_close(found, wanted, atol=1e-5)


def test_gradients_reach_complex_numbers():
    """As those of the dense form."""
    *inputs, _ = arrays(5, 5)

    def total(phase, implementation):
        def score_mod(score, q_index, kv_index, *, batch, head):
            return score * jnp.real(phase * (1 + 1j * (q_index - kv_index)))

        run = functools.partial(attend, *inputs, sizes=(3, 2))
        return jnp.sum(run(score_mod=score_mod, implementation=implementation) ** 2)

    found, wanted = (
        jax.grad(total)(jnp.complex64(0.3 + 0.2j), name)
        for name in ("flash", "reference")
    )
    assert abs(wanted) > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_score_mods_are_told_of_no_padding():
    """Tables that end with the sequence: beyond them jnp.take gives NaN."""
    *inputs, output_gradient = arrays(5, 7)
    rows, columns = np.ones(5, np.float32), np.ones(7, np.float32)

    def score_mod(score, q_index, kv_index, *, batch, head):
        added = jnp.take(rows, q_index) * jnp.sqrt(6.0 - kv_index.astype(score.dtype))
        return score * jnp.take(columns, kv_index) + added

    found, wanted = (
        both(
            functools.partial(
                attend, sizes=(3, 4), implementation=name, score_mod=score_mod
            ),
            inputs,
            output_gradient,
        )
        for name in ("flash", "reference")
    )
    chex.assert_tree_all_finite(found)
    chex.assert_trees_all_close(found, wanted, atol=1e-5)


def test_a_score_mod_that_changes_is_asked_again():
    """Eagerly, too: equal functions may close over other numbers."""
    *inputs, _ = arrays(6, 6)

    class Module:
        temperature = np.float32(1)

        def score_mod(self, score, q_index, kv_index, *, batch, head):
            return score * self.temperature

    module = Module()
    before = attend(*inputs, sizes=(3, 2), score_mod=module.score_mod)
    module.temperature = np.float32(9)
    after = attend(*inputs, sizes=(3, 2), score_mod=module.score_mod)
    assert np.max(np.abs(before - after)) > 0.1


def test_odd_scales_dtypes_and_widths():
    """An int as scale, a score_mod in bfloat16 or of one row, values of no width."""
    query, key, value, _ = arrays(5, 5)

    def narrow(score, q_index, kv_index, *, batch, head):
        return score.astype(jnp.bfloat16)

    def one_row(score, q_index, kv_index, *, batch, head):
        return kv_index.astype(score.dtype)

    for score_mod in (narrow, one_row):

        @jax.jit
        def gradient(query, score_mod=score_mod):
            def total(query):
                run = functools.partial(attend, query, key, value, sizes=(3, 2))
                return jnp.sum(run(scale=1, score_mod=score_mod))

            return jax.grad(total)(query)

        assert np.all(np.isfinite(gradient(query)))
    assert attend(query, key, value[..., :0]).shape == (B, 5, N, 0)


def test_what_a_function_closes_over_is_not_kept():
    """Neither a score_mod's arrays nor a mask's, where all else is known."""
    *inputs, _ = arrays(6, 6)

    def biased(slopes):
        def score_mod(score, q_index, kv_index, *, batch, head):
            return score - slopes[head] * (q_index - kv_index).astype(score.dtype)

        return attend(*inputs, sizes=(3, 2), score_mod=score_mod)

    def masked(last):
        mask = masks.where(lambda i, j, *, batch, head: j <= last)
        return attend(*inputs, sizes=(3, 2), mask=mask)

    with jax.checking_leaks():
        for f, x in ((biased, np.ones(N, np.float32)), (masked, np.int32(2))):
            jax.jit(f)(x)
            jax.vmap(f)(np.stack([x, x]))


DEVICES = """
import functools
import jax, jax.numpy as jnp, numpy as np
from attention.dot_product import api, flash

rows = {"flash": functools.partial(flash.attention, sizes=(4, 4))}
api.IMPLEMENTATIONS = {**api.IMPLEMENTATIONS, **rows}
axis_types = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2,), ("rows",), axis_types=axis_types)
arrays = np.random.default_rng(0).normal(size=(3, 2, 32, 2, 4)).astype(np.float32)
lengths = jnp.array([3, 30])

def loss(name, slopes, query, key, value, lengths):
    def score_mod(score, q_index, kv_index, *, batch, head):
        return score - slopes[head] * jnp.abs(q_index - kv_index).astype(score.dtype)
    out = api.dot_product_attention(
        query, key, value, implementation=name, score_mod=score_mod,
        key_value_seq_lengths=lengths, query_seq_lengths=lengths)
    return jnp.sum(jnp.sin(out))

def gradient(slopes, *rest):
    return jax.grad(lambda x: jax.lax.psum(loss("flash", x, *rest), "rows"))(slopes)

slopes = jnp.array([0.1, 0.2])
specs = (jax.P(), *(jax.P("rows"),) * 4)
sharded = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=jax.P())
found = jax.jit(sharded)(slopes, *arrays, lengths)
wanted = jax.grad(loss, argnums=1)("reference", slopes, *arrays, lengths)
np.testing.assert_allclose(found, wanted, rtol=1e-4)
"""


def test_devices_whose_rows_differ_in_length_keep_step():
    """Slopes that all devices share: their gradient is summed, and nobody waits."""
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags}
    subprocess.run(
        [sys.executable, "-c", DEVICES], env=environment, check=True, timeout=120
    )
