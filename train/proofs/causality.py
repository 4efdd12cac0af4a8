"""The three proofs of `dependence` and `learning`, made of a run's own model.

What they found becomes a verdict, an entry of report.json, a picture and some lines.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from models import transformer
from train import config as config_lib
from train.lm import evaluation, loop, loss
from train.proofs import dependence, learning
from train.report import dependency_figure

# Rows of text on which edits and gradients are examined.
ROWS = 2
# Bits per byte: the best compressors need more than twice as many for English, and a
# model that needs fewer has most likely seen its targets.
IMPLAUSIBLE = 0.3


def prove(
    model: transformer.CausalLM,
    params: dict[str, Any],
    tokens: Int[np.ndarray, "M"],
    config: config_lib.Config,
    rng: Array,
) -> list[dependence.Proof]:
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
    declared = dependence.reachable(
        [mask.materialize(context, context)[0, 0] for mask in model.masks()]
    )
    return [
        dependence.edits(
            functools.partial(logits, variables),
            rows,
            vocab_size=model.vocab_size,
            replacements=config.audit.replacements,
            rng=edit_rng,
        ),
        dependence.gradients(from_embeddings, embeddings, declared, rng=cotangent_rng),
        _learning(model, config, rng=learning_rng),
    ]


def _learning(
    model: transformer.CausalLM, config: config_lib.Config, *, rng: Array
) -> dependence.Proof:
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


def alarm(report: Mapping[str, Any]) -> list[dependence.Proof]:
    """A loss that is too good for text, as a proof that failed; else nothing.

    Not where the trigram baseline needs less than 1 bit per byte: that text repeats
    itself, and a low loss is no surprise.

    Args:
      report: of a run: `val_loss`, `bits_per_byte` and `baselines`.
    """
    bits = report["bits_per_byte"]
    # A loss of 0 is one without targets; NaN is no low loss.
    if not 0 < bits < IMPLAUSIBLE:
        return []
    trigram = bits / report["val_loss"] * report["baselines"]["trigram"]
    if trigram < 1:
        return []
    return [
        dependence.Proof(
            name="loss",
            result="leak",
            reason=f"{bits:.3g} bits per byte are fewer than text has (trigrams need "
            f"{trigram:.3g}): the targets are seen, or this text in training",
            figures={"bits_per_byte": bits, "trigram": trigram},
            arrays={},
        )
    ]


def passed(found: list[dependence.Proof]) -> bool:
    """Whether every proof passed, and there was one."""
    return bool(found) and all(proof.passed for proof in found)


def verdict(found: list[dependence.Proof]) -> str:
    """The verdict in words; a proof that showed nothing accuses nobody."""
    if any(proof.result == "leak" for proof in found):
        return "NOT CAUSAL"
    return "the model is causal" if passed(found) else "not verified"


def report(found: list[dependence.Proof]) -> dict[str, Any]:
    """The verdict as it stands in report.json."""
    return {
        "passed": passed(found),
        "probes": [proof.report() for proof in found],
    }


def draw(folder: pathlib.Path, found: list[dependence.Proof]) -> None:
    """Draws the dependency matrix of the gradient proof."""
    arrays = next(proof.arrays for proof in found if proof.name == "gradients")
    dependency_figure.draw(
        folder,
        arrays["dependency"],
        arrays["declared"],
        verdict=verdict(found),
    )


def show(found: list[dependence.Proof]) -> None:
    """Prints a line for each proof, and the verdict."""
    words = {"clear": "passed", "leak": "FAILED", "void": "void"}
    for proof in found:
        print(f"{words[proof.result]:6}  {proof.name}: {proof.reason}")
    print("verdict:", verdict(found))
