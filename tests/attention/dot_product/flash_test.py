"""dot_product.flash: which blocks are computed, in what memory, in which program."""

import collections
import functools

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks
from attention.dot_product import flash
from tests.support import in_blocks

B, K = in_blocks.B, in_blocks.K
attend, arrays = in_blocks.attend, in_blocks.arrays


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


@pytest.mark.parametrize(
    "mask",
    [
        masks.dense(np.ones((B + 1, 1, 1, 5), bool), offset=np.int32(1)),
        masks.dense(np.ones((1, K, 5, 5), bool), offset=np.int32(1)),
        masks.dense(np.ones((3, 4), bool)),
        masks.where(lambda i, j, *, batch, head: np.ones((B + 1, 1, 5, 5), bool)),
        masks.segments(np.zeros((B + 1, 5), int)),
    ],
    ids=["rows", "heads", "lengths", "predicate", "segments"],
)
def test_masks_that_do_not_fit_are_refused(mask):
    """With the words of the dense form."""
    *inputs, _ = arrays(5, 5)
    for implementation in ("reference", "flash"):
        with pytest.raises(ValueError, match="mask must"):
            attend(*inputs, sizes=(3, 2), mask=mask, implementation=implementation)


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
