"""One run from text to report: train, evaluate, verify, draw.

What it leaves behind is listed in `train.workdir`. A run that was interrupted goes on
from its last checkpoint, and ends as if it had not been.
"""

import pathlib
import platform
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.table
from jaxtyping import Int

from models import transformer
from train import config as config_lib
from train import workdir
from train.lm import checkpoint, driver, evaluation, loop, loss, metrics, sampling
from train.proofs import causality
from train.report import figures
from train.text import baselines, data

EVALUATION_BATCH = 64
PROFILED_STEPS = 5
PROMPT_TOKENS, SAMPLE_TOKENS = 32, 224
PICTURED_TOKENS = 40
TEMPERATURE = 0.8


def prepare(
    config: config_lib.Config, path: pathlib.Path, *, tensorboard: bool
) -> tuple[transformer.CausalLM, data.Corpus]:
    """Checks all that a run needs before anything is written, then claims the workdir.

    Args:
      config: of the run.
      path: the workdir.
      tensorboard: whether event files will be written.

    Returns:
      The model and the text.

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
    return model, corpus


def run(
    model: transformer.CausalLM,
    corpus: data.Corpus,
    config: config_lib.Config,
    path: pathlib.Path,
    *,
    profile: bool,
    tensorboard: bool,
) -> bool:
    """Trains, or continues to train, a language model; verifies and reports it.

    Args:
      model: of `prepare`.
      corpus: of `prepare`.
      config: what to do.
      path: the workdir.
      profile: also write a jax profiler trace of a few steps.
      tensorboard: also write TensorBoard event files.

    Returns:
      Whether the model was verified to be causal.
    """
    began = time.perf_counter()
    train_rng, sample_rng, audit_rng = loop.keys(config.seed)
    state, train_steps = loop.begin(model, train_rng, config, examples=loss.next_token)
    num_parameters = sum(x.size for x in jax.tree.leaves(state.params))
    print(
        f"{corpus.path}: {corpus.train.size:,} tokens to train, "
        f"{corpus.validation.size:,} to validate, {model.vocab_size} ids; "
        f"{num_parameters:,} parameters",
        flush=True,
    )
    state = _train(
        model, train_steps, state, corpus, config, path, profile, tensorboard
    )
    records = metrics.read(path)
    val_loss = validation_loss(model, state.params, corpus, config)
    found_baselines = baselines.nats_per_token(
        corpus.train, corpus.validation, vocab_size=model.vocab_size
    )
    _draw_loss(path, records, found_baselines)
    if any(map(config.model.is_attention, range(config.model.num_layers))):
        _draw_attention(path, model, state.params, corpus)
    print("verifying causality: edits, gradients, learning ...", flush=True)
    proofs = causality.prove(model, state.params, corpus.validation, config, audit_rng)
    losses = {
        "val_loss": val_loss,
        "bits_per_byte": _bits_per_byte(val_loss, corpus),
        "baselines": found_baselines,
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
    _show_losses({**found_baselines, "this model": val_loss}, corpus)
    _show_sample(model, state.params, corpus, config, sample_rng)
    causality.show(proofs)
    print(f"workdir: {path}")
    return causality.passed(proofs)


def _train(
    model: transformer.CausalLM,
    train_steps: loop.TrainSteps,
    state: loop.State,
    corpus: data.Corpus,
    config: config_lib.Config,
    path: pathlib.Path,
    profile: bool,
    tensorboard: bool,
) -> loop.State:
    """Trains from the last checkpoint, or the given state, to the last step."""
    checkpoints = path / workdir.CHECKPOINTS
    step = checkpoint.latest_step(checkpoints)
    if step is not None:
        state = checkpoint.restore(checkpoints, step, state)
        print(f"continuing from step {step} of {config.train.steps}", flush=True)
    start = int(state.step)
    tokens = jnp.asarray(corpus.train)
    with (
        metrics.writer(path, start=start, tensorboard=tensorboard) as write,
        metrics.progress(config.train.steps, start=start) as show,
    ):

        def log(record: metrics.Record) -> None:
            write(record)
            show(record)

        def save(state: loop.State) -> None:
            step = int(state.step)
            # Not where a run was interrupted: that would leave a trace in its records.
            if step % config.train.checkpoint_every == 0 or step == config.train.steps:
                val_loss = validation_loss(model, state.params, corpus, config)
                write({"step": step, "val_loss": val_loss})
            checkpoint.save(checkpoints, step, state)

        if profile:
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


def validation_loss(
    model: transformer.CausalLM,
    params: dict[str, Any],
    corpus: data.Corpus,
    config: config_lib.Config,
) -> float:
    """Nats per token over every target of the validation split."""
    tokens, mask = data.windows(corpus.validation, context=config.model.context)
    return evaluation.evaluate(model, params, tokens, mask, batch_size=EVALUATION_BATCH)


def _draw_loss(
    path: pathlib.Path, records: list[dict[str, float]], baselines: dict[str, float]
) -> None:
    curves = {
        name: np.array([(r["step"], r[name]) for r in records if name in r]).reshape(
            -1, 2
        )
        for name in ("loss", "val_loss")
    }
    figures.loss_curve(
        path / workdir.FIGURES,
        *curves["loss"].T,
        validation_steps=curves["val_loss"][:, 0],
        validation_losses=curves["val_loss"][:, 1],
        baselines=baselines,
        yscale="linear",
    )


def _draw_attention(
    path: pathlib.Path,
    model: transformer.CausalLM,
    params: dict[str, Any],
    corpus: data.Corpus,
) -> None:
    """Every head on a sentence of the validation split."""
    tokens = sentence(corpus, length=min(PICTURED_TOKENS, model.config.context))
    _, sown = model.apply(
        {"params": params},
        jnp.asarray(tokens)[None],
        deterministic=True,
        sow_weights=True,
        mutable="intermediates",
    )
    blocks = sown["intermediates"]
    weights = [
        blocks[f"blocks_{i}"]["mixer"]["attention_weights"][0][0]
        for i in range(model.config.num_layers)
        if model.config.is_attention(i)
    ]
    labels = [corpus.tokenizer.decode([token]) for token in tokens]
    figures.attention_heads(path / workdir.FIGURES, np.stack(weights), labels)


def sentence(corpus: data.Corpus, *, length: int) -> Int[np.ndarray, "length"]:
    """The stretch of the validation split that is most made of words.

    Args:
      corpus: text and tokenizer.
      length: tokens; the whole split if it is shorter.

    Returns:
      Ids that begin with a capital letter after white space, if there is any, and
      hold as many letters as possible.
    """
    tokens = corpus.validation
    characters = [corpus.tokenizer.decode([i]) for i in np.unique(tokens)]
    ranks = np.searchsorted(np.unique(tokens), tokens)
    letter, capital, space = (
        np.array([test(c) for c in characters])[ranks]
        for test in (str.isalpha, str.isupper, str.isspace)
    )
    last = max(tokens.size - length, 0)
    letters = np.convolve(letter, np.ones(length, int))[length - 1 :][: last + 1]
    begins = capital & np.append(True, space[:-1])
    start = int(np.argmax(letters * begins[: last + 1]))
    return tokens[start : start + length]


def _show_losses(losses: dict[str, float], corpus: data.Corpus) -> None:
    table = rich.table.Table(title="loss over the whole validation split")
    table.add_column("")
    table.add_column("nats per token", justify="right")
    table.add_column("bits per byte", justify="right")
    for name, nats in losses.items():
        table.add_row(name, f"{nats:.4f}", f"{_bits_per_byte(nats, corpus):.4f}")
    rich.console.Console().print(table)


def _show_sample(
    model: transformer.CausalLM,
    params: dict[str, Any],
    corpus: data.Corpus,
    config: config_lib.Config,
    rng: jax.Array,
) -> None:
    prompt = corpus.validation[:PROMPT_TOKENS]
    continued = sampling.sample(
        model,
        params,
        jnp.asarray(prompt),
        rng,
        context=config.model.context,
        length=SAMPLE_TOKENS,
        temperature=TEMPERATURE,
    )
    text = corpus.tokenizer.decode(np.concatenate([prompt, continued]))
    # A byte may be a control character, which would reach the terminal.
    shown = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    print(f"a sample, after a prompt of {len(prompt)} tokens:\n{shown}\n")


def _bits_per_byte(nats: float, corpus: data.Corpus) -> float:
    targets = corpus.validation[1:]
    return data.bits_per_byte(nats, targets, tokenizer=corpus.tokenizer)


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
