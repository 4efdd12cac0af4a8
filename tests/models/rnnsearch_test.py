"""The first network with attention, against loops written from its paper."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import properties
from models import rnnsearch

B, S, T, M, E = 2, 6, 5, 4, 3
MODEL = rnnsearch.RNNsearch(
    source_size=7, target_size=9, width=E, state_size=M, score_width=5, output_width=3
)
RNG = np.random.default_rng(0)
SOURCE = jnp.asarray(RNG.integers(0, 7, (B, S)), jnp.int32)
TARGET = jnp.asarray(RNG.integers(0, 9, (B, T)), jnp.int32)
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0), SOURCE, TARGET)
VARIABLES = jax.tree.map(
    lambda x: jnp.asarray(RNG.normal(size=x.shape), x.dtype), SHAPES
)
REAL_SOURCE = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], bool)


@jax.jit
def logits(source, target, source_mask=None, target_mask=None):
    masks = {"source_mask": source_mask, "target_mask": target_mask}
    return MODEL.apply(VARIABLES, source, target, **masks)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(params, x, h):
    W_r, W_z, W = np.moveaxis(params["input"]["kernel"], 1, 0)
    b_r, b_z, b = params["input"]["bias"]
    r = sigmoid(x @ W_r + b_r + h @ params["reset_kernel"])
    z = sigmoid(x @ W_z + b_z + h @ params["update_kernel"])
    c = np.tanh(x @ W + b + (r * h) @ params["candidate_kernel"])
    return z * h + (1 - z) * c


def by_hand(source, target):
    """Logits and weights of one pair of sentences."""
    p = jax.tree.map(np.float64, VARIABLES["params"])
    x = [p["source_embedding"]["embedding"][token] for token in source]
    forward, h = [], np.zeros(M)
    for vector in x:
        forward.append(h := gru(p["forward_gru"], vector, h))
    backward, h = [], np.zeros(M)
    for vector in reversed(x):
        backward.insert(0, h := gru(p["backward_gru"], vector, h))
    annotations = [np.concatenate(both) for both in zip(forward, backward, strict=True)]

    def dense(name, x):
        return np.tensordot(x, p[name]["kernel"], 1) + p[name].get("bias", 0)

    s = np.tanh(dense("first_state", backward[0]))
    rows, alphas = [], []
    for token in target:
        y = p["target_embedding"]["embedding"][token]
        energies = [
            p["score_vector"][0] @ np.tanh(dense("query", s) + dense("key", h))
            for h in annotations
        ]
        alpha = np.exp(energies) / np.sum(np.exp(energies))
        c = sum(a * h for a, h in zip(alpha, annotations, strict=True))
        s = gru(p["decoder_gru"], np.concatenate([y, c]), s)
        pairs = dense("maxout", np.concatenate([s, y, c]))
        rows.append(dense("out", np.maximum(*pairs)))
        alphas.append(alpha)
    return np.array(rows), np.array(alphas)


def test_logits_by_hand():
    found = logits(SOURCE, TARGET)
    for b in range(B):
        wanted, _ = by_hand(SOURCE[b], TARGET[b])
        np.testing.assert_allclose(found[b], wanted, atol=1e-5)


def test_padding_of_the_source_reaches_nothing():
    """Neither logits nor weights, on either side, with ids that no table holds."""
    found, sown = jax.jit(
        lambda source: MODEL.apply(
            VARIABLES,
            source,
            TARGET,
            source_mask=REAL_SOURCE,
            sow_weights=True,
            mutable=["intermediates"],
        )
    )(jnp.where(REAL_SOURCE, SOURCE, -1))
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.shape == (B, 1, T, S)
    for b in range(B):
        wanted, alphas = by_hand(SOURCE[b][REAL_SOURCE[b]], TARGET[b])
        np.testing.assert_allclose(found[b], wanted, atol=1e-5)
        np.testing.assert_allclose(weights[b, 0][:, REAL_SOURCE[b]], alphas, atol=1e-6)
        assert np.all(weights[b, 0][:, ~REAL_SOURCE[b]] == 0)


def test_padding_of_the_target_changes_no_state():
    real = np.array([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]], bool)
    found = logits(SOURCE, jnp.where(real, TARGET, 100), REAL_SOURCE, real)
    assert np.isfinite(found).all()
    for b in range(B):
        wanted, _ = by_hand(SOURCE[b][REAL_SOURCE[b]], TARGET[b][real[b]])
        np.testing.assert_allclose(found[b][real[b]], wanted, atol=1e-5)


@jax.jit
@jax.grad
def gradients(variables, source):
    out = MODEL.apply(variables, source, TARGET, source_mask=REAL_SOURCE)
    return jnp.sum(out**2)


def test_gradients_are_finite_beside_padding():
    found = gradients(VARIABLES, jnp.where(REAL_SOURCE, SOURCE, -1))
    other = gradients(VARIABLES, jnp.where(REAL_SOURCE, SOURCE, 3))
    chex.assert_trees_all_equal(found, other)
    for path, gradient in jax.tree_util.tree_leaves_with_path(found):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), name
        assert np.any(gradient != 0), name


def test_no_logit_sees_a_later_token_of_the_target():
    properties.assert_causal(
        jax.jit(lambda target: logits(SOURCE, target)), TARGET, vocab_size=9
    )


def test_decoding_is_teacher_forcing_in_pieces():
    """Encoded once; the target in pieces of 2, 1 and 2."""
    wanted = logits(SOURCE, TARGET, REAL_SOURCE)
    encoded = MODEL.apply(VARIABLES, SOURCE, REAL_SOURCE, method="encode")
    decode = jax.jit(
        lambda target, state: MODEL.apply(
            VARIABLES, encoded, target, state, method="decode"
        )
    )
    state, pieces = None, []
    for start, stop in ((0, 2), (2, 3), (3, 5)):
        out, state = decode(TARGET[:, start:stop], state)
        pieces.append(out)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), wanted, atol=1e-5)


def test_scores_start_at_the_plain_mean():
    """v is 0 at first, as in the paper, and has a gradient nevertheless."""
    init = jax.jit(
        lambda rng: MODEL.init(rng, SOURCE, TARGET)["params"]["score_vector"]
    )
    start = init(jax.random.key(0))
    np.testing.assert_array_equal(start, np.zeros((1, 5)))
    variables = {"params": VARIABLES["params"] | {"score_vector": start}}
    assert np.any(gradients(variables, SOURCE)["params"]["score_vector"] != 0)


def test_computation_in_bfloat16():
    narrow = MODEL.clone(dtype="bfloat16")
    found = jax.jit(narrow.apply)(VARIABLES, SOURCE, TARGET)
    assert found.dtype == jnp.float32
    wanted = logits(SOURCE, TARGET)
    np.testing.assert_allclose(found, wanted, atol=0.05 * np.max(np.abs(wanted)))


@pytest.mark.parametrize("name", ["source_mask", "target_mask"])
def test_errors_name_what_does_not_fit(name):
    with pytest.raises(ValueError, match="mask of the tokens must be"):
        MODEL.apply(VARIABLES, SOURCE, TARGET, **{name: np.ones((B, 3), bool)})
