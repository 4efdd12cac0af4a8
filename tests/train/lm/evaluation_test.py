"""Evaluation: a mean over targets, whatever the batches."""

import jax
import numpy as np

from tests.support import toy
from train.lm import evaluation


def test_evaluation_is_a_mean_over_targets_for_any_batch_size():
    """Case B107: 11 ragged windows in batches of 1, 3 and 8, against NumPy."""
    generator = np.random.default_rng(3)
    tokens = generator.integers(0, 7, (11, toy.CONTEXT + 1)).astype(np.int32)
    mask = np.arange(toy.CONTEXT)[None, :] < generator.integers(
        0, toy.CONTEXT + 1, (11, 1)
    )
    params = jax.tree.map(np.asarray, toy.start().params)
    dense = params["Dense_0"]
    z = params["Embed_0"]["embedding"][tokens[:, :-1]] @ dense["kernel"] + dense["bias"]
    z = z.astype(np.float64)
    nats = np.log(np.exp(z).sum(-1))
    nats -= np.take_along_axis(z, tokens[:, 1:, None], -1)[..., 0]
    expected = nats[mask].mean()
    assert abs(expected - nats.mean()) > 1e-3
    for batch_size in (1, 3, 8):
        value = evaluation.evaluate(
            # Dropout is off, whatever the rate.
            toy.Bigram(dropout_rate=0.5),
            params,
            tokens,
            mask,
            batch_size=batch_size,
        )
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_evaluation_without_targets(caplog):
    """Case B106: 0 and a logged 'no targets'."""
    tokens, mask = (
        np.zeros((2, toy.CONTEXT + 1), np.int32),
        np.zeros((2, toy.CONTEXT), bool),
    )
    value = evaluation.evaluate(
        toy.Bigram(), toy.start().params, tokens, mask, batch_size=2
    )
    assert value == 0.0
    assert "no targets" in caplog.text
