"""What the tests of recurrences share: judging a function by a plain loop.

A loop is NumPy in the dtype of its inputs, so that a complex step gives its derivative
to the last digit: f(x + iε) = f(x) + iε f'(x), with no difference of near numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attention import properties

STEP = 1e-30


def normal(seed, *shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def assert_close(found, wanted, tolerance, name=""):
    """Within `tolerance` of the largest value, or of 0.1 if all are smaller."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=tolerance * max(largest, 0.1), err_msg=name
    )


def assert_is_loop(f, loop, inputs, tolerance):
    """Outputs, and gradients by every input of a random sum of the outputs.

    Both return a list of arrays.
    """
    wide = [np.float64(x) for x in inputs]
    wanted = loop(*wide)
    weights = normal(99, *(x.shape for x in wanted), dtype=np.float64)
    weights = [w.astype(inputs[0].dtype) for w in weights]

    def both(*inputs):
        def loss(*inputs):
            outputs = f(*inputs)
            pairs = zip(outputs, weights, strict=True)
            return sum(jnp.sum(x * w) for x, w in pairs), outputs

        every = tuple(range(len(inputs)))
        return jax.grad(loss, argnums=every, has_aux=True)(*inputs)

    gradients, outputs = jax.jit(both)(*inputs)
    for i, (x, w) in enumerate(zip(outputs, wanted, strict=True)):
        assert_close(x, w, tolerance, f"output {i}")
    for i, x in enumerate(gradients):
        slopes = loop_gradient(loop, wide, i, weights)
        assert_close(x, slopes, tolerance, f"gradient {i}")


def loop_gradient(loop, inputs, which, weights):
    gradient = np.zeros(inputs[which].shape)
    for at in np.ndindex(gradient.shape):
        moved = [x.astype(np.complex128) for x in inputs]
        moved[which][at] += 1j * STEP
        outputs = loop(*moved)
        pairs = zip(outputs, weights, strict=True)
        gradient[at] = sum(np.sum(x.imag * w) for x, w in pairs) / STEP
    return gradient


def assert_streams(f, inputs, splits, tolerance=1e-5):
    """f(all) = f(the first), then f(the rest, its state), for tokens on axis 1."""
    state, whole = f(inputs, None)
    for split in splits:
        between, first = f([x[:, :split] for x in inputs], None)
        last, second = f([x[:, split:] for x in inputs], between)
        found = np.concatenate([first, second], axis=1)
        assert_close(found, whole, tolerance, f"split {split}")
        for x, wanted in zip(
            jax.tree.leaves(last), jax.tree.leaves(state), strict=True
        ):
            assert_close(x, wanted, tolerance, f"state after split {split}")


MASKS = {
    "left": ([0, 0, 1, 1, 1], [1, 1, 1, 1, 1]),
    "right": ([1, 1, 1, 0, 0], [0, 0, 0, 0, 0]),
    "holes": ([1, 0, 1, 1, 0], [0, 1, 0, 1, 1]),
}


def assert_ignores_padding(f, inputs, mask, tolerance=1e-6):
    """NaN at padding reaches no output, state or gradient; the rest is as without it.

    Args:
      f: `f(inputs, mask) -> (state, outputs [B T ...])`.
      inputs: arrays [B T ...].
      mask: bool [B T].
    """
    mask = np.asarray(mask, bool)
    holed = [
        np.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, np.nan).astype(
            x.dtype
        )
        for x in inputs
    ]

    def loss(inputs):
        state, outputs = f(inputs, mask)
        used = jnp.where(
            mask.reshape(*mask.shape, *[1] * (outputs.ndim - 2)), outputs, 0
        )
        tail = sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0)) for x in leaves(state))
        return jnp.sum(jnp.sin(used)) + tail, (state, outputs)

    gradients, (state, outputs) = jax.jit(jax.grad(loss, has_aux=True))(holed)
    assert not np.asarray(outputs)[~mask].any()
    for x in gradients:
        assert np.isfinite(x).all()
        assert not np.asarray(x)[~mask].any()
    for row in range(len(mask)):
        kept = mask[row]
        if kept.any():
            alone, wanted = f([x[row : row + 1, kept] for x in inputs], None)
            assert_close(outputs[row, kept], wanted[0], tolerance)
            for x, w in zip(leaves(state), leaves(alone), strict=True):
                assert_close(x[row], w[0], tolerance)


leaves = jax.tree.leaves


def variables(module, x, seed=0):
    """Parameters that are all of them random, so that none is without effect."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    rng = np.random.default_rng(seed)

    def draw(shape):
        return jnp.float32(0.4 * rng.normal(size=shape.shape))

    return {"params": jax.tree.map(draw, shapes)}


def decoding(module, given):
    """`f(inputs, cache, mask=None) -> (cache, outputs)` of a module that decodes."""

    @jax.jit
    def run(inputs, cache, mask=None):
        state = given if cache is None else {**given, "cache": cache}
        outputs, new = module.clone(decode=True).apply(
            state, *inputs, token_mask=mask, mutable=["cache"]
        )
        if mask is not None:
            # What stands at padding means nothing.
            real = mask.reshape(*mask.shape, *[1] * (outputs.ndim - 2))
            outputs = jnp.where(real, outputs, 0)
        return new["cache"], outputs

    return run


def assert_is_a_mixer(module, x):
    """Decoding is one pass, continued or not; padding is no token; nothing leaks."""
    given = variables(module, x)
    run = decoding(module, given)
    whole = jax.jit(module.apply)(given, x)
    assert whole.shape == x.shape and whole.dtype == x.dtype
    assert_close(run([x], None)[1], whole, 1e-6)
    assert_streams(run, [x], [1, 3])
    for mask in MASKS.values():
        assert_ignores_padding(
            lambda inputs, mask: run(inputs, None, mask), [x], mask, tolerance=1e-5
        )
    initial = module.clone(decode=True).init(jax.random.key(0), x)["cache"]
    cache, outputs = run([x], initial)
    assert_close(outputs, whole, 1e-6)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, initial)
    properties.assert_causal(jax.jit(lambda x: module.apply(given, x)), x)
    trained = jax.jit(jax.grad(lambda p: jnp.sum(module.apply(p, x) ** 2)))(given)
    for path, gradient in jax.tree.leaves_with_path(trained):
        assert np.asarray(gradient).any(), jax.tree_util.keystr(path)


def assert_float64_stays(module, x):
    """In outputs, and in the state with which decoding goes on."""
    given = jax.tree.map(jnp.float64, variables(module, x))
    x = np.float64(x)
    run = decoding(module, given)
    whole = module.apply(given, x)
    assert whole.dtype == jnp.float64
    initial = module.clone(decode=True).init(jax.random.key(0), x)["cache"]
    cache, first = run([x[:, :2]], initial)
    _, second = run([x[:, 2:]], cache)
    assert {c.dtype for c in jax.tree.leaves((cache, initial))} == {
        jnp.dtype("float64")
    }
    assert_close(np.concatenate([first, second], axis=1), whole, 1e-13)
