"""The driver around the training loop: chunks of steps, records, checkpoints, signals.

A run calls a compiled program once for each chunk of steps. The state can be read only
between chunks, so only there is a run logged, saved or interrupted.
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
    """Trains to the last step; logs records and saves states.

    The steps run in chunks, which end at each multiple of `log_every` and of
    `checkpoint_every` and at the last step. A SIGINT or SIGTERM during a chunk waits
    for its end, because the old state is donated and the new one does not exist yet.
    Then the state is saved, and the signal is passed to its previous handler. While the
    program compiles, before the first chunk, signals take effect at once.

    Args:
      train_steps: the compiled steps that `loop.make_train_steps` returns.
      state: the state from which to start or continue; it is donated.
      corpus: token ids of the training split.
      train_config: the number of steps, the sequences of a step, and the intervals
        `log_every` and `checkpoint_every`.
      context: T, the number of tokens that the model sees at once.
      log: called after each chunk with its record: `step`, `loss` (nats per token),
        `gradient_norm`, `learning_rate`, `skipped` (number of skipped steps so far),
        `seconds` (without compilation, logging and saving) and `tokens_per_second`.
      save: called with the state after every `checkpoint_every` steps, after the last
        step and after an interruption, in each case after `log`.

    Returns:
      The state after the last step, or after the chunk that a signal interrupted if
      the previous handler returns.
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
    """Collects SIGINT and SIGTERM within the block, and raises them again after it."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        # Python handles signals in the main thread only, so none can interrupt here.
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
