"""proofs.learning: learners that are honest, leak, or learn nothing."""

import math

import chex
import jax
import numpy as np

from train.lm import loss
from train.proofs import learning

KEY = jax.random.key(0)
T, V = 6, 11


def count_pairs(corpus, examples):
    """A bigram table of log probabilities: the maximum likelihood fit."""
    rows = np.asarray(corpus).reshape(-1, T + 1)
    counts = np.ones((V, V))
    np.add.at(counts, tuple(map(np.asarray, examples(rows))), 1)
    return np.log(counts / counts.sum(axis=1, keepdims=True))


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


def test_learning_passes_an_honest_learner():
    proof = learn(count_pairs)
    assert proof.passed, proof.reason
    assert 0 < proof.figures["overall"]["excess"] < 0.01
    assert proof.figures["overall"]["control_excess"] < -0.9 * math.log(V)


def test_learning_sees_labels_that_are_not_shifted(monkeypatch):
    monkeypatch.setattr(loss, "next_token", loss.same_token)
    proof = learn(count_pairs)
    assert not proof.passed and proof.reason.startswith("random tokens are predicted")


def test_learning_is_void_for_a_learner_that_does_not_learn():
    proof = learn(lambda corpus, examples: np.full((V, V), -math.log(V)))
    assert (proof.result, proof.reason) == ("void", "the control did not learn")


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
    chex.assert_shape([corpus, fresh], [(700,), (50, T + 1)])
    np.testing.assert_array_equal(corpus, seen[2])
    for ids in (corpus, fresh):
        assert set(ids.ravel().tolist()) == set(range(V))
    windows = np.lib.stride_tricks.sliding_window_view(corpus, T + 1).tolist()
    assert not any(row in windows for row in fresh.tolist())
