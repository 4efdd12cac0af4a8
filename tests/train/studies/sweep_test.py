"""Many runs in one program: each is what it would be alone."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import toy
from train.lm import loop, optimizer
from train.studies import batches, sweep, tasks

STEPS = 6
TASK = tasks.Induction(num_symbols=7, length=toy.CONTEXT)
OPTIMIZER = dataclasses.replace(toy.OPTIMIZER, peak_lr=0.02, min_lr=0.002)


def draw(rng, step):
    return batches.draw(TASK, rng, step, batch_size=3)


def begin(seeds, rates):
    return sweep.begin(
        toy.Bigram(),
        seeds,
        rates,
        optimizer_config=OPTIMIZER,
        steps=STEPS,
        context=toy.CONTEXT,
    )


@functools.cache
def steps():
    return sweep.make_steps(toy.Bigram(), draw, optimizer_config=OPTIMIZER, steps=STEPS)


def trained(seeds, rates, on=None):
    on = np.ones(len(seeds), bool) if on is None else np.array(on)
    return steps()(begin(seeds, rates), on, STEPS)


assert_close = functools.partial(chex.assert_trees_all_close, rtol=0, atol=1e-6)


def run_of(runs, index):
    """One of the runs side by side."""
    return jax.tree.map(lambda x: x[index], runs)


def test_a_run_is_the_same_among_others():
    runs, losses = trained([5, 9, 5], [0.02, 0.02, 0.01])
    alone, loss = trained([9], [0.02])
    assert_close(run_of(runs.params, 1), run_of(alone.params, 0))
    np.testing.assert_allclose(losses[1], loss[0], atol=1e-6)
    # One seed under two rates begins with the same parameters and ends with others.
    assert abs(float(losses[0]) - float(losses[2])) > 1e-4


def test_a_rate_is_that_of_the_optimiser():
    """Half the rate in a sweep is half the schedule, weight decay included."""
    config = dataclasses.replace(OPTIMIZER, peak_lr=0.01, min_lr=0.001)
    assert config.weight_decay > 0
    transformation = optimizer.make(config, STEPS)
    run = run_of(begin([3], [0.01]), 0)
    batch_rng, dropout_rng = jax.random.split(run.rng)

    @jax.jit
    def by_hand(state):
        return loop.update(
            toy.Bigram(),
            transformation,
            state,
            *draw(batch_rng, state.step),
            rng=jax.random.fold_in(dropout_rng, state.step),
        )[0]

    state = run.state
    for _ in range(STEPS):
        state = by_hand(state)
    runs, _ = trained([3], [0.01])
    assert_close(run_of(runs.params, 0), state.params)


def test_a_run_that_is_off_keeps_its_state():
    before = jax.tree.map(jnp.copy, begin([5, 9], [0.02, 0.02]).state)
    runs, _ = trained([5, 9], [0.02, 0.02], on=[True, False])
    both, _ = trained([5, 9], [0.02, 0.02])
    chex.assert_trees_all_equal(run_of(runs.state, 1), run_of(before, 1))
    assert_close(run_of(runs.params, 0), run_of(both.params, 0))


def test_seeds_and_rates_go_together():
    with pytest.raises(ValueError, match="2 seeds do not go with 1 rates"):
        begin([1, 2], [0.01])
