"""Properties of what a subject computes: against the loop, and at its edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract import subjects
from tests.support import compiling

B, T, N, H, K = subjects.B, subjects.T, subjects.N, subjects.H, subjects.K
# Keys of each row that count; the rest is padding.
LENGTHS = np.array([4, 2, 3, 1], np.int32)


@functools.cache
def compiled(subject):
    """`subject.apply` as users compile it, with one cache of programs."""
    return compiling.as_users_do(subject.apply)


@functools.cache
def quickly(subject):
    """`subject.apply`, compiled for one run or two."""
    return jax.jit(subject.apply)


def both_of(subject):
    """Outputs, and gradients by parameters and x for the cotangent cos(y)."""

    def both(parameters, x, given):
        out, backward = jax.vjp(
            lambda parameters, x: subject.apply(parameters, x, given), parameters, x
        )
        return out, backward(jnp.cos(out))

    return both


@functools.cache
def compiled_both(subject):
    """`both_of(subject)` as users compile it, with one cache of programs."""
    return compiling.as_users_do(both_of(subject))


@functools.cache
def inputs(subject, *, seed=0, dtype="float32"):
    """Parameters, x [B T E] and the lengths of its rows."""
    (x,) = subjects.normal(seed, (B, T, subject.width), dtype=dtype)
    return subject.parameters(dtype), x, subjects.Given(lengths=LENGTHS)


@functools.cache
def answers(subject, *, seed=0):
    """Outputs and gradients on `inputs`."""
    return compiled_both(subject)(*inputs(subject, seed=seed))


def wide(tree):
    """The same numbers in float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def worst(found, wanted):
    """The largest error."""
    return np.max(np.abs(np.asarray(found, np.float64) - wanted), initial=0.0)


def of_oracle(subject, *, dtype="float32", atol=1e-5, gradient_atol=1e-5):
    """Outputs, weights and all gradients are those of the loop.

    A gradient is checked along one random direction of each array, by the central
    difference of the loop in float64.
    """
    parameters, x, given = inputs(subject, dtype=dtype)
    out, gradients = compiled_both(subject)(parameters, x, given)
    weights = jax.jit(subject.weights)(parameters, x, given)
    at = wide((parameters, x))
    wanted, wanted_weights = subject.by_hand(*at, given)
    largest = max(1, np.max(np.abs(wanted)))
    assert worst(out, wanted) <= atol * largest
    assert worst(weights, wanted_weights) <= atol
    # A weight that is 0 is 0 exactly.
    np.testing.assert_array_equal(np.asarray(weights) == 0, wanted_weights == 0)
    cotangent = np.cos(np.asarray(out, np.float64))
    leaves, tree = jax.tree.flatten(at)
    rng = np.random.default_rng(3)
    found, slopes = [], []
    for i, (leaf, gradient) in enumerate(
        zip(leaves, jax.tree.leaves(gradients), strict=True)
    ):
        direction = rng.normal(size=leaf.shape)
        values = []
        for step in (1e-5, -1e-5):
            moved = [*leaves[:i], leaf + step * direction, *leaves[i + 1 :]]
            y, _ = subject.by_hand(*jax.tree.unflatten(tree, moved), given)
            values.append(np.sum(cotangent * y))
        slopes.append((values[0] - values[1]) / 2e-5)
        found.append(np.sum(np.asarray(gradient, np.float64) * direction))
    largest = max(1, np.max(np.abs(slopes)))
    np.testing.assert_allclose(found, slopes, rtol=0, atol=gradient_atol * largest)


def in_float64(subject):
    """Computed in float64, not only returned in it."""
    of_oracle(subject, dtype="float64", atol=1e-12, gradient_atol=1e-8)


def in_narrow_floats(subject, *, dtype):
    """Within a few roundings of the loop on the same rounded inputs."""
    parameters, x, given = inputs(subject, dtype=dtype)
    out = quickly(subject)(parameters, x, given)
    wanted, _ = subject.by_hand(*wide((parameters, x)), given)
    budget = 8 * float(jnp.finfo(dtype).eps) * np.max(np.abs(wanted))
    assert worst(out, wanted) <= budget


def of_memory(subject):
    """T != S: keys and values from elsewhere, more of them and fewer.

    Those count their positions from 0, wherever the queries stand.
    """
    parameters, x, _ = inputs(subject)
    (longer,) = subjects.normal(4, (B, T + 3, subject.width))
    for query, memory in ((x[:, :3], longer), (longer, x)):
        at = 2 + np.arange(query.shape[1], dtype=np.int32)
        given = subjects.Given(memory=memory, at=at)
        out = quickly(subject)(parameters, query, given)
        wanted, _ = subject.by_hand(*wide((parameters, query)), wide(given))
        assert out.shape == wanted.shape
        assert worst(out, wanted) <= 1e-5 * np.max(np.abs(wanted))


def of_one_token(subject):
    """T = 1."""
    parameters, x, _ = inputs(subject)
    out = quickly(subject)(parameters, x[:, :1])
    wanted, _ = subject.by_hand(*wide((parameters, x[:, :1])))
    assert worst(out, wanted) <= 1e-5 * np.max(np.abs(wanted))


def of_nothing(subject):
    """No tokens or no rows: empty outputs, and gradients of 0."""
    parameters, x, _ = inputs(subject)
    both = jax.jit(both_of(subject))
    for empty in (x[:, :0], x[:0]):
        given = subjects.Given(lengths=np.zeros(len(empty), np.int32))
        out, gradients = both(parameters, empty, given)
        assert out.shape[:2] == empty.shape[:2]
        for gradient in jax.tree.leaves(gradients):
            assert np.all(np.asarray(gradient) == 0)


def of_leading_dimensions(subject):
    """[*B T E]: two axes of rows, and none."""
    parameters, x, given = inputs(subject)
    flat, _ = answers(subject)
    deep = subjects.Given(lengths=given.lengths.reshape(2, 2))
    out = quickly(subject)(parameters, x.reshape(2, 2, *x.shape[1:]), deep)
    np.testing.assert_allclose(out.reshape(flat.shape), flat, atol=2e-6)
    one = quickly(subject)(parameters, x[0])
    # The first row is as long as x.
    np.testing.assert_allclose(one, flat[0], atol=2e-6)
