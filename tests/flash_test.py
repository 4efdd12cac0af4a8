"""attention.flash: what is its own. Every feature runs in tests/contract_test.py."""

import collections
import functools
import os
import subprocess
import sys

import chex
import hypothesis
import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import attention
from attention import dot_product, flash, masks, positions
from tests import mask_rules, oracle, subjects

B, N, K, H, D = 2, 4, 2, 4, 3
NAMES = ("out", "dq", "dk", "dv")


def attend(*arrays, sizes=None, implementation=None, **options):
    """The public entry, in blocks of the given sizes."""
    rows = {"flash": functools.partial(flash.attention, sizes=sizes)}
    table = {**attention.IMPLEMENTATIONS, **rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dot_product, "IMPLEMENTATIONS", table)
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


SIZES = [(1, 1), (2, 3), (3, 2), (5, 7), (4, 16), (11, 4)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("T", "S"), [(5, 7), (11, 4)])
def test_blocks_of_any_size_give_the_loop(sizes, T, S):
    """Ragged ends, one query or key a block, blocks that are larger than the array."""
    *inputs, output_gradient = arrays(T, S)
    run = functools.partial(attend, sizes=sizes, is_causal=True)
    found = jax.jit(functools.partial(both, run))(inputs, output_gradient)
    shown = np.broadcast_to(np.tri(T, S, dtype=bool), (B, N, T, S))
    wanted = oracle.attention(*inputs, visible=shown, output_gradient=output_gradient)
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=2e-6, err_msg=name)


@st.composite
def expressions(draw, depth=2):
    kind = draw(st.sampled_from(["leaf", "&", "|", "~"])) if depth else "leaf"
    if kind == "leaf":
        make, _ = mask_rules.LEAVES[draw(mask_rules.LEAF_NAMES)]
        return make(draw(st.sampled_from([0, 1, -2])))
    left = draw(expressions(depth=depth - 1))
    if kind == "~":
        return ~left
    right = draw(expressions(depth=depth - 1))
    return left & right if kind == "&" else left | right


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(expressions(), st.sampled_from([(2, 2), (3, 4)]), st.integers(0, 99))
def test_random_masks_and_data_give_the_loop(mask, sizes, seed):
    """Outputs, and gradients by the values, with mask arrays by row and by head."""
    b, n, T, S = mask_rules.B, mask_rules.N, mask_rules.T, mask_rules.S
    shapes = (b, T, n, H), (b, S, n, H), (b, S, n, D), (b, T, n, D)
    *inputs, output_gradient = subjects.normal(seed, *shapes)
    run = functools.partial(attend, sizes=sizes, mask=mask)
    found = jax.jit(functools.partial(both, run))(inputs, output_gradient)
    shown = np.broadcast_to(
        mask.materialize(T, S, batch_size=b, num_heads=n), (b, n, T, S)
    )
    wanted = oracle.attention(*inputs, visible=shown, output_gradient=output_gradient)
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=3e-6, err_msg=name)


def visited(mask, T, S, sizes, batch=1):
    """How often each block is computed, counted while it runs."""
    counts = collections.Counter()

    def score_mod(score, q_index, kv_index, *, batch, head):
        def count(i, j):
            counts[int(i) // sizes[0], int(j) // sizes[1]] += 1

        jax.debug.callback(count, q_index[0, 0], kv_index[0, 0])
        return score

    x = np.ones((batch, T, 1, 2), np.float32), np.ones((batch, S, 1, 2), np.float32)
    out = attend(x[0], x[1], x[1], sizes=sizes, mask=mask, score_mod=score_mod)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return counts


IDS = np.repeat(np.arange(4), [7, 3, 10, 4])[None]
COUNTED = {
    "causal": masks.causal(),
    "window": masks.sliding_window(5),
    "prefix": masks.prefix(6),
    "chunked": masks.chunked(8),
    "segments": masks.segments(IDS) & masks.causal(),
    "lengths": masks.lengths(np.array([9]), np.array([5])),
    "longformer": masks.longformer(2, (0, 13), causal=True),
    "bigbird": masks.bigbird(4, 1, 1, 1, 0, causal=True),
    "not": ~masks.causal(),
    "or": masks.chunked(4) | masks.sliding_window(2),
}


@pytest.mark.parametrize("name", COUNTED)
def test_only_blocks_that_show_something_are_computed(name):
    """Every block with a visible pair, once, and no other one."""
    mask, sizes = COUNTED[name], (4, 4)
    shown = np.broadcast_to(mask.materialize(24, 24)[0, 0], (24, 24))
    some = shown.reshape(6, 4, 6, 4).any((1, 3))
    wanted = {(int(i), int(j)): 1 for i, j in zip(*np.nonzero(some), strict=True)}
    assert visited(mask, 24, 24, sizes) == wanted
    assert len(wanted) < 36


def test_rows_are_charged_for_their_own_length():
    """A batch of lengths costs what each row costs alone."""
    lengths = np.array([4, 20, 1], np.int32)
    mask = masks.lengths(lengths, lengths)
    counts = visited(mask, 24, 24, (4, 4), batch=3)
    blocks = [-(-int(n) // 4) for n in lengths]
    assert sum(counts.values()) == sum(n * n for n in blocks)


def jaxprs(jaxpr):
    """A jaxpr and all that it contains."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in jex.core.jaxprs_in_params(eqn.params):
            yield from jaxprs(inner)


LENGTH = 4096
ANY_LENGTH = {
    "none": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.sliding_window(100),
    "prefix": lambda: masks.prefix(300),
    "chunked": lambda: masks.chunked(200),
    "segments": lambda: masks.segments(np.arange(LENGTH) // 300) & masks.causal(),
    "lengths": lambda: masks.lengths(np.int32(3000)),
    "longformer": lambda: masks.longformer(100, (0, 7)),
    "bigbird": lambda: masks.bigbird(64, 3, 1, 2, 0),
    "where": lambda: masks.where(
        lambda q_index, kv_index, *, batch, head: (q_index + kv_index) % 2 == 0
    ),
}


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_no_intermediate_is_quadratic(name):
    """case B083: forward, backward and Hessian-vector product, sub-jaxprs included."""
    mask = ANY_LENGTH[name]()
    x = jax.ShapeDtypeStruct((1, LENGTH, 1, 16), jnp.float32)

    def loss(query, key, value):
        run = functools.partial(attention.dot_product_attention, mask=mask)
        out, lse = run(query, key, value, implementation="flash", return_residual=True)
        return jnp.sum(out**2) + jnp.sum(lse)

    gradient = jax.grad(loss, argnums=(0, 1, 2))

    def hessian_vector(*inputs):
        return jax.jvp(gradient, inputs, inputs)

    traced = jax.make_jaxpr(hessian_vector)(x, x, x)
    sizes = [
        var.aval.size
        for jaxpr in jaxprs(traced.jaxpr)
        for eqn in jaxpr.eqns
        for var in eqn.outvars
        if hasattr(var.aval, "size")
    ]
    block = max(flash.block_sizes(LENGTH, LENGTH, mask))
    assert len(sizes) > 100
    assert max(sizes) <= LENGTH * block // 2


def test_hessian_vector_products_are_those_of_the_reference():
    *inputs, _ = arrays(7, 7)
    slopes = np.float32([0.1, 0.2, 0.3, 0.4])

    def product(implementation):
        def loss(query, slopes):
            out, lse = attend(
                query,
                *inputs[1:],
                sizes=(3, 2),
                implementation=implementation,
                is_causal=True,
                softcap=2.0,
                sinks=slopes,
                score_mod=positions.alibi(slopes, np.arange(7), np.arange(7)),
                return_residual=True,
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

        def jvp(query, slopes):
            tangents = jnp.ones_like(query), jnp.cos(slopes)
            return jax.jvp(jax.grad(loss, argnums=(0, 1)), (query, slopes), tangents)

        return jax.jit(jvp)(inputs[0], slopes)

    chex.assert_trees_all_close(product("flash"), product("reference"), atol=2e-5)


def test_derivatives_that_have_no_rule_say_so():
    *inputs, _ = arrays(4, 4)
    run = functools.partial(attend, sizes=(2, 2), is_causal=True)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(run, tuple(inputs), tuple(inputs))

    def gradient(query):
        return jax.grad(lambda query: jnp.sum(run(query, *inputs[1:]) ** 2))(query)

    with pytest.raises(ValueError, match="[Rr]everse-mode"):
        jax.jit(jax.grad(lambda query: jnp.sum(gradient(query) ** 2)))(inputs[0])


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


@pytest.mark.parametrize("shape", [(1, N, 6, 6), (B, 1, 1, 6), (1, 1, 6, 1), (6, 6)])
def test_a_bias_has_a_gradient_of_its_own_shape(shape):
    """case B079: summed over what it is broadcast along; blocks are ragged."""
    *inputs, output_gradient = arrays(6, 6)
    (bias,) = subjects.normal(4, shape)

    def gradient(implementation):
        def loss(bias):
            out = attend(*inputs, bias, sizes=(4, 5), implementation=implementation)
            return jnp.sum(out * output_gradient)

        return jax.jit(jax.grad(loss))(bias)

    found = gradient("flash")
    assert found.shape == shape
    np.testing.assert_allclose(found, gradient("reference"), atol=1e-5)


@pytest.mark.parametrize("broadcast_dropout", [False, True])
def test_dropout_does_not_depend_on_blocks(broadcast_dropout):
    """The very weights that the reference drops, whatever the blocks."""
    query, key, _, _ = arrays(6, 6)
    eye = np.broadcast_to(np.eye(6, dtype=np.float32)[None, :, None], (B, 6, K, 6))
    kept = [
        np.asarray(
            attend(
                query,
                key,
                eye,
                sizes=sizes,
                implementation=implementation,
                dropout_rate=0.5,
                dropout_rng=jax.random.key(1),
                broadcast_dropout=broadcast_dropout,
            )
        )
        != 0
        for implementation, sizes in (
            ("reference", None),
            ("flash", (6, 6)),
            ("flash", (4, 5)),
            ("flash", (1, 2)),
        )
    ]
    assert 0.3 < kept[0].mean() < 0.7
    for other in kept[1:]:
        np.testing.assert_array_equal(other, kept[0])


def test_huge_scores_have_their_gradients():
    """m and l apart: two equal keys share the weight, at any size of the scores."""
    query, key = np.full((1, 1, 1, 1), 1e4, np.float32), np.full((1, 4, 1, 1), 1e4)
    value = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)

    def out(value):
        return attend(query, np.float32(key), value, sizes=(1, 2))[0, 0, 0, 0]

    np.testing.assert_allclose(jax.grad(out)(value).ravel(), 0.25)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_accelerators(platform):
    x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)

    @jax.jit
    def gradients(query, key, value):
        def loss(*inputs):
            out = attention.dot_product_attention(
                *inputs, is_causal=True, implementation="flash"
            )
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    exported = jax.export.export(gradients, platforms=[platform])(x, x, x)
    assert exported.platforms == (platform,)


def test_eager_calls_compile_once():
    """Also with masks of numbers, whose blocks stay known while tracing."""
    *inputs, _ = arrays(6, 6)

    def call():
        mask = masks.prefix(3) & masks.window(2, None, offset=1)
        return attend(*inputs, sizes=(2, 2), mask=mask)

    call()
    before = flash._compiled._cache_size()
    call()
    assert flash._compiled._cache_size() == before


DEVICES = """
import functools
import jax, jax.numpy as jnp, numpy as np
from attention import dot_product, flash

rows = {"flash": functools.partial(flash.attention, sizes=(4, 4))}
dot_product.IMPLEMENTATIONS = {**dot_product.IMPLEMENTATIONS, **rows}
axis_types = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2,), ("rows",), axis_types=axis_types)
arrays = np.random.default_rng(0).normal(size=(3, 2, 32, 2, 4)).astype(np.float32)
lengths = jnp.array([3, 30])

def loss(name, slopes, query, key, value, lengths):
    def score_mod(score, q_index, kv_index, *, batch, head):
        return score - slopes[head] * jnp.abs(q_index - kv_index).astype(score.dtype)
    out = dot_product.dot_product_attention(
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
