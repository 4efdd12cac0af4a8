"""attention.properties: planted leaks are named exactly, honest functions pass."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attention import properties

B, T, E = 2, 6, 3
KEY = jax.random.key(0)
INPUTS = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
REPLACEMENTS = np.random.default_rng(1).normal(size=(2, B, T, E)).astype(np.float32)


def attend(x, *, corner=0):
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool), corner), x @ x.mT, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ x


def mean_subtracted(x):
    return x - jnp.mean(x, axis=1, keepdims=True)


def centred_convolution(x):
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    return padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]


def one_position(x):
    return attend(x).at[:, 2].add(1e-3 * x[:, 4])


def over_the_batch(x):
    return x + jnp.roll(x, 1, axis=0)


HONEST: dict[str, properties.Function] = {
    "attention": jax.jit(attend),
    "scan": jax.jit(lambda x: jnp.cumsum(x, axis=1)),
    "numpy": lambda x: np.cumsum(x, axis=1) / np.arange(1, T + 1)[:, None],
    "constant": lambda x: np.full_like(x, np.nan),
}
# name -> function, source, earliest target
LEAKS = {
    "mask off by one": (lambda x: attend(x, corner=1), 1, 0),
    "mean over time": (mean_subtracted, 1, 0),
    "centred convolution": (centred_convolution, 1, 0),
    "one position": (one_position, 4, 2),
    "to nan": (lambda x: jnp.where(x[:, 5:] == INPUTS[:, 5:], x, jnp.nan), 5, 0),
    "reversed": (lambda x: jnp.cumsum(x[:, ::-1], axis=1), 3, 2),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_functions_pass(name):
    properties.assert_causal(HONEST[name], INPUTS, REPLACEMENTS)


@pytest.mark.parametrize("name", LEAKS)
def test_leaks_are_named_by_source_and_earliest_target(name):
    fn, source, target = LEAKS[name]
    with pytest.raises(properties.LeakError) as caught:
        properties.assert_causal(jax.jit(fn), INPUTS, REPLACEMENTS)
    assert (caught.value.source, caught.value.target) == (source, target)
    assert f"output {target} depends on input {source}" in str(caught.value)
    assert "another row" not in str(caught.value)


def test_a_leak_states_how_far_the_output_moved():
    edited = REPLACEMENTS[:, :, 4] - INPUTS[:, 4]
    with pytest.raises(properties.LeakError) as caught:
        properties.assert_causal(jax.jit(one_position), INPUTS, REPLACEMENTS)
    np.testing.assert_allclose(
        caught.value.movement, 1e-3 * np.abs(edited).max(), rtol=1e-3
    )


def test_a_leak_over_the_batch_is_found_though_no_row_sees_its_own_future():
    movements = properties.edit_movements(over_the_batch, INPUTS, REPLACEMENTS)
    np.testing.assert_array_equal(movements.others != 0, np.eye(T, dtype=bool))
    with pytest.raises(properties.LeakError, match="another row") as caught:
        properties.assert_causal(jax.jit(over_the_batch), INPUTS, REPLACEMENTS)
    assert (caught.value.source, caught.value.target) == (0, 0)


def test_a_rare_token_is_found_only_among_the_replacements():
    tokens = np.zeros((1, T), np.int32)

    def leak(tokens):
        outputs = np.array(tokens, np.float32)
        outputs[:, 2] += tokens[:, 4] == 7
        return outputs

    every = properties.token_replacements(KEY, tokens, vocab_size=9, count=8)
    with pytest.raises(properties.LeakError) as caught:
        properties.assert_causal(leak, tokens, every)
    assert (caught.value.source, caught.value.target) == (4, 2)
    assert caught.value.movement == 1
    without = np.where(every == 7, 8, every)
    properties.assert_causal(leak, tokens, without)


def test_token_replacements_are_all_other_ids_once():
    tokens = np.arange(12).reshape(2, 6) % 5
    drawn = properties.token_replacements(KEY, tokens, vocab_size=5, count=4)
    for row, position in np.ndindex(2, 6):
        others = set(range(5)) - {int(tokens[row, position])}
        assert set(drawn[:, row, position].tolist()) == others
    more = properties.token_replacements(KEY, tokens, vocab_size=5, count=99)
    assert more.shape == (4, 2, 6)
    fewer = properties.token_replacements(KEY, tokens, vocab_size=5, count=2)
    assert fewer.shape == (2, 2, 6) and not np.any(fewer == tokens)
    with pytest.raises(ValueError, match="at least 2 ids"):
        properties.token_replacements(KEY, tokens, vocab_size=1, count=2)


def test_one_row_and_one_position_is_edited_at_a_time_in_one_shape():
    calls = []

    def fn(x):
        assert isinstance(x, jax.Array)
        calls.append(np.asarray(x))
        return x

    properties.edit_movements(fn, jnp.asarray(INPUTS), jnp.asarray(REPLACEMENTS))
    assert len(calls) == 1 + 2 * B * T
    np.testing.assert_array_equal(calls[0], INPUTS)
    edits = [np.argwhere((call != INPUTS).any(axis=-1)).tolist() for call in calls[1:]]
    assert all(len(edit) == 1 for edit in edits)
    assert len({tuple(edit[0]) for edit in edits}) == B * T


def test_replacements_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="expected replacements"):
        properties.edit_movements(np.cumsum, INPUTS, INPUTS)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_movement_compares_bits_and_takes_nan_for_equal(dtype):
    base = np.array([[1, 0, np.nan, np.nan, np.inf, 2]], dtype)
    edited = np.array([[1, -0.0, -np.nan, 1, np.inf, np.inf]], dtype)
    found = properties.movement(base, edited)
    np.testing.assert_array_equal(found[0, [0, 2, 3, 4, 5]], [0, 0, np.nan, 0, np.inf])
    assert 0 < found[0, 1] < 1e-300
    wide = properties.movement(np.stack([base, base], -1), np.stack([base, edited], -1))
    np.testing.assert_array_equal(wide, found)


def test_a_function_that_is_not_deterministic_is_told_apart_from_a_leak():
    state = np.random.default_rng(0)
    with pytest.raises(AssertionError, match="output 0 of row 0") as caught:
        properties.assert_causal(
            lambda x: x + state.normal(size=x.shape), INPUTS, REPLACEMENTS
        )
    assert not isinstance(caught.value, properties.LeakError)


def test_dependency_matrix_is_the_pattern_of_the_whole_jacobian():
    def pooled(x):
        """Pairs of positions, and features that cancel for equal cotangents."""
        pairs = x.reshape(T // 2, 2, E).sum(axis=1)
        first = jnp.concatenate([pairs, -pairs], axis=-1)
        return first.at[1].add(x[5, 0])

    found = properties.dependency_matrix(pooled, INPUTS[0], rng=KEY)
    expected = np.repeat(np.eye(3, dtype=bool), 2, axis=1)
    expected[1, 5] = True
    np.testing.assert_array_equal(found, expected)
    whole = np.asarray(jax.jacobian(pooled)(INPUTS[0]))
    np.testing.assert_array_equal(found, (whole != 0).any(axis=(1, 3)))


def test_dependency_matrix_of_a_batch_is_the_union_of_its_rows():
    def fn(x):
        return x.at[0, 1].add(x[0, 5]).at[1, 3].add(x[0, 2])

    expected = np.eye(T, dtype=bool)
    expected[[1, 3], [5, 2]] = True
    found = properties.dependency_matrix(fn, INPUTS, rng=KEY)
    np.testing.assert_array_equal(found, expected)


def test_jacobian_norms_see_what_squares_would_lose_and_what_is_nan():
    def fn(x):
        undefined = jnp.sqrt(0 * x[4])
        return (x.at[0].add(1e-30 * x[3])).at[1].add(undefined)

    norms = properties.jacobian_norms(fn, INPUTS[0], rng=KEY)
    assert 0 < norms[0, 3] < 1e-28
    assert np.isnan(norms[1, 4])
    expected = np.eye(T, dtype=bool)
    expected[0, 3] = True
    np.testing.assert_array_equal(
        np.delete(norms != 0, 4, 1), np.delete(expected, 4, 1)
    )


@pytest.mark.parametrize("inputs", [np.zeros((2, 3), int), np.zeros(3, np.float32)])
def test_jacobian_norms_refuse_other_inputs(inputs):
    with pytest.raises(ValueError, match="expected floating point inputs"):
        properties.jacobian_norms(jnp.sin, inputs, rng=KEY)
