"""The runs of the study: gradients before and after training; times of a step.

Both models have the same seeds: run r of one reads the same batches as run r of the
other, so that their differences are paired.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from models import config as model_config
from models import transformer
from train.lm import evaluation, loss
from train.report import stopwatch
from train.studies import batches, sweep
from train.studies.reach import gradient_norms, settings
from train.text import data

# Steps between two updates of the progress bar, and rows of an evaluation batch.
CHUNK, EVALUATION_ROWS = 20, 32
# (values, description) -> the values, one after another, while a bar shows progress.
Track = Callable[[list[int], str], Iterable[int]]


class Measurements(NamedTuple):
    """What was measured of one model.

    Attributes:
      parameters: number of parameters of a run.
      losses: of each run on the validation split, in nats per token.
      norms: log norms of `gradient_norms.of_runs`, by stage.
    """

    parameters: int
    losses: Float[np.ndarray, "R"]
    norms: dict[str, Float[np.ndarray, "R T"]]


def measure(
    model_config: model_config.CausalLMConfig,
    config: settings.Config,
    corpus: data.Corpus,
    *,
    track: Track,
    words: str,
) -> Measurements:
    """Trains all runs of one model, and measures their gradients before and after.

    Args:
      model_config: configuration of the model.
      config: configuration of the study.
      corpus: text to train and to measure on.
      track: shows progress.
      words: description beside the progress.
    """
    vocab_size = corpus.tokenizer.vocab_size
    context = model_config.context
    model = transformer.CausalLM(model_config, vocab_size)
    rows = text_rows(corpus, rows=config.rows, context=context)
    runs = sweep.begin(
        model,
        range(config.seed, config.seed + config.runs),
        [config.optimizer.peak_lr] * config.runs,
        optimizer_config=config.optimizer,
        steps=config.steps,
        context=context,
    )

    def draw(rng: Array, step: Array, tokens: Array) -> batches.Batch:
        batch = data.sample_batch(
            tokens, rng, step, batch_size=config.batch_size, context=context
        )
        inputs, targets = loss.next_token(batch)
        return batches.Batch(inputs, targets, jnp.ones(targets.shape, bool))

    def norms() -> np.ndarray:
        return np.asarray(
            gradient_norms.of_runs(model_config, vocab_size, runs.params, rows)
        )

    before = norms()
    train = sweep.make_steps(
        model, draw, optimizer_config=config.optimizer, steps=config.steps
    )
    on, tokens = np.ones(config.runs, bool), jnp.asarray(corpus.train)
    for start in track(list(range(0, config.steps, CHUNK)), words):
        steps = min(CHUNK, config.steps - start)
        runs, _ = jax.block_until_ready(train(runs, on, steps, tokens))
    return Measurements(
        parameters=sum(x.size for x in jax.tree.leaves(runs.params)) // config.runs,
        losses=np.array(list(_losses(model, runs.params, corpus, context=context))),
        norms=dict(zip(settings.STAGES, (before, norms()), strict=True)),
    )


def text_rows(corpus: data.Corpus, *, rows: int, context: int) -> np.ndarray:
    """Takes rows [B T] at even distances from the validation split.

    Args:
      corpus: the text.
      rows: B, number of rows.
      context: T, tokens of a row.

    Raises:
      ValueError: the split has fewer rows.
    """
    whole = (corpus.validation.size - 1) // context
    if whole < rows:
        raise ValueError(
            f"the validation split has {whole} rows of {context} tokens, "
            f"not rows={rows}"
        )
    windows, _ = data.windows(corpus.validation, context=context)
    return windows[np.linspace(0, whole - 1, rows).astype(int), :-1]


def _losses(
    model: nn.Module, params: optax.Params, corpus: data.Corpus, *, context: int
) -> Iterator[float]:
    """Computes the loss of each run on the whole validation split."""
    windows, mask = data.windows(corpus.validation, context=context)
    for r in range(len(jax.tree.leaves(params)[0])):
        of_run = jax.tree.map(lambda x, r=r: x[r], params)
        yield evaluation.evaluate(
            model, of_run, windows, mask, batch_size=EVALUATION_ROWS
        )


def step_times(
    config: settings.Config, *, track: Track
) -> dict[str, list[list[float]]]:
    """Times forward and backward of one layer of each model, batch 1, in turns.

    Args:
      config: configuration of the study, whose `timing` lists the lengths.
      track: shows progress.

    Returns:
      For each model, and each length: first quartile, median and third quartile in
      milliseconds.
    """
    timing = config.timing
    quartiles: dict[str, list[list[float]]] = {name: [] for name in settings.MODELS}
    layers = {name: _layer(config.layer(name)) for name in settings.MODELS}
    for length in track(timing.lengths, "timing a step at T = {}"):
        runs = {name: step(length) for name, step in layers.items()}
        turns = stopwatch.turns(timing.rounds, seconds=timing.seconds)
        for name, seconds in stopwatch.interleaved(runs, turns).items():
            quartiles[name].append(stopwatch.quartiles(seconds))
    return quartiles


def _layer(
    config: model_config.CausalLMConfig,
) -> Callable[[int], Callable[[], Any]]:
    """Makes a layer, and returns what compiles its step for a length."""
    module = config.mixer(0).make(config, 0)
    init_rng, rng = jax.random.split(jax.random.key(0))

    def inputs(length: int) -> Array:
        return jax.random.normal(rng, (1, length, config.width), config.dtype)

    init = functools.partial(module.init, deterministic=True)
    variables = jax.jit(init)(init_rng, inputs(1))

    def energy(variables: Any, x: Array) -> Array:
        y: Any = module.apply(variables, x, deterministic=True)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def step(length: int) -> Callable[[], Any]:
        x = inputs(length)
        gradients = jax.jit(jax.grad(energy, argnums=(0, 1)))
        compiled = gradients.lower(variables, x).compile()
        return lambda: jax.block_until_ready(compiled(variables, x))

    return step
