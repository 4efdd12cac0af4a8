"""One run from text to report: train, evaluate, verify, draw.

What it leaves behind is listed in `train.workdir`. A run that was interrupted goes on
from its last checkpoint, and ends as if it had not been.
"""

import dataclasses
import pathlib
import platform
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import transformer
from train import config as config_lib
from train import workdir
from train.lm import checkpoint, display, driver, evaluation, loop, loss, metrics
from train.proofs import causality
from train.text import baselines, data

EVALUATION_BATCH = 64
PROFILED_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run is made of; `prepare` makes one.

    Attributes:
      model: the language model.
      corpus: its text and tokenizer.
      config: what to do.
      path: the workdir.
      profile: whether a jax profiler trace of a few steps is written.
      tensorboard: whether TensorBoard event files are written.
    """

    model: transformer.CausalLM
    corpus: data.Corpus
    config: config_lib.Config
    path: pathlib.Path
    profile: bool
    tensorboard: bool


def prepare(
    config: config_lib.Config,
    path: pathlib.Path,
    *,
    profile: bool,
    tensorboard: bool,
) -> Run:
    """Checks all that a run needs before anything is written, then claims the workdir.

    Args:
      config: of the run.
      path: the workdir.
      profile: whether a jax profiler trace of a few steps will be written.
      tensorboard: whether TensorBoard event files will be written.

    Returns:
      The run, ready to start.

    Raises:
      ValueError: the text or the workdir cannot be used, parts of the configuration
        do not fit each other, or a package is missing.
    """
    corpus = workdir.load_corpus(config)
    model = transformer.CausalLM(config.model, corpus.tokenizer.vocab_size)

    def one_step(rng: jax.Array, tokens: jax.Array) -> Any:
        state, train_steps = loop.begin(model, rng, config, examples=loss.next_token)
        return train_steps(state, tokens, 1)

    # Traced only: an implementation that cannot honour the model's arguments raises.
    jax.eval_shape(one_step, jax.random.key(config.seed), corpus.train)
    if tensorboard:
        metrics.require_tensorboard()
    workdir.claim(path, config, corpus)
    metrics.read(path)  # raises where a rerun could not go on
    return Run(model, corpus, config, path, profile, tensorboard)


def execute(run: Run) -> bool:
    """Trains, or continues to train, a language model; verifies and reports it.

    Args:
      run: what `prepare` returns.

    Returns:
      Whether the model was verified to be causal.
    """
    began = time.perf_counter()
    model, corpus, config, path = run.model, run.corpus, run.config, run.path
    train_rng, sample_rng, audit_rng = loop.keys(config.seed)
    state, train_steps = loop.begin(model, train_rng, config, examples=loss.next_token)
    num_parameters = sum(x.size for x in jax.tree.leaves(state.params))
    print(
        f"{corpus.path}: {corpus.train.size:,} tokens to train, "
        f"{corpus.validation.size:,} to validate, {model.vocab_size} ids; "
        f"{num_parameters:,} parameters",
        flush=True,
    )
    state = _train(run, train_steps, state)
    records = metrics.read(path)
    val_loss = validation_loss(run, state.params)
    baseline_losses = baselines.nats_per_token(
        corpus.train, corpus.validation, vocab_size=model.vocab_size
    )
    display.draw_loss(path / workdir.FIGURES, records, baseline_losses)
    if any(map(config.model.is_attention, range(config.model.num_layers))):
        display.draw_attention(path / workdir.FIGURES, model, state.params, corpus)
    print("verifying causality: edits, gradients, learning ...", flush=True)
    proofs = causality.prove(model, state.params, corpus.validation, config, audit_rng)
    losses = {
        "val_loss": val_loss,
        "bits_per_byte": display.bits_per_byte(val_loss, corpus),
        "baselines": baseline_losses,
    }
    proofs += causality.alarm(losses)
    causality.draw(path / workdir.FIGURES, proofs)
    workdir.update_report(
        path,
        {
            "steps": int(state.step),
            "parameters": num_parameters,
            **losses,
            "causality": causality.as_json(proofs),
            "tokens_per_second": _tokens_per_second(records),
            "seconds": time.perf_counter() - began,
            "data": {
                "path": corpus.path,
                "sha256": corpus.sha256,
                "tokens": corpus.num_tokens,
            },
            "versions": _versions(),
        },
    )
    display.show_losses({**baseline_losses, "this model": val_loss}, corpus)
    display.show_sample(model, state.params, corpus, sample_rng)
    causality.show(proofs)
    print(f"workdir: {path}")
    return causality.passed(proofs)


def _train(run: Run, train_steps: loop.TrainSteps, state: loop.State) -> loop.State:
    """Trains from the last checkpoint, or from this state, to the last step."""
    config, path = run.config, run.path
    checkpoints = path / workdir.CHECKPOINTS
    step = checkpoint.latest_step(checkpoints)
    if step is not None:
        state = checkpoint.restore(checkpoints, step, state)
        print(f"continuing from step {step} of {config.train.steps}", flush=True)
    start = int(state.step)
    tokens = jnp.asarray(run.corpus.train)
    with (
        metrics.writer(path, start=start, tensorboard=run.tensorboard) as write,
        metrics.progress(config.train.steps, start=start) as show,
    ):

        def log(record: metrics.Record) -> None:
            write(record)
            show(record)

        def save(state: loop.State) -> None:
            step = int(state.step)
            # Not where a run was interrupted: that would leave a trace in its records.
            if step % config.train.checkpoint_every == 0 or step == config.train.steps:
                val_loss = validation_loss(run, state.params)
                write({"step": step, "val_loss": val_loss})
            checkpoint.save(checkpoints, step, state)

        if run.profile:
            _profile(path / workdir.PROFILE, train_steps, state, tokens)
        return driver.fit(
            train_steps,
            state,
            tokens,
            train_config=config.train,
            context=config.model.context,
            log=log,
            save=save,
        )


def _profile(
    folder: pathlib.Path,
    train_steps: loop.TrainSteps,
    state: loop.State,
    tokens: jax.Array,
) -> None:
    """Traces a few steps of a copy, so that the run is the same with and without."""
    state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    train_steps.lower(state, tokens, PROFILED_STEPS).compile()  # not in the trace
    with jax.profiler.trace(folder):
        jax.block_until_ready(train_steps(state, tokens, PROFILED_STEPS))


def validation_loss(run: Run, params: dict[str, Any]) -> float:
    """Nats per token over every target of the validation split."""
    context = run.config.model.context
    tokens, mask = data.windows(run.corpus.validation, context=context)
    return evaluation.evaluate(
        run.model, params, tokens, mask, batch_size=EVALUATION_BATCH
    )


def _tokens_per_second(records: list[dict[str, float]]) -> float | None:
    """The median over the logged chunks; compilation is not in them."""
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    return float(np.median(speeds)) if speeds else None


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "device": jax.devices()[0].device_kind,
    }
