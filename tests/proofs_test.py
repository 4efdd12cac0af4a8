"""train.proofs: verdicts on stand-in models, and the statistics on known losses."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import learning, loss, proofs

KEY = jax.random.key(0)
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


def edits(fn):
    return proofs.edits(fn, TOKENS, vocab_size=V, replacements=3, rng=KEY)


def test_edits_pass_an_honest_model():
    proof = edits(jax.jit(logits))
    assert proof.passed, proof.reason
    assert proof.figures["edits"] == 3 * TOKENS.size
    np.testing.assert_array_equal(proof.arrays["own"] != 0, np.tri(T, dtype=bool))
    json.dumps(proof.report(), allow_nan=False)


def test_edits_name_a_leak():
    proof = edits(jax.jit(lambda tokens: logits(tokens, future=1e-3)))
    assert not proof.passed
    # The last output sees the first input as its next one, which is no leak.
    leak = proof.report()["leak"]
    assert (leak["source"], leak["target"]) == (1, 0)
    assert 0 < leak["movement"] < 0.1


def test_a_movement_to_nan_is_a_leak_that_json_can_hold():
    def fn(tokens):
        return np.where(tokens[:, -1:] == TOKENS[:, -1:], tokens, np.nan)

    leak = edits(fn).report()["leak"]
    assert leak == {"source": T - 1, "target": 0, "movement": "nan"}


def test_edits_are_void_for_a_function_that_ignores_a_token():
    proof = edits(lambda tokens: np.where(np.arange(T) == 2, 0.0, tokens))
    assert not proof.passed
    assert proof.reason == "void: no edit of token 2 moved its own output"


def test_edits_fail_a_function_that_is_not_deterministic():
    state = np.random.default_rng(0)
    proof = edits(lambda tokens: tokens + state.normal())
    assert not proof.passed and "not deterministic" in proof.reason
    assert proof.figures["leak"] is None


@pytest.mark.parametrize("size", [1, 2, T])
@pytest.mark.parametrize("layers", [0, 1, 2, 4])
def test_reachable_widens_a_window_by_its_reach_in_every_layer(size, layers):
    expected = window(1 + layers * (size - 1))
    reach = proofs.reachable(window(size), num_layers=layers)
    np.testing.assert_array_equal(reach, expected)


def test_reachable_passes_a_position_on_to_itself():
    below = np.eye(3, k=-1, dtype=bool)
    np.testing.assert_array_equal(
        proofs.reachable(below, num_layers=1), below | np.eye(3, dtype=bool)
    )


def gradients(declared, **options):
    return proofs.gradients(
        lambda x: from_embeddings(x, **options), TABLE[TOKENS], declared, rng=KEY
    )


def test_gradients_pass_a_window_through_two_layers():
    proof = gradients(window(3), size=2, layers=2)
    assert proof.passed, proof.reason
    np.testing.assert_array_equal(proof.arrays["dependency"], window(3))
    json.dumps(proof.report(), allow_nan=False)


def test_gradients_fail_outside_the_declared_mask():
    proof = gradients(window(T), future=1e-6)
    leak = proof.report()["leak"]
    assert (leak["source"], leak["target"]) == (1, 0)
    assert not proof.passed and proof.figures["outside_declared"] == T - 1
    band = gradients(window(2), size=3)
    assert not band.passed and band.figures["outside_declared"] == T - 2
    assert "output 2 depends on input 0" in band.reason


def test_gradients_fail_inside_the_declared_mask():
    proof = gradients(window(3), size=2)
    assert not proof.passed and proof.figures["missing_from_declared"] == T - 2
    assert proof.reason == "output 2 does not depend on input 0, as declared"


@pytest.mark.parametrize("declared", [np.ones((T, T), bool), np.tri(T, k=-1) > 0])
def test_gradients_fail_a_declaration_that_is_not_causal(declared):
    proof = proofs.gradients(jnp.sin, TABLE[TOKENS], declared, rng=KEY)
    assert not proof.passed and "declared mask is not causal" in proof.reason


def honest_losses(generator, rows, *, spread=0.3):
    """Losses of predictions that are independent of their uniformly drawn targets."""
    logits = spread * generator.normal(size=(rows, T, V))
    targets = generator.integers(V, size=(rows, T, 1))
    normalizer = np.log(np.exp(logits).sum(axis=-1))
    return normalizer - np.take_along_axis(logits, targets, axis=-1)[..., 0]


def judge(honest, *, control=None, level=learning.LEVEL):
    if control is None:
        control = np.full_like(honest, 0.01)
    return learning.judge_losses(honest, control, vocab_size=V, level=level)


def accuses(proof):
    return proof.reason.startswith("random tokens are predicted")


def test_honest_losses_pass_and_their_statistics_are_the_textbook_ones():
    losses = honest_losses(np.random.default_rng(0), 400)
    proof = judge(losses)
    assert proof.passed, proof.reason
    excess = losses.mean(axis=0) - math.log(V)
    error = losses.std(axis=0, ddof=1) / 20
    # Normal quantile of 1 - 0.001 / (2 * 7), two-sided over T + 1 = 7 means.
    z = 3.8030
    np.testing.assert_allclose(proof.arrays["excess"], excess, rtol=1e-9)
    np.testing.assert_allclose(proof.arrays["upper"], excess + z * error, rtol=1e-3)
    np.testing.assert_allclose(proof.arrays["lower"], excess - z * error, rtol=1e-3)
    # 2.3263: normal quantile of 0.99. ln(7 / 0.001) = 8.8537.
    smallest = np.maximum(excess, 0) + 8.8537 / 400 + 2.3263 * error
    np.testing.assert_allclose(proof.arrays["smallest_leak"], smallest, rtol=1e-3)
    overall = proof.figures["overall"]
    error = losses.mean(axis=1).std(ddof=1) / 20
    smallest = max(excess.mean(), 0) + 8.8537 / 2400 + 2.3263 * error
    assert overall["smallest_leak"] == pytest.approx(smallest, rel=1e-3)
    assert len(proof.report()["positions"]["excess"]) == T
    json.dumps(proof.report(), allow_nan=False)


def test_a_leak_at_one_position_is_named():
    losses = honest_losses(np.random.default_rng(0), 400)
    losses[:, 3] -= 0.3
    proof = judge(losses)
    assert not proof.passed
    assert "at position 3: 0.2" in proof.reason


def test_an_excess_below_zero_makes_no_stated_leak_smaller():
    """The expected loss of an honest model is log V or more, whatever the sample."""
    losses = np.full((400, T), math.log(V) - 0.001)
    smallest = judge(losses).arrays["smallest_leak"]
    np.testing.assert_allclose(smallest, 8.8537 / 400, rtol=1e-3)


def test_a_small_leak_at_all_positions_is_found_by_their_sum():
    losses = honest_losses(np.random.default_rng(0), 2000, spread=0.02) - 0.003
    proof = judge(losses)
    assert not proof.passed and "over all positions" in proof.reason
    one = losses.copy()
    one[:, 1:] += 0.003
    assert judge(one).passed


@pytest.mark.parametrize("position", [2, T])
def test_a_leak_of_the_stated_size_is_found_with_the_stated_power(position):
    """The last index stands for a leak at all positions."""
    generator = np.random.default_rng(0)
    report = judge(honest_losses(generator, 300)).report()
    stated = [*report["positions"]["smallest_leak"], report["overall"]["smallest_leak"]]

    def found(scale):
        hits = 0
        for _ in range(200):
            losses = honest_losses(generator, 300)
            losses[:, position if position < T else slice(None)] -= (
                scale * stated[position]
            )
            hits += not judge(losses).passed
        return hits / 200

    assert found(1.0) >= 0.95
    assert found(0.5) <= 0.5


def test_honest_losses_are_accused_at_most_at_the_stated_level():
    """A model that rules one id out: a normal interval often lies below log V."""
    generator = np.random.default_rng(0)
    draws, accused, below = 500, 0, 0
    chances = np.append(np.full(V - 1, (1 - 1e-4) / (V - 1)), 1e-4)
    for _ in range(draws):
        losses = -np.log(chances[generator.integers(V, size=(12, T))])
        proof = judge(losses, level=0.2)
        accused += accuses(proof)
        below += bool((proof.arrays["upper"] < 0).any())
    assert accused <= 0.2 * draws
    assert below >= 0.5 * draws


def test_the_level_is_spent_where_gains_are_likely():
    """p = V^-1 (1 ± g) wins ln(1 + g) half the time: the bound is nearly reached."""
    generator = np.random.default_rng(0)
    rates = {}
    for level in (0.5, 0.01):
        accused = 0
        for _ in range(1000):
            sign = generator.choice([-1, 1], size=(200, 1))
            losses = math.log(V) - np.log(1 + 0.1 * sign)
            accused += accuses(judge(losses, level=level))
        rates[level] = accused / 1000
    assert rates[0.01] <= 0.01 + 0.01
    assert 0.02 < rates[0.5] <= 0.5


def test_a_control_that_does_not_fall_ten_standard_errors_voids_the_proof():
    losses = honest_losses(np.random.default_rng(0), 400)
    rows = np.random.default_rng(1).normal(size=(400, 1))
    rows = np.broadcast_to((rows - rows.mean()) / rows.std(ddof=1), losses.shape)
    # Standard error of the mean over rows: 1 / 20, so ten of them are 0.5 nats.
    enough = judge(losses, control=rows + math.log(V) - 0.501)
    short = judge(losses, control=rows + math.log(V) - 0.499)
    assert enough.passed
    assert not short.passed and short.reason == "void: the control did not learn"


def test_too_few_rows_void_the_proof():
    proof = judge(honest_losses(np.random.default_rng(0), 3))
    assert not proof.passed and "a complete leak at position" in proof.reason


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_losses_that_are_not_finite_void_the_proof(value):
    losses = honest_losses(np.random.default_rng(0), 400)
    broken = losses.copy()
    broken[0, 0] = value
    for proof in (judge(broken), judge(losses, control=broken)):
        assert not proof.passed and proof.reason == "void: a loss is not finite"
        json.dumps(proof.report(), allow_nan=False)


@pytest.mark.parametrize("shape", [(1, T), (T,)])
def test_losses_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="expected two arrays of losses"):
        judge(np.ones(shape))


def learn(fit):
    return learning.prove(
        fit,
        lambda table, tokens, examples: (
            -table[tuple(map(np.asarray, examples(tokens)))]
        ),
        vocab_size=V,
        context=T,
        corpus_size=70_000,
        fresh_rows=500,
        rng=KEY,
    )


def count_pairs(corpus, examples):
    """A bigram table of log probabilities: the maximum likelihood fit."""
    rows = np.asarray(corpus).reshape(-1, T + 1)
    counts = np.ones((V, V))
    np.add.at(counts, tuple(map(np.asarray, examples(rows))), 1)
    return np.log(counts / counts.sum(axis=1, keepdims=True))


def test_learning_passes_an_honest_learner():
    proof = learn(count_pairs)
    assert proof.passed, proof.reason
    assert 0 < proof.figures["overall"]["excess"] < 0.01
    assert proof.figures["overall"]["control_excess"] < -0.9 * math.log(V)


def test_learning_sees_labels_that_are_not_shifted(monkeypatch):
    monkeypatch.setattr(loss, "next_token", loss.same_token)
    proof = learn(count_pairs)
    assert not proof.passed and accuses(proof)


def test_learning_is_void_for_a_learner_that_does_not_learn():
    proof = learn(lambda corpus, examples: np.full((V, V), -math.log(V)))
    assert not proof.passed and proof.reason == "void: the control did not learn"


def test_learning_draws_fresh_rows_apart_from_the_corpus():
    seen = []

    def fit(corpus, examples):
        seen.append(np.asarray(corpus))
        return count_pairs(corpus, examples)

    def losses(table, tokens, examples):
        seen.append(np.asarray(tokens))
        return np.ones((len(tokens), T))

    learning.prove(
        fit, losses, vocab_size=V, context=T, corpus_size=700, fresh_rows=50, rng=KEY
    )
    corpus, fresh = seen[0], seen[1]
    assert corpus.shape == (700,) and fresh.shape == (50, T + 1)
    np.testing.assert_array_equal(corpus, seen[2])
    for ids in (corpus, fresh):
        assert set(ids.ravel().tolist()) == set(range(V))
    windows = np.lib.stride_tricks.sliding_window_view(corpus, T + 1).tolist()
    assert not any(row in windows for row in fresh.tolist())
