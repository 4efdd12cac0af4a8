"""attention.properties.invariance: padding, permutations and streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import properties

B, T, E, V = 2, 6, 3, 11
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, E)).astype(np.float32)
TOKENS = RNG.integers(V, size=(B, T)).astype(np.int32)
TABLE = RNG.normal(size=(V, E)).astype(np.float32)
LENGTHS = np.array([3, T])


def mean_subtracted(x):
    return x - x.mean(axis=1, keepdims=True)


def masked_mean(x, lengths, *, visible=lambda inside: inside):
    inside = (np.arange(x.shape[1]) < lengths[:, None])[..., None]
    total = np.where(visible(inside), x, 0).sum(1, keepdims=True)
    return x + total / lengths[:, None, None].astype(x.dtype)


def test_padding():
    properties.assert_padding_invariant(masked_mean, X, LENGTHS, nan_safe=True)
    with pytest.raises(AssertionError, match="output 0 of row 0 sees the padding"):
        properties.assert_padding_invariant(
            lambda x, lengths: masked_mean(x, lengths, visible=np.ones_like), X, LENGTHS
        )


def test_padding_of_nan():
    def weighted(x, lengths):
        inside = (np.arange(x.shape[1]) < lengths[:, None])[..., None]
        with np.errstate(invalid="ignore"):
            return x + (inside * x).sum(1, keepdims=True)

    properties.assert_padding_invariant(weighted, X, LENGTHS)
    with pytest.raises(AssertionError, match="moved by nan"):
        properties.assert_padding_invariant(weighted, X, LENGTHS, nan_safe=True)


def test_padding_that_counts_by_its_length():
    """Whatever stands there does not matter, but that it stands there does."""
    with pytest.raises(AssertionError, match="row 0 padded, against the row alone"):
        properties.assert_padding_invariant(
            lambda x, lengths: np.cumsum(x, 1) / x.shape[1], X, LENGTHS
        )


def test_padding_tokens():
    def fn(tokens, lengths):
        return masked_mean(TABLE[tokens], lengths)

    properties.assert_padding_invariant(fn, TOKENS, LENGTHS, vocab_size=V)
    with pytest.raises(AssertionError, match="sees the padding"):
        properties.assert_padding_invariant(
            lambda tokens, _: fn(tokens, LENGTHS * 0 + T),
            TOKENS,
            LENGTHS,
            vocab_size=V,
        )


@pytest.mark.parametrize(
    ("inputs", "lengths", "message"),
    [
        (X, np.array([0, T]), r"expected 2 lengths from 1 to 6, got \[0, 6\]"),
        (X, np.array([3, T + 1]), r"from 1 to 6, got \[3, 7\]"),
        (X, np.array([3]), r"expected 2 lengths from 1 to 6, got \[3\]"),
        (X, LENGTHS[:, None], "expected 2 lengths"),
        (TOKENS, LENGTHS, "expected token ids .* and vocab_size"),
        (X[0], LENGTHS, "expected token ids"),
    ],
)
def test_lengths_and_inputs_that_are_refused(inputs, lengths, message):
    def never(inputs, lengths):
        raise AssertionError("was called")

    with pytest.raises(ValueError, match=message):
        properties.assert_padding_invariant(never, inputs, lengths)


def test_rows_that_fill_every_length_are_refused():
    with pytest.raises(ValueError, match="expected a length below 6: nothing is pad"):
        properties.assert_padding_invariant(masked_mean, X, LENGTHS * 0 + T)


def test_permutations():
    called = []
    properties.assert_permutation_equivariant(
        lambda x: mean_subtracted(called.append(x) or x), X
    )
    assert len(called) == 3  # the inputs, and two permutations of them
    with pytest.raises(AssertionError, match="under the permutation"):
        properties.assert_permutation_equivariant(lambda x: np.cumsum(x, 1), X)
    with pytest.raises(AssertionError, match="under the permutation"):
        properties.assert_permutation_equivariant(
            lambda x: x + np.eye(T, E, dtype=np.float32), X
        )


@pytest.mark.parametrize("length", [0, 1])
def test_fewer_than_two_positions_have_no_permutation(length):
    with pytest.raises(ValueError, match=r"2 positions at least, got \(2, "):
        properties.assert_permutation_equivariant(np.cumsum, X[:, :length])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: (y, y), "expected one array"),
        (lambda y: y[:1], r"expected .*\[2, .* got .*1, 6, 3"),
    ],
    ids=["tuple", "shape"],
)
def test_permuted_outputs_are_one_array(change, message):
    with pytest.raises(ValueError, match=message):
        properties.assert_permutation_equivariant(lambda x: change(x), X)


def test_streams():
    def step(total, x):
        sums = total[:, None] + np.cumsum(x, 1)
        return sums[:, -1], sums

    def forgetful(total, x):
        return total, total[:, None] + np.cumsum(x, 1)

    start = np.zeros((B, E), np.float32)
    full = jax.jit(lambda x: jnp.cumsum(x, axis=1))
    properties.assert_streaming_equals_full(full, step, start, X)
    with pytest.raises(AssertionError, match=r"in pieces of \[1, 1, 1, 1, 1, 1\]"):
        properties.assert_streaming_equals_full(full, forgetful, start, X)
