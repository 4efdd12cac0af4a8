"""The driver around the training loop: chunks of steps, records, checkpoints, signals.

The steps of a run are done in chunks, each one call of a compiled program. Between
chunks there is a state, and there alone can a run be looked at, saved or interrupted.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import jax
from absl import logging
from jaxtyping import Array, Int

from train import config
from train.lm import loop


def fit(
    train_steps: loop.TrainSteps,
    state: loop.State,
    corpus: Int[Array, "M"],
    *,
    train_config: config.TrainConfig,
    context: int,
    log: Callable[[dict[str, float]], None],
    save: Callable[[loop.State], None],
) -> loop.State:
    """Trains to the last step, logging and saving on the way.

    The steps run in chunks that end at each multiple of `log_every` and of
    `checkpoint_every` and at the last step. SIGINT and SIGTERM wait for the end of a
    chunk, because in the middle of it there is no state: the old one is donated. Then
    the state is saved and the signal goes to the handler that would have had it. While
    the program compiles, before the first chunk, signals act at once.

    Args:
      train_steps: of `loop.make_train_steps`.
      state: where to start or to continue; donated.
      corpus: token ids of the training split.
      train_config: the number of steps, of sequences a step, and the two intervals.
      context: T.
      log: takes the record of each chunk: `step`, `loss` (nats per token),
        `gradient_norm`, `learning_rate`, `skipped` (steps so far), `seconds`
        (compilation, logging and saving excluded) and `tokens_per_second`.
      save: stores a state, every `checkpoint_every` steps, at the end and when
        interrupted, after the record was logged.

    Returns:
      The state after the last step.
    """
    tokens_per_step = train_config.batch_size * train_config.accumulation * context
    step = saved = int(state.step)
    skipped = int(state.skipped)
    if step >= train_config.steps:
        return state
    train_steps.lower(state, corpus, 0).compile()
    with _deferred_signals() as received:
        while step < train_config.steps and not received:
            end = _chunk_end(step, train_config)
            start = time.perf_counter()
            state, metrics = train_steps(state, corpus, end - step)
            jax.block_until_ready(state)
            seconds = time.perf_counter() - start
            newly_skipped = int(state.skipped) - skipped
            if newly_skipped:
                logging.warning(
                    "steps %d to %d: %d skipped, loss or gradient not finite",
                    step + 1,
                    end,
                    newly_skipped,
                )
            tokens = (end - step) * tokens_per_step
            step, skipped = end, skipped + newly_skipped
            log(
                {
                    "step": step,
                    "loss": float(metrics.loss),
                    "gradient_norm": float(metrics.gradient_norm),
                    "learning_rate": float(metrics.learning_rate),
                    "skipped": skipped,
                    "seconds": seconds,
                    "tokens_per_second": tokens / seconds,
                }
            )
            if step % train_config.checkpoint_every == 0:
                save(state)
                saved = step
        if step > saved:
            save(state)
    return state


def _chunk_end(step: int, train_config: config.TrainConfig) -> int:
    intervals = train_config.log_every, train_config.checkpoint_every
    return min(train_config.steps, *(step - step % n + n for n in intervals))


@contextlib.contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, and raises them again when the block is left."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        # Python handles signals in its main thread only: none can interrupt here.
        yield received
        return
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for received_number in received:
        signal.raise_signal(received_number)
