"""What a run shows of its model: curves, heads, losses and a sample of text."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from jaxtyping import Int

from models import transformer
from train.lm import sampling
from train.report import figures
from train.text import data

PROMPT_TOKENS, SAMPLE_TOKENS = 32, 224
PICTURED_TOKENS = 40
TEMPERATURE = 0.8


def draw_loss(
    folder: pathlib.Path,
    records: Sequence[Mapping[str, float]],
    baselines: Mapping[str, float],
) -> None:
    """Draws the loss in training and in validation over the steps.

    Args:
      folder: where the picture and its arrays go.
      records: lines of metrics.jsonl.
      baselines: nats per token of n-gram models, by name.
    """
    curves = {
        name: np.array([(r["step"], r[name]) for r in records if name in r]).reshape(
            -1, 2
        )
        for name in ("loss", "val_loss")
    }
    figures.loss_curve(
        folder,
        *curves["loss"].T,
        validation_steps=curves["val_loss"][:, 0],
        validation_losses=curves["val_loss"][:, 1],
        baselines=baselines,
        yscale="linear",
    )


def draw_attention(
    folder: pathlib.Path,
    model: transformer.CausalLM,
    params: dict[str, Any],
    corpus: data.Corpus,
) -> None:
    """Draws the weights of every head on a sentence of the validation split.

    Args:
      folder: where the picture and its arrays go.
      model: at least one of its layers is attention.
      params: its parameters.
      corpus: text and tokenizer.
    """
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
    figures.attention_heads(folder, np.stack(weights), labels)


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


def show_losses(losses: Mapping[str, float], corpus: data.Corpus) -> None:
    """Prints nats per token, and the bits per byte that they are on this corpus."""
    table = rich.table.Table(title="loss over the whole validation split")
    table.add_column("")
    table.add_column("nats per token", justify="right")
    table.add_column("bits per byte", justify="right")
    for name, nats in losses.items():
        table.add_row(name, f"{nats:.4f}", f"{bits_per_byte(nats, corpus):.4f}")
    rich.console.Console().print(table)


def show_sample(
    model: transformer.CausalLM,
    params: dict[str, Any],
    corpus: data.Corpus,
    rng: jax.Array,
) -> None:
    """Prints how the model continues the beginning of the validation split."""
    prompt = corpus.validation[:PROMPT_TOKENS]
    continued = sampling.sample(
        model,
        params,
        jnp.asarray(prompt),
        rng,
        context=model.config.context,
        length=SAMPLE_TOKENS,
        temperature=TEMPERATURE,
    )
    text = corpus.tokenizer.decode(np.concatenate([prompt, continued]))
    # A byte may be a control character, which would reach the terminal.
    shown = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    print(f"a sample, after a prompt of {len(prompt)} tokens:\n{shown}\n")


def bits_per_byte(nats: float, corpus: data.Corpus) -> float:
    """Bits per byte of text, of a loss in nats per token of the validation split."""
    targets = corpus.validation[1:]
    return data.bits_per_byte(nats, targets, tokenizer=corpus.tokenizer)
