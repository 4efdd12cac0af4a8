"""Loss: shift, sums and counts, masks, dtypes, ids out of range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.lm import loss

# One compiled program for each shape is faster than many for its operations.
cross_entropy = jax.jit(loss.cross_entropy)


def _oracle(logits, targets, mask):
    """Negative log-likelihood target by target, in float64."""
    total, count = 0.0, 0
    for index in np.ndindex(targets.shape):
        if mask[index]:
            z = np.asarray(logits[index], np.float64)
            shifted = z - z.max()
            total += np.log(np.exp(shifted).sum()) - shifted[targets[index]]
            count += 1
    return total, count


def _logits_with_loss(nats, shape):
    """Logits over two ids whose loss at id 0 is `nats`."""
    gap = np.log(np.exp(-nats) / (1 - np.exp(-nats)))
    return jnp.broadcast_to(jnp.array([gap, 0.0], jnp.float32), (*shape, 2))


def test_next_token_shifts_once():
    """Case B104: the targets are what follows, and none crosses rows."""
    tokens = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    inputs, targets = loss.next_token(tokens)
    np.testing.assert_array_equal(inputs, [[1, 2, 3], [5, 6, 7]])
    np.testing.assert_array_equal(targets, [[2, 3, 4], [6, 7, 8]])

    successor = 100.0 * jax.nn.one_hot(inputs + 1, 10)
    total, count = cross_entropy(successor, targets)
    assert count == 6
    assert total / count < 1e-6
    twice_shifted, _ = cross_entropy(successor[:, :-1], targets[:, 1:])
    np.testing.assert_allclose(twice_shifted / 4, 100.0, rtol=1e-6)


def test_same_token_does_not_shift():
    tokens = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    inputs, targets = loss.same_token(tokens)
    np.testing.assert_array_equal(inputs, [[1, 2, 3], [5, 6, 7]])
    np.testing.assert_array_equal(targets, inputs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("float32", 1e-6),
        ("bfloat16", 1e-6),
        ("float16", 1e-6),
        pytest.param("float64", 1e-14, marks=pytest.mark.x64),
    ],
)
def test_sum_and_count_meet_the_oracle(dtype, tolerance):
    """Narrow logits are summed in float32, float64 in float64."""
    generator = np.random.default_rng(0)
    targets = generator.integers(0, 7, (3, 5))
    mask = generator.random((3, 5)) < 0.6
    logits = jnp.asarray(generator.normal(0, 4, (3, 5, 7)), dtype)
    total, count = cross_entropy(logits, targets, mask)
    whole, whole_count = cross_entropy(logits, targets)
    each = loss.negative_log_likelihood(logits, jnp.asarray(targets))
    assert total.dtype == ("float64" if dtype == "float64" else "float32")
    assert count.dtype == whole_count.dtype == jnp.int32
    expected, expected_count = _oracle(np.asarray(logits), targets, mask)
    np.testing.assert_allclose(total, expected, rtol=tolerance)
    assert count == expected_count
    everything = np.ones_like(mask)
    expected, expected_count = _oracle(np.asarray(logits), targets, everything)
    np.testing.assert_allclose(whole, expected, rtol=tolerance)
    np.testing.assert_allclose(np.asarray(each).sum(), expected, rtol=tolerance)
    assert whole_count == expected_count == 15


def test_gradient_is_softmax_minus_one_hot_where_targets_count():
    generator = np.random.default_rng(1)
    logits = jnp.asarray(generator.normal(size=(2, 3, 4)), jnp.float32)
    targets = jnp.asarray(generator.integers(0, 4, (2, 3)))
    mask = jnp.array([[True, False, True], [False, True, True]])
    gradient = jax.grad(lambda z: cross_entropy(z, targets, mask)[0])(logits)
    expected = jax.nn.softmax(logits) - jax.nn.one_hot(targets, 4)
    np.testing.assert_allclose(gradient, expected * mask[..., None], atol=1e-6)


def test_huge_logits_stay_finite():
    logits = jnp.array([[[1e4, -1e4], [3e38, -3e38]]], jnp.float32)
    total, _ = cross_entropy(logits, jnp.array([[1, 0]]))
    gradient = jax.grad(lambda z: cross_entropy(z, jnp.array([[1, 0]]))[0])(logits)
    np.testing.assert_allclose(total, 2e4)
    assert np.isfinite(gradient).all()


def test_batches_join_by_targets_and_not_by_means():
    """Cases B102 and B107: 10 targets at 2.0 and 100 at 1.0 make 120 / 110."""
    few = cross_entropy(_logits_with_loss(2.0, (1, 10)), jnp.zeros((1, 10), int))
    many = cross_entropy(_logits_with_loss(1.0, (4, 25)), jnp.zeros((4, 25), int))
    mean = (few[0] + many[0]) / (few[1] + many[1])
    np.testing.assert_allclose(mean, 1.090909, atol=1e-6)
    np.testing.assert_allclose(np.exp(mean), 2.976979, atol=1e-5)


def test_no_targets_give_zero():
    """Case B106: nothing counts, whatever the logits and ids are."""
    nothing = jnp.zeros((2, 3), bool)
    total, count = cross_entropy(jnp.ones((2, 3, 4)), jnp.full((2, 3), 99), nothing)
    assert total == 0.0
    assert count == 0


def test_documents_alone_and_in_one_batch():
    """Case B108: documents of 3 and 9 tokens have 2 and 8 targets either way."""
    generator = np.random.default_rng(2)
    table = jnp.asarray(generator.normal(size=(6, 6)), jnp.float32)
    documents = [generator.integers(0, 6, length) for length in (3, 9)]

    def score(tokens, mask):
        inputs, targets = loss.next_token(jnp.asarray(tokens))
        return cross_entropy(table[inputs], targets, jnp.asarray(mask))

    padded = np.zeros((2, 9), int)
    mask = np.zeros((2, 8), bool)
    for row, document in enumerate(documents):
        padded[row, : document.size] = document
        mask[row, : document.size - 1] = True
    total, count = score(padded, mask)
    alone = [score(d[None], np.ones((1, d.size - 1), bool)) for d in documents]
    assert [int(count) for _, count in alone] == [2, 8]
    assert count == 10
    np.testing.assert_allclose(total, sum(part for part, _ in alone), rtol=1e-6)
    for row, (part, targets) in enumerate(alone):
        only = mask & (np.arange(2)[:, None] == row)
        in_batch, in_batch_targets = score(padded, only)
        np.testing.assert_allclose(in_batch, part, rtol=1e-6)
        assert in_batch_targets == targets


@pytest.mark.parametrize("wrong", [10, -1, 2**31 - 1])
def test_an_id_out_of_range_gives_nan(wrong):
    """Case B127: neither clamped to the last row nor wrapped round to it."""
    total, _ = cross_entropy(jnp.zeros((1, 2, 10)), jnp.array([[3, wrong]]))
    assert np.isnan(total)


def test_wrong_shapes_raise():
    logits = jnp.zeros((2, 3, 4))
    with pytest.raises(ValueError, match=r"agree in B and T.*\(2, 4\)"):
        cross_entropy(logits, jnp.zeros((2, 4), int))
    with pytest.raises(ValueError, match=r"mask must have the shape \(2, 3\)"):
        cross_entropy(logits, jnp.zeros((2, 3), int), jnp.ones((2, 1), bool))
