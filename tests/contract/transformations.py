"""Properties under jax's transformations: jit, vmap, grad, remat, scan, shard_map."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import masks
from tests.contract import budget, subjects, values

answers, inputs = values.answers, values.inputs
both_of = values.both_of


def assert_close(found, wanted, atol=2e-6):
    """Within rounding of the largest number of each array, and of one dtype."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        largest = np.max(np.abs(np.asarray(y)), initial=1.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=atol * largest)


def eager(subject):
    """jit = eager."""
    assert_close(subject.apply(*inputs(subject)), answers(subject)[0])


def fake_jit(subject):
    """Nothing needs to be compiled, in jax's own functions either."""
    wanted = answers(subject)
    fn = both_of(subject)
    if subject.kind == "module" or "flash" in subject.name:
        # Operation by operation, gradients cost most of the suite's time.
        fn, wanted = subject.apply, wanted[0]
    with chex.fake_jit():
        found = jax.jit(fn)(*inputs(subject))
    assert_close(found, wanted)


def stacked(subject):
    """Two sets of inputs, stacked, and the answers of each."""
    parameters, _, given = inputs(subject)
    x = np.stack([inputs(subject, seed=seed)[1] for seed in (0, 1)])
    return parameters, x, given, [answers(subject, seed=seed) for seed in (0, 1)]


def vmap(subject):
    """case B078: twice, over x and lengths; parameters and a mask [1 1 T S] shared."""
    parameters, x, given, _ = stacked(subject)
    mask = masks.dense(np.tri(x.shape[2], k=1, dtype=bool)[None, None])
    lengths = np.stack([given.lengths, given.lengths[::-1]])

    def apply(x, lengths):
        given = subjects.Given(lengths=lengths, mask=mask)
        return subject.apply(parameters, x, given)

    twice = jax.vmap(jax.vmap(apply, in_axes=(0, None)), in_axes=(None, 0))
    found, one = jax.jit(twice)(x, lengths), jax.jit(apply)
    for i, j in np.ndindex(2, 2):
        assert_close(found[i, j], one(x[j], lengths[i]))


def vmap_of_grad(subject):
    """case B078: gradients by everything, of two inputs at once."""
    parameters, x, given, each = stacked(subject)
    found = jax.jit(jax.vmap(both_of(subject), in_axes=(None, 0, None)))(
        parameters, x, given
    )
    for i in range(2):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], found), each[i])


def jacobian(subject):
    """case B078: reverse mode in bulk equals one gradient after another."""
    parameters, x, given = inputs(subject)

    def row(x):
        return subject.apply(parameters, x, given)[2, 1, :3]

    found = jax.jit(jax.jacrev(row))(x)
    one = jax.jit(jax.grad(lambda x, i: row(x)[i]))
    for i in range(3):
        assert_close(one(x, i), found[i])
    # No other row reaches this one.
    assert not np.any(np.delete(found, 2, axis=1))
    assert np.any(np.asarray(found) != 0)


def second_derivatives(subject):
    """Forward over reverse mode: symmetric, and the slope of the gradient."""
    parameters, x, given = inputs(subject)

    @jax.jit
    def gradient_and_slope(x, direction):
        def loss(x):
            return jnp.sum(subject.apply(parameters, x, given) ** 2)

        return jax.jvp(jax.grad(loss), (x,), (direction,))

    first, second = subjects.normal(5, x.shape, x.shape)
    (_, by_first), (_, by_second) = (
        gradient_and_slope(x, direction) for direction in (first, second)
    )
    np.testing.assert_allclose(
        np.sum(by_first * second), np.sum(first * by_second), rtol=1e-3
    )
    step = np.float32(1e-2)
    upper, lower = (gradient_and_slope(x + c * first, first)[0] for c in (step, -step))
    assert_close((upper - lower) / (2 * step), by_first, atol=1e-2)


def remat(subject):
    """jax.checkpoint changes neither values nor gradients."""

    @jax.jit
    def both(parameters, x, given):
        fn = jax.checkpoint(functools.partial(subject.apply, given=given))
        out, backward = jax.vjp(fn, parameters, x)
        return out, backward(jnp.cos(out))

    assert_close(both(*inputs(subject)), answers(subject))


def scan(subject):
    """A loop of two steps, with its gradients by parameters and inputs."""
    parameters, x, given, each = stacked(subject)

    @jax.jit
    def both(parameters, x, given):
        def total(parameters, x):
            def step(total, x):
                out = subject.apply(parameters, x, given)
                return total + jnp.sum(jnp.sin(out)), out

            return jax.lax.scan(step, jnp.zeros((), x.dtype), x)

        (_, outs), backward = jax.vjp(total, parameters, x)
        return outs, backward((jnp.ones((), x.dtype), jnp.zeros_like(outs)))

    outs, (by_parameters, by_x) = both(parameters, x, given)
    for i, (out, (_, gradient)) in enumerate(each):
        assert_close(outs[i], out)
        assert_close(by_x[i], gradient)
    sums = jax.tree.map(lambda a, b: a + b, *(gradient[0] for _, gradient in each))
    assert_close(by_parameters, sums)


def shard_map(subject):
    """Rows on a mesh; the parameters are everywhere, and their gradients summed."""
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=axis_types)
    rows, everywhere = jax.P("batch"), jax.P()
    sharded = jax.shard_map(
        both_of(subject),
        mesh=mesh,
        in_specs=(everywhere, rows, rows),
        out_specs=(rows, (everywhere, rows)),
    )
    assert_close(jax.jit(sharded)(*inputs(subject)), answers(subject))


def same_dtype(subject):
    """dtype in = dtype out, for outputs and gradients."""
    for dtype in ("float32", "bfloat16"):
        parameters, x, given = inputs(subject, dtype=dtype)
        out, gradients = jax.eval_shape(both_of(subject), parameters, x, given)
        assert out.dtype == dtype, f"{dtype} in, {out.dtype} out"
        chex.assert_trees_all_equal_dtypes(gradients, (parameters, x))


def strict_promotion(subject):
    """No implicit cast anywhere."""
    for dtype in ("float32", "bfloat16"):
        with jax.numpy_dtype_promotion("strict"):
            jax.eval_shape(both_of(subject), *inputs(subject, dtype=dtype))


def decoding(subject):
    """One query a step, at a traced offset, is a row of the full answer."""
    query, key, value, _ = budget.arrays("float32")

    @jax.jit
    def step_by_step(query, key, value):
        def step(offset, query):
            mask = masks.sliding_window(3, offset=offset)
            out = subject.attend(query[:, None], key, value, mask=mask)
            return offset + 1, out[:, 0]

        _, outs = jax.lax.scan(step, jnp.int32(0), jnp.moveaxis(query, 1, 0))
        return jnp.moveaxis(outs, 0, 1)

    full = jax.jit(functools.partial(subject.attend, local_window_size=(2, 0)))
    assert_close(step_by_step(query, key, value), full(query, key, value))


def no_leaked_tracers(subject):
    """Nothing keeps a tracer, under jit, grad and vmap."""
    with jax.checking_leaks():
        jax.jit(jax.vmap(both_of(subject), axis_size=2, in_axes=None)).lower(
            *inputs(subject)
        )


def one_trace(subject):
    """Equal masks trace once, whatever their arrays; another structure once more."""
    parameters, x, _ = inputs(subject)
    chex.clear_trace_counter()

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=2)
    def apply(x, mask):
        return subject.apply(parameters, x, subjects.Given(mask=mask))

    for size in (1, 2):
        length = jnp.full(len(x), size)
        apply(x, masks.window(3, 1, offset=jnp.int32(size)) & masks.lengths(length))
    for _ in range(2):
        apply(x, masks.chunked(2))
    with pytest.raises(AssertionError, match="traced"):
        apply(x, masks.chunked(3))
