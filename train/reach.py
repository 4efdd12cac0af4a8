"""Why attention replaced recurrence: how far back a gradient reaches, at what cost.

    python -m train.reach --config=configs/reach.py --workdir=runs/reach

Two small language models, with attention and with a GRU in its place, are trained on
the same batches, several seeds each. Before and after, the program measures the norm of
the derivative of a layer's last output by its input k tokens earlier, exactly, and fits
its logarithm with a line against k (exponential decay) and one against log k (power
law), per run, with intervals over the runs. Then it times a step of one layer of each
against the length T: the GRU takes T steps one after another, attention T² products at
once.

Left in WORKDIR: config.json, corpus.json, report.json, summary.md with the tables in
words, and figures/gradients.png and figures/step_time.png, each with its arrays beside
it. They are written at the end: an interrupted study begins anew.

Exit status: 0 the study's assertions hold; 1 one does not: every run ends below the
unigram baseline; before and after training the GRU's slope lies below attention's, the
interval of the difference excluding 0. 2 unusable arguments; 130 Ctrl-C, 143 SIGTERM.
"""

import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import rich.markdown
import rich.progress
from absl import flags

from train import cli, workdir
from train.report import machine, terminal
from train.studies.reach import picture, runs, settings, summary
from train.text import baselines, data

SUMMARY = "summary.md"


def study(
    config: settings.Config, corpus: data.Corpus, path: pathlib.Path
) -> dict[str, Any]:
    """Trains, measures, and writes report, summary and pictures.

    Args:
      config: configuration of the study.
      corpus: text for both models.
      path: an existing folder for the files.

    Returns:
      The contents of report.json.
    """
    start = time.perf_counter()
    console = terminal.console()
    # Redrawn seldom, since that takes time from what is measured.
    with rich.progress.Progress(console=console, refresh_per_second=1) as progress:

        def track(values: list[int], words: str) -> Iterator[int]:
            task = progress.add_task("", total=len(values))
            for value in values:
                progress.update(task, description=words.format(value))
                yield value
                progress.advance(task)

        measured = {}
        for name, model_config in config.models().items():
            measured[name] = runs.measure(
                model_config, config, corpus, track=track, words=f"training {name}"
            )
            mean = measured[name].losses.mean()
            console.print(f"{name}: {mean:.2f} nats per token after training")
        times = runs.step_times(config, track=track)
    nats = baselines.nats_per_token(
        corpus.train, corpus.validation, vocab_size=corpus.tokenizer.vocab_size
    )
    report = summary.findings(measured, times, config, unigram=nats["unigram"])
    report |= {
        "machine": machine.describe(),
        "data": {"path": corpus.path, "sha256": corpus.sha256},
        "seconds": time.perf_counter() - start,
    }
    workdir.write(path / workdir.REPORT, json.dumps(report, indent=2) + "\n")
    words = summary.words(report)
    workdir.write(path / SUMMARY, words)
    picture.gradients(path / workdir.FIGURES, measured, report)
    picture.step_time(path / workdir.FIGURES, report["step_time"])
    console.print(rich.markdown.Markdown(words), soft_wrap=False)
    return report


def define_flags(values: flags.FlagValues) -> None:
    """Declares the program's flags."""
    cli.define_config(values, settings.Config)
    flags.DEFINE_string("workdir", None, "folder of the study", flag_values=values)


def main(values: flags.FlagValues) -> int:
    """Parses flags, and makes the study."""
    config = cli.read_config(values, settings.Config)
    path = cli.workdir(values, example="runs/reach")
    with cli.usage_errors():
        corpus = data.load_corpus(
            config.data.path,
            tokenizer=config.data.tokenizer,
            context=config.model.context,
        )
        runs.text_rows(corpus, rows=config.rows, context=config.model.context)
        workdir.claim(path, config, corpus)
    report = study(config, corpus, path)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    cli.run(main, define_flags)
