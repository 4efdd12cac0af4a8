"""train.proofs.dependence: verdicts on stand-in models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.proofs import causality, dependence

KEY = jax.random.key(0)
NOISE = np.random.default_rng(0)
T, V, E = 6, 11, 4
TOKENS = np.random.default_rng(0).integers(V, size=(2, T)).astype(np.int32)
TABLE = jnp.asarray(np.random.default_rng(1).normal(size=(V, E)), jnp.float32)


def window(size):
    distance = np.arange(T)[:, None] - np.arange(T)
    return (distance >= 0) & (distance < size)


def from_embeddings(x, *, size=T, layers=1, future=0.0):
    """A residual stack that means over a window, and a share of the next input."""
    mask = jnp.asarray(window(size), jnp.float32)
    for _ in range(layers):
        x = x + mask @ jnp.tanh(x)
    return (x + future * jnp.roll(x, -1, axis=1)) @ TABLE.T


def logits(tokens, *, future=0.0):
    return from_embeddings(TABLE[tokens], future=future)


def prove_by_edits(fn):
    return dependence.prove_by_edits(fn, TOKENS, vocab_size=V, replacements=3, rng=KEY)


def test_edits_pass_an_honest_model():
    proof = prove_by_edits(jax.jit(logits))
    assert proof.passed, proof.reason
    assert proof.figures["edits"] == 3 * TOKENS.size
    np.testing.assert_array_equal(proof.arrays["moved"] != 0, np.tri(T, dtype=bool))
    json.dumps(proof.as_json(), allow_nan=False)


def test_edits_name_a_leak():
    proof = prove_by_edits(jax.jit(lambda tokens: logits(tokens, future=1e-3)))
    assert proof.result == "leak"
    # The last output sees the first input as its next one, which is no leak.
    leak = proof.as_json()["leak"]
    assert (leak["source"], leak["target"]) == (1, 0)
    assert 0 < leak["movement"] < 0.1


def test_a_movement_to_nan_is_a_leak_that_json_can_hold():
    def fn(tokens):
        outputs = tokens.astype(np.float32)
        outputs[tokens[:, -1] != TOKENS[:, -1], 0] = np.nan
        return outputs

    proof = prove_by_edits(fn)
    assert (proof.result, proof.as_json()["result"]) == ("leak", "leak")
    leak = proof.as_json()["leak"]
    assert leak == {"source": T - 1, "target": 0, "movement": "nan"}


def test_edits_are_void_for_a_function_that_ignores_a_token():
    proof = prove_by_edits(lambda tokens: np.where(np.arange(T) == 2, 0.0, tokens))
    assert proof.result == "void"
    assert proof.reason == "no edit of token 2 moved its own output"


def refuse(tokens):
    if np.any(tokens != TOKENS):
        raise KeyError("only these")
    return tokens


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda tokens: tokens + NOISE.normal(), "not deterministic"),
        (lambda tokens: np.full(tokens.shape, np.nan), "returned no finite number"),
        (refuse, "KeyError: 'only these'"),
        (
            lambda tokens: np.where(tokens[:, -1:] == TOKENS[:, -1:], tokens, np.nan),
            "token 5 spreads NaN to output 0",
        ),
    ],
)
def test_edits_are_void_and_accuse_nobody(fn, words):
    proof = prove_by_edits(fn)
    assert (proof.result, proof.passed) == ("void", False)
    assert words in proof.reason and "depends" not in proof.reason
    assert proof.figures["leak"] is None
    assert causality.verdict([proof]) == "not verified"


@pytest.mark.parametrize("size", [1, 2, T])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_reachable_widens_a_window_by_its_reach_in_every_layer(size, layers):
    expected = window(1 + layers * (size - 1))
    reach = dependence.reachable([window(size)] * layers)
    np.testing.assert_array_equal(reach, expected)


def test_reachable_passes_a_position_on_to_itself():
    below = np.eye(3, k=-1, dtype=bool)
    np.testing.assert_array_equal(
        dependence.reachable([below]), below | np.eye(3, dtype=bool)
    )


def prove_by_gradients(declared, **options):
    return dependence.prove_by_gradients(
        lambda x: from_embeddings(x, **options), TABLE[TOKENS], declared, rng=KEY
    )


def test_gradients_pass_a_window_through_two_layers():
    proof = prove_by_gradients(window(3), size=2, layers=2)
    assert proof.passed, proof.reason
    np.testing.assert_array_equal(proof.arrays["dependency"], window(3))
    json.dumps(proof.as_json(), allow_nan=False)


def test_gradients_fail_outside_the_declared_mask():
    proof = prove_by_gradients(window(T), future=1e-6)
    leak = proof.as_json()["leak"]
    assert (leak["source"], leak["target"]) == (1, 0)
    assert proof.result == "leak" and proof.figures["outside_declared"] == T - 1
    band = prove_by_gradients(window(2), size=3)
    assert band.result == "leak" and band.figures["outside_declared"] == T - 2
    assert "output 2 depends on input 0: its derivative in" in band.reason


def test_gradients_fail_inside_the_declared_mask():
    proof = prove_by_gradients(window(3), size=2)
    assert proof.result == "void" and proof.figures["missing_from_declared"] == T - 2
    assert proof.reason.startswith("output 2 does not depend on input 0, though")


def test_gradients_that_are_not_finite_accuse_nobody():
    proof = dependence.prove_by_gradients(
        lambda x: x.at[:, -1].set(jnp.sqrt(x[:, 0] - x[:, 0])),
        TABLE[TOKENS],
        window(T),
        rng=KEY,
    )
    assert proof.result == "void"
    assert "is not finite" in proof.reason and proof.figures["leak"] is None


@pytest.mark.parametrize("declared", [np.ones((T, T), bool), np.tri(T, k=-1) > 0])
def test_gradients_fail_a_declaration_that_is_not_causal(declared):
    proof = dependence.prove_by_gradients(jnp.sin, TABLE[TOKENS], declared, rng=KEY)
    assert proof.result == "void" and "declared mask is not causal" in proof.reason


def test_a_declaration_does_not_excuse_a_leak():
    proof = prove_by_gradients(np.ones((T, T), bool), future=1.0)
    assert proof.result == "leak"
    assert proof.reason.startswith("output 0 depends on input 1")
