"""Training loop: accumulation, skipped steps, dropout keys."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import toy
from train.lm import loop, loss

# Gradients


@pytest.fixture(name="batch", scope="module")
def _batch():
    generator = np.random.default_rng(1)
    tokens = jnp.asarray(generator.integers(0, 7, (4, toy.CONTEXT + 1)))
    # Ragged: 1, 4, 0 and 2 targets.
    mask = jnp.arange(toy.CONTEXT)[None, :] < jnp.array([1, 4, 0, 2])[:, None]
    return *loss.next_token(tokens), mask


@pytest.fixture(name="loss_and_gradients", scope="module")
def _loss_and_gradients():
    params = toy.start().params

    def call(inputs, targets, mask, accumulation):
        return loop.loss_and_gradients(
            toy.Bigram(),
            params,
            inputs,
            targets,
            mask,
            rng=jax.random.key(0),
            accumulation=accumulation,
        )

    return jax.jit(call, static_argnums=3)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_equals_the_joined_batch(loss_and_gradients, batch, accumulation):
    """Case B102, with ragged masks; case B106: one micro-batch of 4 has no target."""
    whole = loss_and_gradients(*batch, 1)
    parts = loss_and_gradients(*batch, accumulation)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts, whole)
    assert optax.tree.norm(whole[1]) > 0.1


def test_gradients_are_of_the_mean_over_targets(loss_and_gradients, batch):
    """Against the derivative of NumPy's loss, by central differences."""
    inputs, targets, mask = (np.asarray(x) for x in batch)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), toy.start().params)

    def mean_loss():
        table = params["Embed_0"]["embedding"]
        dense = params["Dense_0"]
        z = table[inputs] @ dense["kernel"] + dense["bias"]
        log_normalizer = np.log(np.exp(z).sum(-1))
        nats = log_normalizer - np.take_along_axis(z, targets[..., None], -1)[..., 0]
        return nats[mask].sum() / mask.sum()

    value, gradient = loss_and_gradients(*batch, 2)
    np.testing.assert_allclose(value, mean_loss(), rtol=1e-6)
    kernel = params["Dense_0"]["kernel"]
    for index in [(0, 0), (3, 5)]:
        around = []
        for sign in (1, -1):
            kernel[index] += sign * 1e-4
            around.append(mean_loss())
            kernel[index] -= sign * 1e-4
        slope = (around[0] - around[1]) / 2e-4
        np.testing.assert_allclose(
            gradient["Dense_0"]["kernel"][index], slope, atol=1e-6
        )


def test_no_targets_give_loss_and_gradient_zero(loss_and_gradients, batch):
    """Case B106: nothing counts anywhere."""
    inputs, targets, mask = batch
    value, gradient = loss_and_gradients(inputs, targets, jnp.zeros_like(mask), 2)
    assert value == 0.0
    assert optax.tree.norm(gradient) == 0.0


def test_rows_must_divide_into_micro_batches(loss_and_gradients, batch):
    with pytest.raises(ValueError, match="4 sequences does not divide into 3"):
        loss_and_gradients(*batch, 3)


def test_micro_batches_have_their_own_dropout(batch):
    """Case B054: equal rows in two micro-batches are dropped out differently."""
    params = toy.start().params
    inputs, targets, _ = (x[:1] for x in batch)

    @functools.partial(jax.jit, static_argnums=2)
    def mean_loss(inputs, targets, accumulation):
        return loop.loss_and_gradients(
            toy.Bigram(dropout_rate=0.5),
            params,
            inputs,
            targets,
            rng=jax.random.key(0),
            accumulation=accumulation,
        )[0]

    once = mean_loss(inputs, targets, 1)
    both = mean_loss(*(jnp.concatenate([x, x]) for x in (inputs, targets)), 2)
    assert abs(once - both) > 1e-3


# Steps


@pytest.mark.parametrize("accumulation", [1, 4])
def test_makes_exactly_the_steps_asked_for(accumulation):
    """Case B113: N steps are N batches and N updates, with or without accumulation."""
    shape = {"batch_size": 4 // accumulation, "accumulation": accumulation}
    state, records, _ = toy.fit(
        toy.train_steps(**shape),
        toy.start(),
        train_config=dataclasses.replace(toy.SIX, steps=7, **shape),
    )
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    assert state.step == 7
    assert state.skipped == 0
    assert [int(count) for _, count in counts] == [7, 7]
    assert records[-1]["step"] == 7
    tokens = records[0]["tokens_per_second"] * records[0]["seconds"]
    np.testing.assert_allclose(tokens, 3 * 4 * toy.CONTEXT)


def test_accumulation_draws_the_same_sequences():
    """4 micro-batches of 1 sequence make the updates of 1 batch of 4."""
    whole = toy.train_steps()(toy.start(), toy.random_corpus(), 3)
    cut = toy.train_steps(batch_size=1, accumulation=4)(
        toy.start(), toy.random_corpus(), 3
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), cut, whole)


def test_chunks_do_not_matter_and_compile_once():
    """1 + 2 + 3 steps equal 6 in a row, from one trace; the state is donated."""
    start = toy.start()
    in_a_row, _ = toy.train_steps()(start, toy.random_corpus(), 6)
    assert start.params["Dense_0"]["kernel"].is_deleted()
    traces = len(toy.TRACES)
    state = toy.start()
    for num_steps in (1, 2, 3):
        state, _ = toy.train_steps()(state, toy.random_corpus(), num_steps)
    chex.assert_trees_all_equal(state, in_a_row)
    assert len(toy.TRACES) == traces


def test_metrics_are_means_over_the_steps():
    _, chunk = toy.train_steps()(toy.start(), toy.random_corpus(), 3)
    state, each = toy.start(), []
    for _ in range(3):
        state, metrics = toy.train_steps()(state, toy.random_corpus(), 1)
        each.append(metrics)
    losses = [float(metrics.loss) for metrics in each]
    norms = [float(metrics.gradient_norm) for metrics in each]
    assert len(set(losses)) == 3
    np.testing.assert_allclose(chunk.loss, np.mean(losses), rtol=1e-6)
    np.testing.assert_allclose(chunk.gradient_norm, np.mean(norms), rtol=1e-6)
    # The norm is that before clipping.
    assert min(norms) > 2 * toy.OPTIMIZER.clip_norm
    # Warm-up over 2 updates to 0.1, then a cosine over the 98 that are left.
    rates = [float(metrics.learning_rate) for metrics in each]
    third = 0.05 * (1 + np.cos(np.pi / 98))
    np.testing.assert_allclose(rates, [0.05, 0.1, third], rtol=1e-6)
    assert chunk.learning_rate == rates[-1]


def test_a_step_that_is_not_finite_changes_nothing_but_the_data_step():
    """Case B117: parameters, optimiser state and count stay, the data step moves."""
    good, bad = toy.random_corpus(), jnp.full(100, 7, jnp.int32)
    before, _ = toy.train_steps()(toy.start(), good, 1)
    after, metrics = toy.train_steps()(toy.copy(before), bad, 1)
    assert np.isnan(metrics.loss)
    assert after.step == 2
    assert after.skipped == 1
    chex.assert_trees_all_equal(after.params, before.params)
    chex.assert_trees_all_equal(after.opt_state, before.opt_state)
    # The next update is the second one, at the end of the warm-up.
    final, metrics = toy.train_steps()(toy.copy(after), good, 1)
    np.testing.assert_allclose(metrics.learning_rate, 0.1, rtol=1e-6)
    assert final.step == 3
    assert final.skipped == 1
    assert (final.params["Dense_0"]["bias"] != after.params["Dense_0"]["bias"]).all()


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is():
    def out_of_range(tokens):
        return tokens[:, :-1], tokens[:, 1:] + toy.V

    after, metrics = toy.train_steps(examples=out_of_range)(
        toy.start(), toy.random_corpus(), 1
    )
    assert np.isnan(metrics.loss)
    assert np.isfinite(metrics.gradient_norm)
    assert after.skipped == 1
    chex.assert_trees_all_equal(after.params, toy.start().params)


def test_skipped_steps_are_counted_and_logged(caplog):
    """Case B117: the run goes on, and says what it left out."""
    bad = jnp.full(100, 7, jnp.int32)
    state, records, _ = toy.fit(toy.train_steps(), toy.start(), corpus=bad)
    assert state.step == state.skipped == 6
    assert [record["skipped"] for record in records] == [3, 6]
    assert all(np.isnan(record["loss"]) for record in records)
    assert "steps 1 to 3: 3 skipped, loss or gradient not finite" in caplog.text
    assert "steps 4 to 6: 3 skipped" in caplog.text


def test_each_step_draws_its_own_batch():
    """Of equal parameters, so that only the batches can make the losses differ."""
    losses = {
        float(
            toy.train_steps()(
                toy.start().replace(step=jnp.int32(step)), toy.random_corpus(), 1
            )[1].loss
        )
        for step in range(3)
    }
    assert len(losses) == 3


def test_dropout_differs_between_steps_and_follows_the_seed():
    """Case B054: on equal batches and parameters only the dropout masks change."""
    same = jnp.zeros(100, jnp.int32)

    def losses(**program):
        shape = {"batch_size": 2, "accumulation": 2}
        return [
            float(
                toy.train_steps(**shape, **program)(
                    toy.start().replace(step=jnp.int32(step)), same, 1
                )[1].loss
            )
            for step in range(3)
        ]

    values = losses(dropout_rate=0.5)
    assert len({*values, *losses(dropout_rate=0.5, seed=1)}) == 6
    assert losses(dropout_rate=0.5) == values


def test_learns():
    """In a cycle of 7 tokens each is certain: from log 8 to almost nothing."""
    cycle = jnp.arange(100, dtype=jnp.int32) % 7
    _, records, saved = toy.fit(
        toy.train_steps(), toy.start(), train_config=toy.HUNDRED, corpus=cycle
    )
    assert records[-1]["loss"] < 0.05
    assert saved == [100]
