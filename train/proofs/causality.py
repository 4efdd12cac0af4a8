"""The three proofs of `dependence` and `learning`, made of a run's own model.

They become a verdict, an entry of report.json, a picture and some lines.
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
        dependence.prove_by_edits(
            functools.partial(logits, variables),
            rows,
            vocab_size=model.vocab_size,
            replacements=config.audit.replacements,
            rng=edit_rng,
        ),
        dependence.prove_by_gradients(
            from_embeddings, embeddings, declared, rng=cotangent_rng
        ),
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


def alarm(run_report: Mapping[str, Any]) -> list[dependence.Proof]:
    """States a loss that is too good for text, as a proof that failed.

    There is no alarm where the trigram baseline needs less than 1 bit per byte: that
    text repeats itself, and a low loss is no surprise.

    Args:
      run_report: what report.json says of a run: `val_loss`, `bits_per_byte` and
        `baselines`.

    Returns:
      That proof alone, or an empty list.
    """
    bits = run_report["bits_per_byte"]
    # A loss of 0 is one without targets; NaN is no low loss.
    if not 0 < bits < IMPLAUSIBLE:
        return []
    trigram = bits / run_report["val_loss"] * run_report["baselines"]["trigram"]
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


def passed(proofs: list[dependence.Proof]) -> bool:
    """Whether every proof passed, and there was one."""
    return bool(proofs) and all(proof.passed for proof in proofs)


def verdict(proofs: list[dependence.Proof]) -> str:
    """The verdict in words; a proof that showed nothing accuses nobody."""
    if any(proof.result == "leak" for proof in proofs):
        return "NOT CAUSAL"
    return "the model is causal" if passed(proofs) else "not verified"


def as_json(proofs: list[dependence.Proof]) -> dict[str, Any]:
    """The verdict as it stands in report.json."""
    return {
        "passed": passed(proofs),
        "probes": [proof.as_json() for proof in proofs],
    }


def draw(folder: pathlib.Path, proofs: list[dependence.Proof]) -> None:
    """Draws the dependency matrix of the gradient proof."""
    arrays = next(proof.arrays for proof in proofs if proof.name == "gradients")
    dependency_figure.draw(
        folder,
        arrays["dependency"],
        arrays["declared"],
        verdict=verdict(proofs),
    )


def show(proofs: list[dependence.Proof]) -> None:
    """Prints a line for each proof, and the verdict."""
    words = {"clear": "passed", "leak": "FAILED", "void": "void"}
    for proof in proofs:
        print(f"{words[proof.result]:6}  {proof.name}: {proof.reason}")
    print("verdict:", verdict(proofs))
