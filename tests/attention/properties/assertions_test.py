"""attention.properties: honest functions pass, others are named by position, size."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import properties

B, T, E, V = 2, 6, 3, 11
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, E)).astype(np.float32)
TOKENS = RNG.integers(V, size=(B, T)).astype(np.int32)
TABLE = RNG.normal(size=(V, E)).astype(np.float32)


def attend(x, *, corner=0):
    visible = jnp.tri(x.shape[1], k=corner, dtype=bool)
    return jax.nn.softmax(jnp.where(visible, x @ x.mT, -jnp.inf), axis=-1) @ x


def mean_subtracted(x):
    return x - x.mean(axis=1, keepdims=True)


def centred_convolution(x):
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    return padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]


def one_position(x):
    return attend(x).at[:, 2].add(1e-3 * x[:, 4])


def long_sum(x):
    """Causal but for rounding: the sum of all less the sum of the rest."""
    return x.sum(1, keepdims=True) - (np.cumsum(x[:, ::-1], 1)[:, ::-1] - x)


HONEST = {
    "attention": jax.jit(attend),
    "scan": jax.jit(lambda x: jnp.cumsum(x, axis=1)),
    "numpy": lambda x: np.cumsum(x, axis=1) / np.arange(1, x.shape[1] + 1)[:, None],
    "constant": np.ones_like,
}


class HonestTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_attention_is_causal_in_every_variant(self):
        properties.assert_causal(self.variant(attend), X, tolerance=0)


def test_a_compiled_function_is_traced_once_for_each_shape():
    """The inputs, three numbers of copies of them, and a batch of 4 rows."""
    shapes = []

    def fn(x):
        shapes.append(x.shape)
        return attend(x)

    properties.assert_causal(jax.jit(fn), X)
    assert len(shapes) == len(set(shapes)) == 5


# name -> function, source, earliest target
LEAKS = {
    "mask off by one": (lambda x: attend(x, corner=1), 1, 0),
    "mean over time": (mean_subtracted, 1, 0),
    "centred convolution": (centred_convolution, 1, 0),
    "one position": (one_position, 4, 2),
    "to nan": (lambda x: jnp.where(x[:, 5:] > -9, x, 9), 5, 0),
    "reversed": (lambda x: jnp.cumsum(x[:, ::-1], axis=1), 3, 2),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_functions_are_causal_to_the_bit(name):
    properties.assert_causal(HONEST[name], X, tolerance=0)
    properties.assert_batch_independent(HONEST[name], X, tolerance=0)


def test_honest_tokens():
    properties.assert_causal(
        lambda tokens: np.cumsum(TABLE[tokens], 1), TOKENS, vocab_size=V, tolerance=0
    )


@pytest.mark.parametrize("name", LEAKS)
def test_leaks_are_named_by_source_and_earliest_target(name):
    fn, source, target = LEAKS[name]
    with pytest.raises(properties.LeakError) as caught:
        properties.assert_causal(jax.jit(fn), X)
    assert (caught.value.source, caught.value.target) == (source, target)
    assert f"depends on input {source}" in str(caught.value)
    assert "another row" not in str(caught.value)


def test_a_leak_states_how_far_the_output_moved():
    """The largest movement by any edit of ordinary size: a thousandth of the edit."""
    with pytest.raises(properties.LeakError) as caught:
        properties.assert_causal(jax.jit(one_position), X)
    assert 1e-3 < caught.value.movement < 6e-3


def test_rounding_is_a_leak_only_if_no_bit_may_move():
    properties.assert_causal(long_sum, X)
    with pytest.raises(properties.LeakError, match="moved by 2.38e-07"):
        properties.assert_causal(long_sum, X, tolerance=0)


def test_a_column_of_huge_numbers_hides_no_other():
    """Each feature of the outputs is measured by itself, be there only two."""
    table = np.random.default_rng(0).normal(size=8).astype(np.float32)

    def leaky(tokens):
        present, following = table[tokens], table[np.roll(tokens, -1, axis=1)]
        return np.stack([1e8 * present, present + 1e-3 * following], axis=-1)

    with pytest.raises(properties.LeakError, match="output 0 depends on input 1"):
        properties.assert_causal(leaky, np.arange(8)[None], vocab_size=8)


def test_one_rare_token_is_named():
    def fn(tokens):
        outputs = np.array(tokens, np.float32)
        outputs[:, 2] += tokens[:, 4] == 7
        return outputs

    with pytest.raises(properties.LeakError) as caught:
        properties.assert_causal(fn, TOKENS, vocab_size=V)
    leak = caught.value
    assert (leak.source, leak.target, leak.movement) == (4, 2, 1)


def test_rows_that_are_mixed_at_one_position():
    """No row sees a future; a row sees the other. Causal or not, it is named."""

    def mixed(x):
        return x + jnp.roll(x, 1, axis=0)

    for check in (properties.assert_causal, properties.assert_batch_independent):
        with pytest.raises(properties.LeakError, match="another row") as caught:
            check(jax.jit(mixed), X)
        assert (caught.value.source, caught.value.target) == (0, 0)
    properties.assert_batch_independent(jax.jit(mean_subtracted), X)


def test_a_function_that_is_not_deterministic_is_told_apart_from_a_leak():
    state = np.random.default_rng(0)
    with pytest.raises(AssertionError, match="output 0 of row 0") as caught:
        properties.assert_causal(lambda x: x + state.normal(size=x.shape), X)
    assert not isinstance(caught.value, properties.LeakError)


def test_an_error_of_the_function_is_raised_as_it_is():
    def fn(x):
        if not np.array_equal(x, X):
            raise OverflowError("too large for me")
        return x

    for check in (properties.assert_causal, properties.assert_batch_independent):
        with pytest.raises(OverflowError, match="too large for me"):
            check(fn, X)


@pytest.mark.parametrize(
    ("inputs", "vocab_size"), [(X, V), (TOKENS, None), (X[0], None), (X[..., 0], None)]
)
def test_inputs_of_neither_kind_are_refused(inputs, vocab_size):
    with pytest.raises(ValueError, match="expected token ids"):
        properties.assert_causal(np.cumsum, inputs, vocab_size=vocab_size)


@pytest.mark.parametrize("length", [0, 1])
def test_inputs_without_a_later_one_are_refused(length):
    for inputs, vocab_size in ((X, None), (TOKENS, V)):
        with pytest.raises(ValueError, match="expected inputs"):
            properties.assert_causal(
                np.cumsum, inputs[:, :length], vocab_size=vocab_size
            )


def test_arguments_that_show_nothing_are_refused():
    with pytest.raises(ValueError, match="expected a tolerance of 0 or more, got -1"):
        properties.assert_causal(np.cumsum, X, tolerance=-1)
    with pytest.raises(ValueError, match="expected a vocab_size of 2 or more, got 1"):
        properties.dependency_matrix(np.cumsum, TOKENS, vocab_size=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: (y, y), "expected one array"),
        (lambda y: y[:1], r"expected .*\[2, .* got .*1, 6, 3"),
        (lambda y: y.sum(), r"expected .* got (\[\]|.*shape=\(\))"),
    ],
    ids=["tuple", "shape", "scalar"],
)
def test_outputs_of_another_kind_are_refused(change, message):
    def fn(x):
        return change(jnp.cumsum(x, axis=1))

    for check in (
        properties.assert_causal,
        properties.assert_batch_independent,
        properties.assert_deterministic,
        properties.dependency_matrix,
    ):
        with pytest.raises(ValueError, match=message):
            check(fn, jnp.asarray(X))


def test_huge_numbers_overflow_float16_in_silence():
    properties.assert_causal(lambda x: np.cumsum(x, 1), X.astype(np.float16))


def test_dependency_matrix_is_the_pattern_of_the_whole_jacobian():
    def pooled(x):
        """Pairs of positions, and features that cancel for equal cotangents."""
        pairs = x.reshape(T // 2, 2, E).sum(axis=1)
        first = jnp.concatenate([pairs, -pairs], axis=-1)
        return first.at[1].add(x[5, 0])

    matrix = properties.dependency_matrix(pooled, X[0])
    expected = np.repeat(np.eye(3, dtype=bool), 2, axis=1)
    expected[1, 5] = True
    np.testing.assert_array_equal(matrix, expected)
    whole = np.asarray(jax.jacobian(pooled)(X[0]))
    np.testing.assert_array_equal(matrix, (whole != 0).any(axis=(1, 3)))


def test_dependency_matrix_of_a_batch_is_the_union_of_its_rows():
    def fn(x):
        return x.at[0, 1].add(x[0, 5]).at[1, 3].add(x[0, 2])

    expected = np.eye(T, dtype=bool)
    expected[[1, 3], [5, 2]] = True
    matrix = properties.dependency_matrix(fn, X, rng=KEY)
    np.testing.assert_array_equal(matrix, expected)


def test_dependency_matrix_of_tokens_needs_their_number():
    with pytest.raises(ValueError, match="expected token ids .* and vocab_size=None"):
        properties.dependency_matrix(np.cumsum, TOKENS)


def test_dependency_matrix_by_edits():
    """Of tokens, and of what JAX cannot trace."""
    expected = np.tri(T, dtype=bool)
    matrix = properties.dependency_matrix(
        lambda tokens: np.cumsum(TABLE[tokens], 1), TOKENS, vocab_size=V
    )
    np.testing.assert_array_equal(matrix, expected)
    matrix = properties.dependency_matrix(lambda x: np.asarray(x).cumsum(1), X)
    np.testing.assert_array_equal(matrix, expected)
