"""A training step, beside the same model in eager PyTorch where installed.

Before anything is timed, both must give the same logits for the same parameters (within
1e-4). `train.benchmark --what=train_step` is the program.
"""

import functools
import importlib.util
import json
import os
import pathlib
import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table
from absl import flags

from models import transformer
from train import cli, workdir
from train import config as config_lib
from train.lm import loop, loss
from train.report import compilation, stopwatch
from train.text import data

TOLERANCE = 1e-4
ROUNDS = 20
PRODUCT, PRODUCT_SIZE = "matrix product", 1024


def measure(
    config: config_lib.Config, corpus: data.Corpus, *, rounds: int, steps: int
) -> dict[str, Any] | None:
    """Times a training step here and, where it is installed, in PyTorch.

    Args:
      config: configuration of model, batch and optimiser.
      corpus: tokens to train on.
      rounds: number of measurements.
      steps: training steps of one measurement.

    Returns:
      Results for JSON; None if the logits of the two models differ.
    """
    model = transformer.CausalLM(config.model, corpus.tokenizer.vocab_size)
    train_rng, *_ = loop.keys(config.seed)
    state, train_steps = loop.begin(model, train_rng, config, examples=loss.next_token)
    product, product_flops = stopwatch.matrix_product(PRODUCT_SIZE, "float32")
    runs: dict[str, Callable[[], Any]] = {PRODUCT: product}
    versions = {"softlookup": f"jax {jax.__version__}, {jax.devices()[0].device_kind}"}
    peer = _peer(config, state.params, corpus)
    if peer is not None:
        trainer, logits, versions["torch"] = peer
        rows = corpus.validation[: config.model.context][None]
        ours = model.apply({"params": state.params}, rows, deterministic=True)
        error = np.max(np.abs(np.asarray(ours) - logits(rows)))
        print(f"largest difference of logits: {error:.1e}")
        if not error <= TOLERANCE:
            return None
        runs["torch"] = lambda: [trainer.step() for _ in range(steps)]
    operations = step_flops(config, state.params, vocab_size=model.vocab_size)
    tokens = jnp.asarray(corpus.train)
    compile_seconds = compilation.cost(train_steps, (state, tokens, steps)).seconds

    def run() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(train_steps(state, tokens, steps))

    runs["softlookup"] = run
    seconds = stopwatch.interleaved(
        runs, rich.progress.track(range(rounds), "measuring")
    )
    rate = product_flops / float(np.median(seconds.pop(PRODUCT)))
    quartiles = {
        name: stopwatch.quartiles([x / steps for x in times])
        for name, times in seconds.items()
    }
    return {
        "what": "train_step",
        "milliseconds": quartiles,
        "ratio": {
            name: quartiles["softlookup"][1] / median
            for name, (_, median, _) in quartiles.items()
        },
        "product_flops_per_second": rate,
        "products_milliseconds": operations / rate * 1e3,
        "compile_seconds": compile_seconds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
    }


def _peer(config: config_lib.Config, params: Any, corpus: data.Corpus) -> Any:
    """Makes PyTorch's trainer, logits and version; None if it cannot take part."""
    if not importlib.util.find_spec("torch"):
        return None
    from train.bench import torch_steps  # an extra, and slow to import

    try:
        peer = torch_steps.CausalLM(config.model, jax.device_get(params))
        trainer = torch_steps.Trainer(peer, config, corpus)
    except ValueError as error:
        print(f"PyTorch is left out: {error}")
        return None
    return trainer, functools.partial(torch_steps.logits, peer), torch_steps.version()


def step_flops(config: config_lib.Config, params: Any, *, vocab_size: int) -> float:
    """Counts operations of a step's matrix products, forward and backward.

    There are six for every weight of a matrix and every token, and for each score and
    term of a weighted sum of attention; the causal mask saves none in the dense form.
    Products without a weight inside recurrences are not counted.

    Args:
      config: configuration of model and batch.
      params: parameters of the model.
      vocab_size: V.

    Returns:
      Floating-point operations of one training step.
    """
    model, train = config.model, config.train
    leaves = jax.tree_util.tree_leaves_with_path(params)
    matrices = vocab_size * model.width
    matrices += sum(
        x.size for path, x in leaves if path[-1].key.endswith("kernel") and x.ndim > 1
    )
    layers = sum(map(model.is_attention, range(model.num_layers)))
    attention = layers * 2 * model.context * model.width
    tokens = train.batch_size * train.accumulation * model.context
    return 6.0 * tokens * (matrices + attention)


def show(results: Mapping[str, Any]) -> None:
    """Prints the results as a table."""
    table = rich.table.Table(title=f"{results['what']} on {results['machine']}")
    for heading in ("", "ms, median", "quartiles", "softlookup takes"):
        table.add_column(heading)
    for name, (low, median, high) in results["milliseconds"].items():
        table.add_row(
            f"{name} ({results['versions'][name]})",
            f"{median:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{results['ratio'][name]:.2f} of it",
        )
    rich.console.Console().print(table)
    print(
        f"its matrix products alone: {results['products_milliseconds']:.2f} ms, at "
        f"{results['product_flops_per_second'] / 1e9:.0f} GFLOP/s in the same run; "
        f"compilation: {results['compile_seconds']:.1f} s"
    )


def define_flags(values: flags.FlagValues) -> None:
    """Declares the flags of --what=train_step."""
    cli.define_config(values, config_lib.Config)
    flags.DEFINE_integer(
        "steps", 10, "steps of one measurement", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string("output", None, "JSON file for the results", flag_values=values)


def main(values: flags.FlagValues) -> int:
    """Measures a training step, and reports."""
    config = cli.read_config(values, config_lib.Config)
    with cli.usage_errors():
        corpus = workdir.load_corpus(config)
        output = pathlib.Path(values.output).absolute() if values.output else None
        # Checked now: after a long measurement it would be too late.
        if output and not output.parent.is_dir():
            raise ValueError(f"no folder for --output={values.output}")
    rounds = values.rounds or ROUNDS
    results = measure(config, corpus, rounds=rounds, steps=values.steps)
    if results is None:
        print("softlookup and PyTorch disagree: nothing was timed")
        return 1
    show(results)
    if output:
        with cli.usage_errors():
            workdir.write(output, json.dumps(results, indent=2) + "\n")
    return 0
