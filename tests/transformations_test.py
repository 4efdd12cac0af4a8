"""jax's transformations of dot-product attention, with all but dropout switched on.

jit, vmap, grad, jacobian, remat, scan, shard_map; strict dtypes, leak checks, and
programs that are traced once.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks
from tests import oracle, probes

B, T, S, N, K, H = 2, 3, 5, 4, 2, 4


def arguments(seed):
    """Every array that attention takes, all of them differentiable or traced."""
    names = ("query", "key", "value", "bias", "sinks", "slopes")
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (N, T, S), (N,), (N,))
    arrays = dict(zip(names, probes.random_arrays(seed, *shapes), strict=True))
    rng = np.random.default_rng(seed)
    visible = (np.arange(S) <= 1) | (rng.random((B, 1, T, S)) < 0.5)
    mask = masks.dense(visible) & masks.causal(offset=jnp.int32(1))
    return arrays, {
        "mask": mask,
        "lengths": jnp.asarray(rng.integers(2, S + 1, size=B), jnp.int32),
    }


def slopes_of(slopes):
    def score_mod(score, q_index, kv_index, *, batch, head):
        distance = jnp.abs(q_index - kv_index).astype(score.dtype)
        return score - slopes[head].astype(score.dtype) * distance

    return score_mod


def attend(arrays, others, *, implementation):
    """Everything that the implementation honours, at once."""
    extras = {}
    if implementation in probes.FULL:
        extras = {
            "score_mod": slopes_of(arrays["slopes"]),
            "softcap": 3.0,
            "sinks": arrays["sinks"],
        }
    return attention.dot_product_attention(
        *(arrays[name] for name in ("query", "key", "value", "bias")),
        mask=others["mask"],
        key_value_seq_lengths=others["lengths"],
        implementation=implementation,
        **extras,
    )


def both_of(implementation):
    """Outputs and gradients as one function, the subject of most tests."""

    def both(arrays, others):
        out, backward = jax.vjp(
            lambda arrays: attend(arrays, others, implementation=implementation),
            arrays,
        )
        return out, backward(jnp.cos(out))[0]

    return both


compiled = {name: jax.jit(both_of(name)) for name in probes.CPU}


def assert_close(found, wanted, atol=2e-6):
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    chex.assert_trees_all_close(found, wanted, atol=atol, rtol=1e-5)


@probes.on_cpu
def test_jit_equals_eager(implementation):
    """And itself, bit for bit; chex.fake_jit and disable_jit find nothing to jit."""
    inputs = arguments(0)
    wanted = compiled[implementation](*inputs)
    chex.assert_trees_all_equal(compiled[implementation](*inputs), wanted)
    with chex.fake_jit():
        assert_close(jax.jit(both_of(implementation))(*inputs), wanted)
    with jax.disable_jit():
        out = attend(*inputs, implementation=implementation)
    assert_close(out, wanted[0])
    gradients = wanted[1]
    for name, gradient in gradients.items():
        unused = implementation not in probes.FULL and name in ("sinks", "slopes")
        assert np.any(np.asarray(gradient) != 0) != unused


@probes.on_cpu
def test_vmap_equals_a_loop(implementation):
    """case B078: of two axes; outputs and gradients, masks and lengths included."""
    seeds = (0, 1)
    inputs = jax.tree.map(lambda *x: jnp.stack(x)[:, None], *map(arguments, seeds))
    twice = jax.jit(jax.vmap(jax.vmap(both_of(implementation))))(*inputs)
    for i, seed in enumerate(seeds):
        wanted = compiled[implementation](*arguments(seed))
        assert_close(jax.tree.map(lambda x, i=i: x[i, 0], twice), wanted)


@probes.on_cpu
def test_vmap_shares_what_is_not_mapped(implementation):
    """case B078: in_axes (0, 0, 0, None) with a mask [1 1 T S]."""
    inputs = probes.random_arrays(2, (2, B, T, N, H), (2, B, S, K, H), (2, B, S, K, H))
    mask = np.tri(T, S, 1, dtype=bool)[None, None]

    def attend(query, key, value, mask):
        return attention.dot_product_attention(
            query, key, value, mask=mask, implementation=implementation
        )

    mapped = jax.jit(jax.vmap(attend, in_axes=(0, 0, 0, None)))(*inputs, mask)
    gradients = jax.jit(
        jax.vmap(
            jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), argnums=(0, 1, 2)),
            in_axes=(0, 0, 0, None),
        )
    )(*inputs, mask)
    for i in range(2):
        row = [x[i] for x in inputs]
        wanted = oracle.attention(
            *row,
            visible=np.broadcast_to(mask, (B, N, T, S)),
            output_gradient=2 * mapped[i],
        )
        np.testing.assert_allclose(mapped[i], wanted["out"], atol=2e-6)
        for gradient, name in zip(gradients, ("dq", "dk", "dv"), strict=True):
            np.testing.assert_allclose(gradient[i], wanted[name], atol=1e-5)


@probes.on_cpu
def test_jacobian(implementation):
    """case B078: equal to a loop of gradients."""
    arrays, others = arguments(3)

    def one_row(query):
        out = attend(arrays | {"query": query}, others, implementation=implementation)
        return out[1, :, 3]

    jacobian = jax.jit(jax.jacrev(one_row))(arrays["query"])
    assert jacobian.shape == (T, H, B, T, N, H)
    one = jax.jit(jax.grad(lambda query, i, d: one_row(query)[i, d]))
    for i, d in np.ndindex(T, H):
        assert_close(one(arrays["query"], i, d), jacobian[i, d])
    # Query i, head 3 of row 1 alone reaches its output.
    itself = jacobian[np.arange(T), :, 1, np.arange(T), 3]
    assert np.sum(itself**2) > 0
    np.testing.assert_allclose(np.sum(itself**2), np.sum(jacobian**2), rtol=1e-6)


@probes.on_cpu
def test_second_derivatives(implementation):
    """Forward over reverse mode equals reverse over forward."""
    (arrays, others), (tangents, _) = arguments(4), arguments(5)

    def loss(arrays, others):
        return jnp.sum(attend(arrays, others, implementation=implementation) ** 2)

    @jax.jit
    def products(arrays, tangents):
        gradient = functools.partial(jax.grad(loss), others=others)
        _, forward = jax.jvp(gradient, (arrays,), (tangents,))

        def slope(arrays):
            return jax.jvp(lambda x: loss(x, others), (arrays,), (tangents,))[1]

        return forward, jax.grad(slope)(arrays)

    assert_close(*products(arrays, tangents), atol=1e-4)


@probes.on_cpu
def test_remat(implementation):
    inputs = arguments(0)

    @jax.jit
    def both(arrays, others):
        f = functools.partial(attend, others=others, implementation=implementation)
        out, backward = jax.vjp(jax.checkpoint(f), arrays)
        return out, backward(jnp.cos(out))[0]

    assert_close(both(*inputs), compiled[implementation](*inputs))


@probes.on_cpu
def test_scan_over_steps(implementation):
    """Decoding: query i with the traced offset i is row i of the full answer."""
    query, key, value = probes.random_arrays(6, (B, S, N, H), *[(B, S, K, H)] * 2)

    @jax.jit
    def step_by_step(query, key, value):
        def step(offset, query):
            out = attention.dot_product_attention(
                query[:, None],
                key,
                value,
                mask=masks.sliding_window(3, offset=offset),
                implementation=implementation,
            )
            return offset + 1, out[:, 0]

        _, outs = jax.lax.scan(step, jnp.int32(0), jnp.moveaxis(query, 1, 0))
        return jnp.moveaxis(outs, 0, 1)

    full = probes.attend(
        query,
        key,
        value,
        local_window_size=(2, 0),
        implementation=implementation,
    )
    assert_close(step_by_step(query, key, value), full)


@probes.on_cpu
def test_shard_map_over_the_batch(implementation):
    arrays, others = arguments(0)
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=axis_types)
    by_row, shared = jax.P("batch"), jax.P()
    array_specs = {
        name: by_row if name in ("query", "key", "value") else shared for name in arrays
    }
    other_specs = {
        "mask": jax.tree.map(lambda x: by_row if x.ndim else shared, others["mask"]),
        "lengths": by_row,
    }
    sharded = jax.shard_map(
        both_of(implementation),
        mesh=mesh,
        in_specs=(array_specs, other_specs),
        out_specs=(by_row, array_specs),
    )
    assert_close(
        jax.jit(sharded)(arrays, others), compiled[implementation](arrays, others)
    )


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [(name, "float32") for name in probes.CPU]
    # jax.nn itself asks what float32 and bfloat16 promote to.
    + [(name, dtype) for name in probes.FULL for dtype in ("bfloat16", "float16")],
)
def test_strict_promotion_and_no_leaked_tracers(implementation, dtype):
    """No implicit cast anywhere; the outputs' dtype is that of the inputs."""
    arrays, others = arguments(0)
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    with jax.numpy_dtype_promotion("strict"), jax.checking_leaks():
        out, gradients = jax.eval_shape(both_of(implementation), arrays, others)
    assert out.dtype == dtype
    assert all(gradient.dtype == dtype for gradient in gradients.values())


@probes.on_cpu
def test_equal_masks_trace_once(implementation):
    """New lengths, offsets and arrays too; another structure once more."""
    chex.clear_trace_counter()

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=2)
    def attend(x, mask):
        return attention.dot_product_attention(
            x, x, x, mask=mask, implementation=implementation
        )

    (x,) = probes.random_arrays(7, (1, S, 2, 4))
    for size in range(1, 5):
        length = jnp.array([size])
        attend(
            x, masks.sliding_window(3, offset=jnp.int32(size)) & masks.lengths(length)
        )
    attend(x, masks.causal())
    attend(x, masks.causal())
    with pytest.raises(AssertionError, match="traced"):
        attend(x, masks.chunked(2))
