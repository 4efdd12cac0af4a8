"""What a textbook chapter on attention shows, and where it needs to be put right."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import positions, score_mods, softmax
from models import multihead
from tests.support import files, readouts

GOLDEN = files.arrays(
    pathlib.Path(__file__).parents[1] / "golden" / "chapter_examples.npz"
)
entropy = jax.jit(softmax.entropy)


def one_head(x):
    """[T H] as one row with one head, [1 T 1 H]."""
    return jnp.asarray(x)[None, :, None, :]


def four_tokens(x):
    """The chapter's queries, keys and values of its four tokens."""
    return [one_head(x @ GOLDEN[name]) for name in ("wq", "wk", "wv")]


@pytest.mark.parametrize("width", [64, 512])
def test_scaling_keeps_the_softmax_soft(width):
    """Largest weight of these 16 queries and their mean entropy, without and with."""
    query = one_head(GOLDEN[f"scaling_{width}_q"])
    key = one_head(GOLDEN[f"scaling_{width}_k"])
    found = []
    for scale in (1.0, None):
        weights = readouts.attend_weights(query, key, scale=scale)
        found += [jnp.max(weights), jnp.mean(entropy(weights))]
    np.testing.assert_allclose(found, GOLDEN[f"scaling_{width}_expected"], atol=2e-5)
    stated = {64: (0.9995, 0.46, 0.3642, 2.35), 512: (1.0, 0.15, 0.3888, 2.38)}[width]
    digits = (4, 2, 4, 2)
    assert (
        tuple(round(float(x), d) for x, d in zip(found, digits, strict=True)) == stated
    )


@readouts.on_cpu
def test_four_tokens(implementation):
    """Plain, causal, and causal with an edited future."""
    edited = GOLDEN["x"].copy()
    edited[3] += 100
    for x, name, is_causal in (
        (GOLDEN["x"], "out", False),
        (GOLDEN["x"], "causal_out", True),
        (edited, "edited_causal_out", True),
    ):
        out = readouts.attend(
            *four_tokens(x), is_causal=is_causal, implementation=implementation
        )
        # Scores of the edited token are in the thousands; its output is as exact as
        # float32 makes them.
        np.testing.assert_allclose(out[0, :, 0], GOLDEN[name], rtol=1e-5, atol=2e-6)


def test_weights_of_four_tokens():
    query, key, _ = four_tokens(GOLDEN["x"])
    for name, is_causal in (("weights", False), ("causal_weights", True)):
        weights = readouts.attend_weights(query, key, is_causal=is_causal)
        np.testing.assert_allclose(weights[0, 0], GOLDEN[name], atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_sum_to_one(is_causal):
    """Within rounding: rarely bit for bit."""
    query, key = readouts.random_arrays(0, (2, 64, 4, 16), (2, 64, 2, 16))
    weights = readouts.attend_weights(query, key, scale=1.0, is_causal=is_causal)
    assert weights.shape == (2, 4, 64, 64)
    assert np.all(np.asarray(weights) >= 0)
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, atol=1e-6)


@readouts.on_cpu
def test_first_causal_row_sees_only_itself(implementation):
    query, key, value = four_tokens(GOLDEN["x"])
    weights = readouts.attend_weights(query, key, is_causal=True)
    np.testing.assert_array_equal(weights[0, 0, 0], [1, 0, 0, 0])
    out = readouts.attend(
        query, key, value, is_causal=True, implementation=implementation
    )
    np.testing.assert_array_equal(out[0, 0], value[0, 0])


@readouts.on_cpu
def test_editing_the_future_moves_no_earlier_output(implementation):
    """Adding 100 to token 3 leaves outputs 0 to 2 bitwise, and moves output 3."""
    edited = GOLDEN["x"].copy()
    edited[3] += 100
    before, after = (
        np.asarray(
            readouts.attend(
                *four_tokens(x), is_causal=True, implementation=implementation
            )
        )[0, :, 0]
        for x in (GOLDEN["x"], edited)
    )
    np.testing.assert_array_equal(before[:3].view("u4"), after[:3].view("u4"))
    assert np.max(np.abs(before[3] - after[3])) > 0.1


@readouts.on_cpu
def test_output_is_the_weighted_sum_of_the_values(implementation):
    query, key, value = readouts.random_arrays(
        1, (2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)
    )
    weights = np.asarray(readouts.attend_weights(query, key), np.float64)
    out = readouts.attend(query, key, value, implementation=implementation)
    for b, i, n in np.ndindex(2, 5, 4):
        wanted = sum(
            weights[b, n, i, j] * np.asarray(value[b, j, n // 2], np.float64)
            for j in range(6)
        )
        np.testing.assert_allclose(out[b, i, n], wanted, atol=1e-6)


def test_permutation_equivariance_needs_neither_mask_nor_positions():
    (x,) = readouts.random_arrays(2, (1, 6, 1, 8))
    order = np.array([3, 0, 5, 1, 4, 2])

    def rotated(x):
        turned = positions.rotary(x, jnp.arange(6))
        return readouts.attend(turned, turned, x)

    def added(x):
        encoding = positions.sinusoidal(jnp.arange(6), 8)
        x = x + encoding[None, :, None, :]
        return readouts.attend(x, x, x)

    def alibi(x):
        score_mod = score_mods.alibi(score_mods.alibi_slopes(1) * 100)
        return readouts.attend(x, x, x, score_mod=score_mod)

    def plain(x):
        return attention.dot_product_attention(x, x, x)

    def causal(x):
        return attention.dot_product_attention(x, x, x, is_causal=True)

    def distance(f):
        f = jax.jit(f)
        return np.max(np.abs(np.asarray(f(x[:, order])) - np.asarray(f(x))[:, order]))

    assert distance(plain) < 1e-5
    for told_apart in (causal, rotated, added, alibi):
        assert distance(told_apart) > 0.1


def test_masking_after_the_softmax():
    """Wrong as it is; with rows renormalised the same as masking before."""
    query, key, value = readouts.random_arrays(
        3, (1, 6, 1, 8), (1, 6, 1, 8), (1, 6, 1, 8)
    )
    before = np.asarray(readouts.attend_weights(query, key, is_causal=True))
    after = np.asarray(readouts.attend_weights(query, key)) * np.tri(6)
    sums = np.sum(after, axis=-1, keepdims=True)
    assert np.all(sums[..., :5, :] < 0.99)
    assert np.max(np.abs(after - before)) > 0.1
    np.testing.assert_allclose(after / sums, before, atol=1e-6)
    out = readouts.attend(query, key, value, is_causal=True)[0, :, 0]
    np.testing.assert_allclose((after / sums)[0, 0] @ value[0, :, 0], out, atol=1e-6)
    assert np.max(np.abs(after[0, 0] @ value[0, :, 0] - out)) > 0.1


def test_argmax_has_no_gradient_where_the_softmax_has():
    query, key, value = readouts.random_arrays(
        4, (1, 5, 1, 8), (1, 5, 1, 8), (1, 5, 1, 8)
    )

    def hard(query, key):
        weights = readouts.attend_weights(query, key)
        chosen = jax.nn.one_hot(jnp.argmax(weights, axis=-1), 5)
        return jnp.sum(jnp.einsum("bnts,bsnd->btnd", chosen, value) ** 2)

    def soft(query, key):
        return jnp.sum(readouts.attend(query, key, value) ** 2)

    for gradient in jax.jit(jax.grad(hard, argnums=(0, 1)))(query, key):
        assert np.all(np.asarray(gradient) == 0)
    for gradient in jax.jit(jax.grad(soft, argnums=(0, 1)))(query, key):
        assert np.all(np.asarray(gradient) != 0)


def test_entropy_falls_as_the_scale_grows():
    """From log S at scale 0 to the argmax."""
    query, key, value = readouts.random_arrays(
        5, (1, 16, 2, 8), (1, 16, 2, 8), (1, 16, 2, 8)
    )

    def weights_at(scale):
        return readouts.attend_weights(query, key, scale=scale)

    entropies = np.stack([entropy(weights_at(0.25 * s)) for s in range(8)])
    assert np.all(np.diff(entropies, axis=0) < -1e-4)
    np.testing.assert_array_equal(weights_at(0.0), np.full((1, 2, 16, 16), 1 / 16))
    np.testing.assert_allclose(entropies[0], np.log(16), rtol=1e-6)
    best = np.argmax(np.einsum("bthd,bshd->bhts", query, key), axis=-1)
    np.testing.assert_allclose(weights_at(1e6), np.eye(16)[best], atol=1e-6)
    np.testing.assert_allclose(entropy(weights_at(1e6)), 0, atol=1e-6)
    looked_up = readouts.attend(query, key, value, scale=1e6)
    wanted = [[value[0, best[0, n, i], n] for n in range(2)] for i in range(16)]
    np.testing.assert_allclose(looked_up[0], np.asarray(wanted), rtol=1e-6)


@pytest.mark.parametrize("width", [16, 64, 256, 1024])
def test_variance_of_scores_is_the_width_and_one_after_scaling(width):
    """For independent queries and keys; with q = k the diagonal dominates."""
    count = 4096
    query, key = readouts.random_arrays(
        width, (count, 1, 1, width), (count, 1, 1, width)
    )
    value = jnp.zeros((count, 1, 1, 1))
    # A product of two normal numbers has kurtosis 9, a score 3 + 6/d; the mean is 0.
    error = np.sqrt((2 + 6 / width) / count)
    for scale, wanted in ((1.0, width), (None, 1.0)):
        # With one key the log-sum-exp is the score itself.
        _, scores = readouts.attend(
            query, key, value, scale=scale, return_residual=True
        )
        variance = float(jnp.mean(scores**2))
        # The interval of 99 %: a factor of 1.06 to either side.
        assert variance / (1 + 2.58 * error) < wanted < variance / (1 - 2.58 * error)
    _, own = readouts.attend(query, query, value, return_residual=True)
    np.testing.assert_allclose(jnp.mean(own), np.sqrt(width), rtol=0.02)


@functools.partial(jax.jit, static_argnames="implementation")
def values_and_gradients(query, key, value, *, scale=None, implementation):
    """The output, and the gradients of a hundredth of its sum.

    So little that no true gradient leaves float32's range.
    """

    def loss(query, key, value):
        out = attention.dot_product_attention(
            query, key, value, scale=scale, implementation=implementation
        )
        return 0.01 * jnp.sum(out), out

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)


@readouts.on_cpu
def test_huge_scores_stay_finite(implementation):
    """Values are those of the limit (ties are shared), gradients finite."""
    query = one_head(np.array([[1.0, 0], [-1, 0], [0, 1]], np.float32))
    pattern = one_head(np.array([[1.0, 0], [1, 1], [-1, -1]], np.float32))
    value = one_head(np.array([[1.0, 5], [2, -1], [4, 4]], np.float32))
    for size in (1e4, 3e38):
        gradients, out = values_and_gradients(
            query, size * pattern, value, scale=1.0, implementation=implementation
        )
        np.testing.assert_array_equal(out[0, :, 0], [[1.5, 2], [4, 4], [2, -1]])
        for gradient in gradients:
            assert np.all(np.isfinite(gradient))


def test_huge_scores_that_are_rounded_stay_finite():
    """The scaling must not be contracted with the subtraction of the peak.

    XLA does so for a multiplication between the product and the softmax: then the
    largest score less the largest score is a rounding error, not 0. (jax.nn's dense
    form gives NaN here.)
    """
    rng = np.random.default_rng(7)
    query, pattern = (
        jnp.asarray(rng.uniform(-1, 1, size=(1, 16, 2, 3)), jnp.float32)
        for _ in range(2)
    )
    (value,) = readouts.random_arrays(8, (1, 16, 2, 3))
    scores = np.einsum("bthd,bshd->bhts", *(np.float64(x) for x in (query, pattern)))
    best = np.argmax(scores, axis=-1)[0]
    for size in (1e6, 1e20, 3e38):
        gradients, out = values_and_gradients(
            query, size * pattern, value, implementation="reference"
        )
        for gradient in gradients:
            assert np.all(np.isfinite(gradient))
        for n in range(2):
            wanted = np.asarray(value[0, best[n], n])
            np.testing.assert_allclose(out[0, :, n], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "entries"),
    [(128, 16_384), (256, 65_536), (512, 262_144), (1024, 1_048_576)],
)
def test_score_matrix_grows_with_the_square(length, entries):
    """Read from the reference's compiled program: the largest array of one head."""
    x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    attend = functools.partial(
        attention.dot_product_attention, is_causal=True, implementation="reference"
    )
    program = jax.jit(attend).lower(x, x, x).compile().as_text()
    shapes = re.findall(r"\bf32\[([\d,]+)\]", program)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
    assert max(sizes) == entries


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_narrow_heads_have_the_parameters_of_one_wide_head(heads):
    """h heads of width E/h; not their cost, for there are h times the exponentials."""
    x = jax.ShapeDtypeStruct((2, 5, 16), jnp.float32)

    def parameters(num_heads):
        module = multihead.MultiHeadAttention(num_heads=num_heads)
        shapes = jax.eval_shape(module.init, jax.random.key(0), x)
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert parameters(heads) == parameters(1) == 4 * (16 * 16 + 16)


def test_a_head_of_width_one_can_pick_only_two_keys():
    """So more heads are not strictly more expressive than one wide head."""
    query, key = readouts.random_arrays(6, (1, 200, 1, 1), (1, 9, 1, 1))
    weights = readouts.attend_weights(query, key, scale=1e4)
    picked = set(np.argmax(weights[0, 0], axis=-1).tolist())
    assert picked == {int(jnp.argmin(key)), int(jnp.argmax(key))}
