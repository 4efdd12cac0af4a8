"""Properties of what an output depends on: positions, rows, padding, order, keys."""

import jax
import jax.numpy as jnp
import numpy as np

from attention import properties
from tests.contract import subjects, values

compiled, inputs = values.compiled, values.inputs
T = subjects.T


def of_x(subject):
    """The subject as a function of x alone, and an x."""
    parameters, x, _ = inputs(subject)
    return lambda x: compiled(subject)(parameters, x), jnp.asarray(x)


def causal(subject):
    """Not a bit moves when a later input, or another row, is edited."""
    fn, x = of_x(subject)

    def in_one_shape(x):
        """The probes' batches of 2 to 20 rows in one program."""
        return fn(jnp.resize(x, (20, *x.shape[1:])))[: len(x)]

    properties.assert_causal(in_one_shape, x[:2], tolerance=0)


def independent_rows(subject):
    """Not a bit moves when another row is edited."""
    fn, x = of_x(subject)
    # First by itself, so that an error is the function's own.
    fn(x)
    properties.assert_batch_independent(fn, x, tolerance=0)


def deterministic(subject):
    """Equal inputs give equal bits."""
    properties.assert_deterministic(*of_x(subject))


def permutation_equivariant(subject):
    """Tokens have no order: an implementation's with its mask and positions off."""
    fn, x = of_x(subject)
    if isinstance(subject, subjects.Implementation):
        fn = jax.jit(lambda x: _heads_side_by_side(subject.attend(*subject.split(x))))
    properties.assert_permutation_equivariant(fn, x)


def _heads_side_by_side(out):
    return out.reshape(*out.shape[:-2], -1)


def padding_invariant(subject):
    """What stands beyond the length of a row keeps every bit of the rest."""
    _padding(subject, nan_safe=False)


def nan_safe(subject):
    """NaN and infinities there do, too."""
    _padding(subject, nan_safe=True)


def _padding(subject, *, nan_safe):
    parameters, x, _ = inputs(subject)

    def fn(x, lengths):
        given = subjects.Given(lengths=lengths)
        return values.quickly(subject)(parameters, x, given)

    lengths = np.array([2, T, 2, T], np.int32)
    properties.assert_padding_invariant(fn, x, lengths, nan_safe=nan_safe)


def shift_invariant(subject):
    """Scores depend on distances: positions p + c say what p says, and 2p does not."""
    parameters, x, _ = inputs(subject)
    at = np.arange(T, dtype=np.int32)
    plain, shifted, stretched = (
        values.quickly(subject)(parameters, x, subjects.Given(at=at))
        for at in (at, at + 11, 2 * at)
    )
    np.testing.assert_allclose(shifted, plain, atol=2e-5)
    assert values.worst(stretched, plain) > 1e-2
    np.testing.assert_array_equal(plain, values.quickly(subject)(parameters, x))


def old_and_new_keys(subject):
    """Equal seeds drop the same, whichever kind of key holds them; others do not."""
    parameters, x, _ = inputs(subject)

    def dropped(rng):
        return values.quickly(subject)(parameters, x, subjects.Given(rng=rng))

    first = dropped(jax.random.key(6))
    np.testing.assert_array_equal(dropped(jax.random.key(6)), first)
    np.testing.assert_array_equal(dropped(jax.random.PRNGKey(6)), first)
    whole = values.quickly(subject)(parameters, x)
    for other in (dropped(jax.random.key(7)), whole):
        assert values.worst(other, np.asarray(first)) > 1e-3
