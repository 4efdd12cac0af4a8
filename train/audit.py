"""Verifies that a model is causal: no output depends on a later input.

A run of train.main, by three proofs:

    python -m train.audit --workdir=runs/tiny_lm

1. edits: changing a token moves no earlier logit by a single bit;
2. gradients: outputs depend on exactly the inputs that the model's mask declares
   (shown in float32, where no dependence rounds to nothing);
3. learning: trained on uniform random tokens, it does not beat log V on fresh ones.

Anyone's callable in JAX, NumPy or PyTorch, by ten probes (docs/verifier.md):

    python -m train.audit --target=package.module:callable --vocab_size=65 --length=64
    python -m train.audit --target=package.module:callable --input=embeddings --width=32

It maps tokens int [B T] to logits [B T V], or vectors float32 [B T E] to [B T ...].
--replay=FILE.npz asks it again about a leak that an earlier audit wrote.

Both write figures/dependency.png and the verdict into report.json. Exit status: 0
causal; 1 not, or not verified; 2 unusable arguments, workdir or callable.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Int

# `python -m` looks in the current folder first: a stranger's models.py is not ours.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from models import transformer
from train import (
    checkpoint,
    cli,
    data,
    dependency_figure,
    evaluation,
    learning,
    loop,
    loss,
    proofs,
    stranger,
    workdir,
)
from train import config as config_lib

sys.path.pop(0)

# Rows of text on which edits and gradients are examined.
ROWS = 2


def audit(
    model: transformer.CausalLM,
    params: dict[str, Any],
    tokens: Int[np.ndarray, "M"],
    config: config_lib.Config,
    rng: Array,
) -> list[proofs.Proof]:
    """Runs the three proofs.

    Args:
      model: to be judged.
      params: its trained parameters.
      tokens: real text, from whose start rows are taken.
      config: of the run that trained it; the learning proof trains by it too.
      rng: key of replacements, cotangents and random tokens.

    Returns:
      The proofs: edits, gradients, learning.
    """
    context = config.model.context
    edit_rng, cotangent_rng, learning_rng = jax.random.split(rng, 3)
    rows = jnp.asarray(np.resize(tokens, (ROWS, context)), jnp.int32)
    variables = {"params": params}
    logits = jax.jit(functools.partial(model.apply, deterministic=True))
    # In float32, where a dependence does not round to nothing.
    exact = model.clone(config=dataclasses.replace(config.model, dtype="float32"))
    embeddings: Any = exact.apply(variables, rows, method=transformer.CausalLM.embed)
    from_embeddings = functools.partial(
        exact.apply,
        variables,
        deterministic=True,
        method=transformer.CausalLM.from_embeddings,
    )
    mask = model.mask().materialize(context, context)[0, 0]
    declared = proofs.reachable(mask, num_layers=config.model.num_layers)
    return [
        proofs.edits(
            functools.partial(logits, variables),
            rows,
            vocab_size=model.vocab_size,
            replacements=config.audit.replacements,
            rng=edit_rng,
        ),
        proofs.gradients(from_embeddings, embeddings, declared, rng=cotangent_rng),
        _learning(model, config, rng=learning_rng),
    ]


def _learning(
    model: transformer.CausalLM, config: config_lib.Config, *, rng: Array
) -> proofs.Proof:
    """The learning proof, with the loop, data code and loss of training itself."""
    train_config = dataclasses.replace(config.train, steps=config.audit.steps)
    config = dataclasses.replace(config, train=train_config)
    fit_rng, data_rng = jax.random.split(rng)
    batch_size = train_config.batch_size * train_config.accumulation

    def fit(corpus: Array, examples: loss.Examples) -> Any:
        state, train_steps = loop.begin(model, fit_rng, config, examples=examples)
        state, _ = train_steps(state, corpus, train_config.steps)
        return state.params

    return learning.prove(
        fit,
        functools.partial(evaluation.token_losses, model, batch_size=batch_size),
        vocab_size=model.vocab_size,
        context=config.model.context,
        # Each token is seen about once: what is learned by heart costs fresh loss.
        corpus_size=train_config.steps * batch_size * config.model.context,
        fresh_rows=config.audit.eval_sequences,
        rng=data_rng,
    )


def passed(found: list[proofs.Proof]) -> bool:
    """Whether every proof passed, and there was one."""
    return bool(found) and all(proof.passed for proof in found)


def verdict(found: list[proofs.Proof]) -> str:
    """The verdict in words; a proof that showed nothing accuses nobody."""
    if passed(found):
        return "the model is causal"
    if all(proof.passed or proof.void for proof in found):
        return "not verified"
    return "NOT CAUSAL"


def report(found: list[proofs.Proof]) -> dict[str, Any]:
    """The verdict as it stands in report.json."""
    return {
        "passed": passed(found),
        "probes": [proof.report() for proof in found],
    }


def draw(folder: pathlib.Path, found: list[proofs.Proof]) -> None:
    """Draws the dependency matrix of the gradient proof."""
    arrays = next(proof.arrays for proof in found if proof.name == "gradients")
    dependency_figure.draw(
        folder,
        arrays["dependency"],
        arrays["declared"],
        verdict=verdict(found),
    )


def show(found: list[proofs.Proof]) -> None:
    """Prints a line for each proof, and the verdict."""
    for proof in found:
        print(f"{'passed' if proof.passed else 'FAILED'}  {proof.name}: {proof.reason}")
    print("verdict:", verdict(found))


def load(
    path: pathlib.Path,
) -> tuple[transformer.CausalLM, loop.State, data.Corpus, config_lib.Config]:
    """The model of a run at its last checkpoint, and what it was made of.

    Raises:
      ValueError: the workdir holds no run or no checkpoint, or its text is gone.
    """
    config, corpus = workdir.read(path)
    model = transformer.CausalLM(config.model, corpus.tokenizer.vocab_size)
    checkpoints = path / workdir.CHECKPOINTS
    step = checkpoint.latest_step(checkpoints)
    if step is None:
        raise ValueError(f"workdir {str(path)!r} holds no checkpoint")
    like = jax.eval_shape(
        lambda rng: loop.begin(model, rng, config, examples=loss.next_token)[0],
        jax.random.key(config.seed),
    )
    return model, checkpoint.restore(checkpoints, step, like), corpus, config


def define_flags(values: flags.FlagValues) -> None:
    """Declares the program's flags."""
    flags.DEFINE_string(
        "workdir",
        None,
        "folder of a run of train.main; with --target, the folder for what is found "
        f"({stranger.WORKDIR} if not given)",
        flag_values=values,
    )
    stranger.define_flags(values)


def main(values: flags.FlagValues) -> int:
    """Parses flags, audits, and reports."""
    if values.target:
        return stranger.main(values)
    stranger.refuse_flags(values)
    if not values.workdir:
        raise cli.UsageError(
            "--workdir=DIR is needed, such as --workdir=runs/tiny_lm, or --target"
        )
    path = pathlib.Path(values.workdir)
    with cli.usage_errors():
        model, state, corpus, config = load(path)
    print(f"auditing {path} at step {state.step} of {config.train.steps}", flush=True)
    *_, audit_rng = loop.keys(config.seed)
    found = audit(model, state.params, corpus.validation, config, audit_rng)
    draw(path / workdir.FIGURES, found)
    workdir.update_report(path, {"causality": report(found)})
    show(found)
    return 0 if passed(found) else 1


if __name__ == "__main__":
    cli.run(main, define_flags)
