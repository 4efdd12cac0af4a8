"""The workdir of a run: its files, and the check that it belongs to the run.

    config.json     every value of the configuration
    corpus.json     path and SHA-256 of the text, and the tokenizer
    metrics.jsonl   one line per logged step
    checkpoints/    the latest states
    figures/        pictures, and the arrays that they show
    report.json     the results

A workdir belongs to one configuration and one text. A run with the same configuration
and text continues it; a run with others is refused.
"""

import json
import os
import pathlib
from typing import Any

from train import config as config_lib
from train.text import data

CONFIG, CORPUS, REPORT = "config.json", "corpus.json", "report.json"
CHECKPOINTS, FIGURES, PROFILE = "checkpoints", "figures", "profile"


def claim(
    workdir: pathlib.Path, config: object, corpus: data.Corpus | None = None
) -> None:
    """Records a run in a new workdir, or checks that the workdir belongs to the run.

    Args:
      workdir: path of the folder, which is created if it does not exist.
      config: configuration of the run or study, a dataclass.
      corpus: the text that the configuration names; None: it names no text.

    Raises:
      ValueError: if the folder cannot be written, or belongs to a run with another
        configuration or another text; in the latter case nothing is written.
    """
    records = {CONFIG: config_lib.to_json(config)}
    if corpus is not None:
        records[CORPUS] = json.dumps(_corpus_record(corpus), indent=2) + "\n"
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"workdir {str(workdir)!r} is not a folder")
    for name, text in records.items():
        path = workdir / name
        if path.exists() and path.read_text() != text:
            difference = _difference(_read_json(path), json.loads(text))
            raise ValueError(
                f"workdir {str(workdir)!r} holds another run: {difference}"
            )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for name, text in records.items():
            write(workdir / name, text)
    except OSError as error:
        raise ValueError(
            f"workdir {str(workdir)!r} cannot be written: {error.strerror}"
        ) from None


def read(workdir: pathlib.Path) -> tuple[config_lib.Config, data.Corpus]:
    """Reads the configuration of a run, and loads its text again.

    Args:
      workdir: path of the run's folder.

    Returns:
      The configuration, and the corpus that it names.

    Raises:
      ValueError: if the folder holds no run, its files are damaged, or the text is
        missing or differs from the text of the run.
    """
    try:
        values, record = _read_json(workdir / CONFIG), _read_json(workdir / CORPUS)
    except OSError as error:
        raise ValueError(
            f"workdir {str(workdir)!r} holds no run: {error.strerror}"
        ) from None
    config = config_lib.from_dict(values, config_lib.Config)
    corpus = load_corpus(config)
    if _corpus_record(corpus) != record:
        raise ValueError(
            f"the text {corpus.path!r} is not the one of this run: "
            f"{_difference(record, _corpus_record(corpus))}"
        )
    return config, corpus


def load_corpus(config: config_lib.Config) -> data.Corpus:
    """Loads the corpus that a configuration names.

    Raises:
      ValueError: if the text or the tokenizer is unusable.
    """
    return data.load_corpus(
        config.data.path,
        tokenizer=config.data.tokenizer,
        context=config.model.context,
    )


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically, under a temporary name that is then changed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_report(workdir: pathlib.Path) -> dict[str, Any]:
    """Reads report.json; an empty dictionary if the run has not written it yet."""
    path = workdir / REPORT
    return _read_json(path) if path.exists() else {}


def update_report(workdir: pathlib.Path, entries: dict[str, Any]) -> None:
    """Adds entries to report.json, and replaces entries of the same names."""
    report = read_report(workdir) | entries
    write(workdir / REPORT, json.dumps(report, indent=2) + "\n")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it holds {type(values).__name__}")
    return values


def _corpus_record(corpus: data.Corpus) -> dict[str, Any]:
    return {
        "path": corpus.path,
        "sha256": corpus.sha256,
        "tokenizer": corpus.tokenizer.to_json(),
    }


def _difference(old: Any, new: Any, name: str = "") -> str:
    """Describes the first value in which two trees differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *new]:
            if old.get(key) != new.get(key):
                return _difference(old.get(key), new.get(key), f"{name}.{key}")
    return f"{name.lstrip('.')} is {old!r} there and {new!r} here"
