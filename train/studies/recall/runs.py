"""The runs of one mixer of one width: a sweep of learning rates, then the report.

    sweep      seeds x rates, judged on the split 'validation', to choose a rate
    report     as many fresh seeds at that rate, judged on the split 'test'

Both phases run one program of R runs, compiled once. A run that reaches the goal on the
validation split is switched off, in either phase. The sweep ends when all seeds of one
rate are off, the report when all runs are off, and either one when the steps are spent.
Run r of the report has the same seed, and so the same batches, for every mixer:
differences between mixers are paired by it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer

from models import config as model_config
from models import transformer
from train.studies import batches, sweep, tasks
from train.studies.recall import by_distance, config, table

# (phase, steps done, accuracy of each run [R]) -> None.
Announce = Callable[[str, int, np.ndarray], None]
SWEEP, REPORT = "sweep", "report"


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled functions of both phases.

    Attributes:
      settings: configuration of the study.
      steps: the training steps of `sweep.make_steps`.
      right: (params [R ...], batch [R B T]) -> True [R B T] where an answer is right.
      announce: called with phase, steps and accuracies after every validation.
    """

    settings: config.StudyConfig
    steps: sweep.Steps
    right: Callable[..., Any]
    announce: Announce

    def batch(self, seeds: Sequence[int], split: str, index: int) -> batches.Batch:
        """Draws the rows [R B T] on which the runs are judged, by their seeds."""
        task, size = self.settings.rows_of, self.settings.runs.rows
        return _judged(task, np.asarray(seeds, np.uint32), split, size, index)


def run(
    settings: config.StudyConfig, mixer: str, width: int, *, announce: Announce
) -> tuple[list[table.Row], list[table.DistanceRow]]:
    """Sweeps the rates, chooses one, and reports one mixer of one width.

    Args:
      settings: configuration of the study.
      mixer: name of the mixer.
      width: E.
      announce: called with phase, steps and accuracies after every validation.

    Returns:
      A row for each run of the sweep, then of the report; and for the task recall a row
      for each reported run and distance.
    """
    task, count = settings.rows_of, settings.runs.count
    shape = settings.model.of(mixer, width, task.length)
    model = transformer.CausalLM(shape, task.vocab_size)
    factors = np.repeat(settings.runs.swept, settings.runs.seeds)
    rates = (settings.optimizer.peak_lr * factors).tolist()
    sweep_seeds, report_seeds = seeds(settings)
    both = sweep.begin(
        model,
        [*sweep_seeds, *report_seeds],
        [*rates, *rates],
        optimizer_config=settings.optimizer,
        steps=settings.runs.steps,
        context=task.length,
    )
    swept, reported = _halves(both)
    program = Program(settings, _steps(model, settings), _right(model), announce)

    swept, used, reached = train(
        program, swept, sweep_seeds, SWEEP, groups=len(settings.runs.swept)
    )
    row = functools.partial(
        table.Row,
        settings.task,
        mixer,
        width,
        sum(x.size for x in jax.tree.leaves(swept.params)) // count,
        carried(shape, task.length),
    )
    rows = list(
        map(functools.partial(row, "validation"), rates, sweep_seeds, used, reached)
    )
    rate = choose(rows, goal=settings.runs.goal)

    factor = jnp.full(count, rate / settings.optimizer.peak_lr, reported.factor.dtype)
    reported = reported.replace(factor=factor)
    reported, used, _ = train(program, reported, report_seeds, REPORT)
    accuracy, tallies = _test(program, reported.params, report_seeds)
    tested = functools.partial(row, "test", rate)
    rows += list(map(tested, report_seeds, used, accuracy))
    return rows, [
        table.DistanceRow(mixer, width, seed, distance, int(right), int(asked))
        for seed, of_run in zip(report_seeds, tallies, strict=True)
        for distance, (right, asked) in enumerate(of_run.T)
        if asked
    ]


def seeds(settings: config.StudyConfig) -> tuple[list[int], list[int]]:
    """Returns the seeds of the sweep, the same for each rate, and of the report."""
    first, count = settings.seed + 1, settings.runs.seeds
    swept = list(range(first, first + count))
    fresh = list(range(first + count, first + count + settings.runs.count))
    return swept * len(settings.runs.swept), fresh


def carried(shape: model_config.CausalLMConfig, length: int) -> int:
    """Counts the numbers that all layers carry after `length` tokens.

    The last inputs that convolutions keep are counted too.
    """
    return sum(
        shape.mixer(layer).state_size(shape, layer, length)
        + ((shape.convolution_of(layer) or 1) - 1) * shape.width
        for layer in range(shape.num_layers)
    )


def choose(rows: Sequence[table.Row], *, goal: float) -> float:
    """Chooses the rate of the highest mean accuracy; among equals, the fastest.

    Args:
      rows: the runs of the sweep.
      goal: accuracy at which a run stops; a higher one does not count as better.
    """

    def merit(rate: float) -> tuple[float, int]:
        of_rate = [row for row in rows if row.rate == rate]
        accuracy = float(np.mean([min(row.accuracy, goal) for row in of_rate]))
        return accuracy, -max(row.steps for row in of_rate)

    return max(dict.fromkeys(row.rate for row in rows), key=merit)


@jax.jit
def _halves(both: sweep.Runs) -> tuple[sweep.Runs, sweep.Runs]:
    """Splits 2 R runs, which are drawn at once to compile that once, into halves."""
    count = len(both.factor) // 2
    return (
        jax.tree.map(lambda x: x[:count], both),
        jax.tree.map(lambda x: x[count:], both),
    )


def _steps(model: transformer.CausalLM, settings: config.StudyConfig) -> sweep.Steps:
    def draw(rng: Array, step: Array) -> batches.Batch:
        size = settings.runs.batch_size
        return batches.draw(settings.rows_of, rng, step, batch_size=size)

    return sweep.make_steps(
        model,
        draw,
        optimizer_config=settings.optimizer,
        steps=settings.runs.steps,
    )


def _right(model: transformer.CausalLM) -> Callable[..., Any]:
    hits = jax.vmap(
        jax.vmap(lambda *target: batches.hits(*(x[None, None] for x in target))[0])
    )

    @jax.jit
    @jax.vmap
    def right(params: Any, batch: batches.Batch) -> Array:
        logits: Any = model.apply({"params": params}, batch.inputs, deterministic=True)
        return hits(logits, batch.targets, batch.mask) > 0

    return right


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _judged(
    task: tasks.Task, seeds: Integer[Array, "R"], split: str, size: int, index: Array
) -> batches.Batch:
    """Draws the rows [R B T] of a split on which each run is judged, by its seed."""

    def draw(seed: Any) -> batches.Batch:
        return batches.draw(
            task, batches.split_rng(seed, split), index, batch_size=size
        )

    return jax.vmap(draw)(seeds)


def train(
    program: Program,
    runs: sweep.Runs,
    seeds: Sequence[int],
    phase: str,
    *,
    groups: int = 1,
) -> tuple[sweep.Runs, list[int], list[float]]:
    """Trains until all runs of one group reach the goal or the steps are spent.

    Args:
      program: the compiled functions.
      runs: R runs before their first step.
      seeds: seeds of the runs.
      phase: name of the phase, for the announcements.
      groups: number of groups of equal size into which the runs are divided in order.

    Returns:
      The runs, the number of steps of each, and their accuracies on the validation
      split.
    """
    limits = program.settings.runs
    batch = program.batch(seeds, "validation", 0)
    asked = _count(batch.mask)
    on = np.ones(limits.count, bool)
    used = np.zeros(limits.count, int)
    done = 0
    while done < limits.steps and on.reshape(groups, -1).any(axis=1).all():
        count = min(limits.every, limits.steps - done)
        runs, _ = program.steps(runs, on, count)
        done += count
        used[on] += count
        accuracy = _count(program.right(runs.params, batch)) / asked
        on &= accuracy < limits.goal
        program.announce(phase, done, accuracy)
    return runs, used.tolist(), accuracy.tolist()


def _test(
    program: Program, params: Any, seeds: Sequence[int]
) -> tuple[list[float], Int[np.ndarray, "R 2 T"]]:
    """Judges each run on the test split.

    Returns:
      The accuracies, and for the task recall right answers and questions by distance.
    """
    limits, task = program.settings.runs, program.settings.rows_of
    answered = asked = np.zeros(limits.count, int)
    tallies = np.zeros((limits.count, 2, task.length), int)
    for index in range(limits.test_batches):
        batch = program.batch(seeds, "test", index)
        right = program.right(params, batch)
        answered, asked = answered + _count(right), asked + _count(batch.mask)
        if isinstance(task, tasks.Recall):
            arrays = map(np.asarray, (right, batch.inputs, batch.mask))
            tallies += list(map(by_distance.tally, *arrays))
    return (answered / asked).tolist(), tallies


def _count(answers: Any) -> Int[np.ndarray, "R"]:
    """Counts the True entries [R B T] of each run."""
    return np.asarray(answers).sum(axis=(1, 2))
