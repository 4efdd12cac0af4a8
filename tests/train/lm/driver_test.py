"""The driver: chunks of steps, signals, resuming."""

import dataclasses
import os
import signal
import threading

import chex
import numpy as np
import pytest

from tests.support import toy
from train.lm import checkpoint, driver, loop, optimizer


def test_chunks_end_where_lines_and_checkpoints_are_due():
    settings = dataclasses.replace(toy.SIX, steps=10, checkpoint_every=4)
    _, records, saved = toy.fit(toy.train_steps(), toy.start(), train_config=settings)
    assert [record["step"] for record in records] == [3, 4, 6, 8, 9, 10]
    assert saved == [4, 8, 10]
    rate = optimizer.schedule(toy.OPTIMIZER, toy.HUNDRED.steps)
    for record in records:
        np.testing.assert_allclose(record["learning_rate"], rate(record["step"]))
        assert record["seconds"] > 0
    tokens = [record["tokens_per_second"] * record["seconds"] for record in records]
    np.testing.assert_allclose(tokens, np.array([3, 1, 2, 2, 1, 1]) * 4 * toy.CONTEXT)


def test_a_finished_run_does_nothing():
    state, _, _ = toy.fit(toy.train_steps(), toy.start())
    again, records, saved = toy.fit(toy.train_steps(), toy.copy(state))
    chex.assert_trees_all_equal(again, state)
    assert records == saved == []


def test_six_steps_equal_three_and_three_after_a_restore(tmp_path):
    """Cases B121 and B124: the same bit for bit, the same tree, no second trace."""
    shape = {"batch_size": 2, "accumulation": 2}
    settings = dataclasses.replace(toy.SIX, **shape)
    train_steps = toy.train_steps(dropout_rate=0.5, **shape)
    restored = []

    def save_and_restore(state):
        checkpoint.save(tmp_path, int(state.step), state)
        restored.append(checkpoint.restore(tmp_path, int(state.step), state))

    straight, records, _ = toy.fit(
        train_steps, toy.start(), train_config=settings, save=save_and_restore
    )
    assert [int(state.step) for state in restored] == [3, 6]
    traces = len(toy.TRACES)
    resumed, resumed_records, _ = toy.fit(
        train_steps, restored[0], train_config=settings
    )
    assert len(toy.TRACES) == traces
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

    settings = dataclasses.replace(toy.SIX, steps=9, checkpoint_every=9)
    train_steps = toy.train_steps()

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
                toy.start(),
                toy.random_corpus(),
                train_config=settings,
                context=toy.CONTEXT,
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
        toy.fit(toy.train_steps(), toy.start(), log=fail)
    assert handlers == (
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
    )


def test_trains_in_another_thread():
    """Only the main thread may set handlers."""
    results = []
    train_steps, state = toy.train_steps(), toy.start()
    thread = threading.Thread(
        target=lambda: results.append(toy.fit(train_steps, state))
    )
    thread.start()
    thread.join()
    assert results[0][0].step == 6
