"""Training loop: accumulation, skipped steps, dropout keys, signals, resuming."""

import dataclasses
import functools
import os
import signal
import threading

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train import checkpoint, config, driver, evaluation, loop, loss, optimizer

V = 8
CONTEXT = 4
OPTIMIZER = config.OptimizerConfig(
    peak_lr=0.1,
    min_lr=0.0,
    warmup_steps=2,
    b1=0.9,
    b2=0.95,
    weight_decay=0.01,
    clip_norm=0.1,
)
# The programs are compiled for 100 steps. Most tests make 6 of them.
HUNDRED = config.TrainConfig(
    steps=100, batch_size=4, accumulation=1, log_every=50, checkpoint_every=100
)
SIX = dataclasses.replace(HUNDRED, steps=6, log_every=3, checkpoint_every=3)
TRACES: list[tuple[int, ...]] = []


class Bigram(nn.Module):
    """The smallest model: each token predicts the next one; NaN if it sees token 7."""

    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        x = nn.Embed(V, 6)(tokens)
        x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
        poison = jnp.where(jnp.any(tokens == 7), jnp.nan, 1.0)
        return nn.Dense(V)(x) * poison


def _counted_next_token(tokens):
    TRACES.append(tokens.shape)
    return loss.next_token(tokens)


@functools.cache
def _train_steps(
    *,
    dropout_rate=0.0,
    batch_size=4,
    accumulation=1,
    examples=_counted_next_token,
    seed=0,
):
    return loop.make_train_steps(
        Bigram(dropout_rate),
        jax.random.key(seed),
        optimizer_config=OPTIMIZER,
        train_config=dataclasses.replace(
            HUNDRED, batch_size=batch_size, accumulation=accumulation
        ),
        context=CONTEXT,
        examples=examples,
    )


@functools.cache
def _initial_state():
    return loop.init_state(
        Bigram(),
        jax.random.key(0),
        optimizer_config=OPTIMIZER,
        train_config=HUNDRED,
        context=CONTEXT,
    )


def _copy(tree):
    return jax.tree.map(jnp.copy, tree)


def _start():
    """A copy, which may be donated; on a device, as a restored state is.

    Parameters do not depend on the rate of dropout, so every program starts from these.
    """
    return jax.device_put(_copy(_initial_state()), jax.devices()[0])


def _corpus():
    return jnp.asarray(np.random.default_rng(0).integers(0, 7, 100), jnp.int32)


def _fit(train_steps, state, *, train_config=SIX, corpus=None, log=None, save=None):
    """Runs `driver.fit`; returns the state, the records and the steps saved."""
    records: list[dict[str, float]] = []
    saved: list[int] = []
    state = driver.fit(
        train_steps,
        state,
        _corpus() if corpus is None else corpus,
        train_config=train_config,
        context=CONTEXT,
        log=log or records.append,
        save=save or (lambda state: saved.append(int(state.step))),
    )
    return state, records, saved


# Gradients


@pytest.fixture(name="batch", scope="module")
def _batch():
    generator = np.random.default_rng(1)
    tokens = jnp.asarray(generator.integers(0, 7, (4, CONTEXT + 1)))
    # Ragged: 1, 4, 0 and 2 targets.
    mask = jnp.arange(CONTEXT)[None, :] < jnp.array([1, 4, 0, 2])[:, None]
    return *loss.next_token(tokens), mask


@pytest.fixture(name="loss_and_gradients", scope="module")
def _loss_and_gradients():
    params = _start().params

    def call(inputs, targets, mask, accumulation):
        return loop.loss_and_gradients(
            Bigram(),
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
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), _start().params)

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
    params = _start().params
    inputs, targets, _ = (x[:1] for x in batch)

    @functools.partial(jax.jit, static_argnums=2)
    def mean_loss(inputs, targets, accumulation):
        return loop.loss_and_gradients(
            Bigram(dropout_rate=0.5),
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
    state, records, _ = _fit(
        _train_steps(**shape),
        _start(),
        train_config=dataclasses.replace(SIX, steps=7, **shape),
    )
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    assert state.step == 7
    assert state.skipped == 0
    assert [int(count) for _, count in counts] == [7, 7]
    assert records[-1]["step"] == 7
    tokens = records[0]["tokens_per_second"] * records[0]["seconds"]
    np.testing.assert_allclose(tokens, 3 * 4 * CONTEXT)


def test_accumulation_draws_the_same_sequences():
    """4 micro-batches of 1 sequence make the updates of 1 batch of 4."""
    whole = _train_steps()(_start(), _corpus(), 3)
    cut = _train_steps(batch_size=1, accumulation=4)(_start(), _corpus(), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), cut, whole)


def test_chunks_do_not_matter_and_compile_once():
    """1 + 2 + 3 steps equal 6 in a row, from one trace; the state is donated."""
    start = _start()
    in_a_row, _ = _train_steps()(start, _corpus(), 6)
    assert start.params["Dense_0"]["kernel"].is_deleted()
    traces = len(TRACES)
    state = _start()
    for num_steps in (1, 2, 3):
        state, _ = _train_steps()(state, _corpus(), num_steps)
    chex.assert_trees_all_equal(state, in_a_row)
    assert len(TRACES) == traces


def test_metrics_are_means_over_the_steps():
    _, chunk = _train_steps()(_start(), _corpus(), 3)
    state, each = _start(), []
    for _ in range(3):
        state, metrics = _train_steps()(state, _corpus(), 1)
        each.append(metrics)
    losses = [float(metrics.loss) for metrics in each]
    norms = [float(metrics.gradient_norm) for metrics in each]
    assert len(set(losses)) == 3
    np.testing.assert_allclose(chunk.loss, np.mean(losses), rtol=1e-6)
    np.testing.assert_allclose(chunk.gradient_norm, np.mean(norms), rtol=1e-6)
    # The norm is that before clipping.
    assert min(norms) > 2 * OPTIMIZER.clip_norm
    # Warm-up over 2 updates to 0.1, then a cosine over the 98 that are left.
    rates = [float(metrics.learning_rate) for metrics in each]
    third = 0.05 * (1 + np.cos(np.pi / 98))
    np.testing.assert_allclose(rates, [0.05, 0.1, third], rtol=1e-6)
    assert chunk.learning_rate == rates[-1]


def test_a_step_that_is_not_finite_changes_nothing_but_the_data_step():
    """Case B117: parameters, optimiser state and count stay, the data step moves."""
    good, bad = _corpus(), jnp.full(100, 7, jnp.int32)
    before, _ = _train_steps()(_start(), good, 1)
    after, metrics = _train_steps()(_copy(before), bad, 1)
    assert np.isnan(metrics.loss)
    assert after.step == 2
    assert after.skipped == 1
    chex.assert_trees_all_equal(after.params, before.params)
    chex.assert_trees_all_equal(after.opt_state, before.opt_state)
    # The next update is the second one, at the end of the warm-up.
    final, metrics = _train_steps()(_copy(after), good, 1)
    np.testing.assert_allclose(metrics.learning_rate, 0.1, rtol=1e-6)
    assert final.step == 3
    assert final.skipped == 1
    assert (final.params["Dense_0"]["bias"] != after.params["Dense_0"]["bias"]).all()


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is():
    def out_of_range(tokens):
        return tokens[:, :-1], tokens[:, 1:] + V

    after, metrics = _train_steps(examples=out_of_range)(_start(), _corpus(), 1)
    assert np.isnan(metrics.loss)
    assert np.isfinite(metrics.gradient_norm)
    assert after.skipped == 1
    chex.assert_trees_all_equal(after.params, _start().params)


def test_skipped_steps_are_counted_and_logged(caplog):
    """Case B117: the run goes on, and says what it left out."""
    bad = jnp.full(100, 7, jnp.int32)
    state, records, _ = _fit(_train_steps(), _start(), corpus=bad)
    assert state.step == state.skipped == 6
    assert [record["skipped"] for record in records] == [3, 6]
    assert all(np.isnan(record["loss"]) for record in records)
    assert "steps 1 to 3: 3 skipped, loss or gradient not finite" in caplog.text
    assert "steps 4 to 6: 3 skipped" in caplog.text


def test_each_step_draws_its_own_batch():
    """Of equal parameters, so that only the batches can make the losses differ."""
    losses = {
        float(
            _train_steps()(_start().replace(step=jnp.int32(step)), _corpus(), 1)[1].loss
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
                _train_steps(**shape, **program)(
                    _start().replace(step=jnp.int32(step)), same, 1
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
    _, records, saved = _fit(
        _train_steps(), _start(), train_config=HUNDRED, corpus=cycle
    )
    assert records[-1]["loss"] < 0.05
    assert saved == [100]


# The driver


def test_chunks_end_where_lines_and_checkpoints_are_due():
    settings = dataclasses.replace(SIX, steps=10, checkpoint_every=4)
    _, records, saved = _fit(_train_steps(), _start(), train_config=settings)
    assert [record["step"] for record in records] == [3, 4, 6, 8, 9, 10]
    assert saved == [4, 8, 10]
    rate = optimizer.schedule(OPTIMIZER, HUNDRED.steps)
    for record in records:
        np.testing.assert_allclose(record["learning_rate"], rate(record["step"]))
        assert record["seconds"] > 0
    tokens = [record["tokens_per_second"] * record["seconds"] for record in records]
    np.testing.assert_allclose(tokens, np.array([3, 1, 2, 2, 1, 1]) * 4 * CONTEXT)


def test_a_finished_run_does_nothing():
    state, _, _ = _fit(_train_steps(), _start())
    again, records, saved = _fit(_train_steps(), _copy(state))
    chex.assert_trees_all_equal(again, state)
    assert records == saved == []


def test_six_steps_equal_three_and_three_after_a_restore(tmp_path):
    """Cases B121 and B124: the same bit for bit, the same tree, no second trace."""
    shape = {"batch_size": 2, "accumulation": 2}
    settings = dataclasses.replace(SIX, **shape)
    train_steps = _train_steps(dropout_rate=0.5, **shape)
    restored = []

    def save_and_restore(state):
        checkpoint.save(tmp_path, int(state.step), state)
        restored.append(checkpoint.restore(tmp_path, int(state.step), state))

    straight, records, _ = _fit(
        train_steps, _start(), train_config=settings, save=save_and_restore
    )
    assert [int(state.step) for state in restored] == [3, 6]
    traces = len(TRACES)
    resumed, resumed_records, _ = _fit(train_steps, restored[0], train_config=settings)
    assert len(TRACES) == traces
    chex.assert_trees_all_equal(resumed, straight, strict=True)
    for name in ("step", "loss", "gradient_norm", "learning_rate"):
        assert resumed_records[0][name] == records[1][name]


class Terminated(Exception):
    """What a handler of SIGTERM may raise."""


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)],
)
def test_a_signal_waits_for_the_chunk_and_the_state_is_saved(number, expected):
    """It comes in the middle of the second chunk, where there is no state to save."""

    def terminate(number, frame):
        raise Terminated

    settings = dataclasses.replace(SIX, steps=9, checkpoint_every=9)
    train_steps = _train_steps()

    class Interrupted:
        lower = train_steps.lower
        trace = train_steps.trace
        calls = 0

        def __call__(self, *args):
            self.calls += 1
            if self.calls == 2:
                os.kill(os.getpid(), number)
            return train_steps(*args)

    records: list[dict[str, float]] = []
    saved: list[loop.State] = []
    before = signal.signal(signal.SIGTERM, terminate)
    # Whoever starts the tests in the background has it ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(expected):
            driver.fit(
                Interrupted(),
                _start(),
                _corpus(),
                train_config=settings,
                context=CONTEXT,
                log=records.append,
                save=saved.append,
            )
        assert signal.getsignal(signal.SIGTERM) is terminate
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)
    assert [record["step"] for record in records] == [3, 6]
    assert [int(state.step) for state in saved] == [6]
    assert not saved[0].params["Dense_0"]["kernel"].is_deleted()


def test_an_error_passes_and_the_handlers_come_back():
    def fail(record):
        raise OSError("disk full")

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="disk full"):
        _fit(_train_steps(), _start(), log=fail)
    assert handlers == (
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
    )


def test_trains_in_another_thread():
    """Only the main thread may set handlers."""
    results = []
    train_steps, state = _train_steps(), _start()
    thread = threading.Thread(target=lambda: results.append(_fit(train_steps, state)))
    thread.start()
    thread.join()
    assert results[0][0].step == 6


# Evaluation


def test_evaluation_is_a_mean_over_targets_for_any_batch_size():
    """Case B107: 11 ragged windows in batches of 1, 3 and 8, against NumPy."""
    generator = np.random.default_rng(3)
    tokens = generator.integers(0, 7, (11, CONTEXT + 1)).astype(np.int32)
    mask = np.arange(CONTEXT)[None, :] < generator.integers(0, CONTEXT + 1, (11, 1))
    params = jax.tree.map(np.asarray, _start().params)
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
            Bigram(dropout_rate=0.5),
            params,
            tokens,
            mask,
            batch_size=batch_size,
        )
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_evaluation_without_targets(caplog):
    """Case B106: 0 and a logged 'no targets'."""
    tokens, mask = np.zeros((2, CONTEXT + 1), np.int32), np.zeros((2, CONTEXT), bool)
    value = evaluation.evaluate(Bigram(), _start().params, tokens, mask, batch_size=2)
    assert value == 0.0
    assert "no targets" in caplog.text
