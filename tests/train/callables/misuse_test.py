"""python -m train.audit --target=...: what it refuses, in one line; exit status 2."""

import os
import pathlib

import numpy as np
import pytest

from attention.properties import comparison, probes
from tests.support import strangers
from train import foreign
from train.callables import replay

folder, run = strangers.folder, strangers.run
TOKENS, VECTORS = strangers.TOKENS, strangers.VECTORS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab_size=7"], "--vocab_size needs --target="),
        (["--replay=leak.npz"], "--replay needs --target="),
        (["--workdir=runs/x", "--skip=edits"], "--skip needs --target="),
        ([], "--workdir=DIR is needed, such as --workdir=runs/tiny_lm, or --target"),
        (["--target=theirs:honest"], "--input=tokens needs --vocab_size=N"),
        (["--target=theirs:honest", "--width=3"], "--width goes with --input=embedd"),
        (
            ["--target=theirs:honest", "--input=embeddings", "--vocab_size=7"],
            "--vocab_size goes with --input=tokens, not embeddings",
        ),
        (
            ["--target=theirs:honest", *TOKENS, "--width=3"],
            "--width goes with --input=embeddings, not tokens",
        ),
        (["--target=theirs:honest", "--input=images"], "--input=images"),
        (["--target=theirs:honest", "--vocab_size=7", "--length=1"], "--length=1"),
        (["--target=theirs:honest", "--vocab_size=1"], "--vocab_size=1"),
        (["--target=theirs:honest", *TOKENS, "--edits=0"], "--edits=0"),
        (
            ["--target=theirs:honest", *TOKENS, "--skip=huge,enormous"],
            "no probe 'enormous', only edits, tiny, huge, non-finite, batch, lengths",
        ),
        (
            ["--target=theirs:honest", *TOKENS, f"--skip={','.join(probes.PROBES)}"],
            "--skip leaves no probe",
        ),
        (
            ["--target=theirs:fft", *VECTORS, "--trainer=theirs:counted"],
            "--trainer needs --input=tokens",
        ),
        (["--target=theirs:nope", *TOKENS], "has no attribute 'nope'"),
        (["--target=theirs:exits", *TOKENS], "raised SystemExit: 0 (theirs.py, line"),
        (["--target=theirs:honest", *TOKENS, "--trainer=nope:x"], "no module 'nope'"),
        (["--target=theirs:honest", *TOKENS, "--workdir=theirs.py"], "cannot be made"),
        (["--target=theirs:honest", "--replay=nope.npz"], "'nope.npz' does not exist"),
        (
            ["--target=theirs:honest", "--replay=theirs.py"],
            "is not an .npz of an audit",
        ),
        (["--target=theirs:honest", "--replay="], "--replay needs a file, such as"),
        *(
            (
                ["--target=theirs:honest", "--replay=leak.npz", flag],
                f"{flag.partition('=')[0]} does not go with --replay",
            )
            for flag in ("--length=6", "--workdir=runs/x", "--skip=edits", "--seed=1")
        ),
        (
            ["--target=theirs:honest", "--vocab_size=6", "--length=6"],
            "is --vocab_size=7 meant",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err
    assert not pathlib.Path("runs").exists()


def test_the_folder_of_a_run_is_left_alone(run):
    path = pathlib.Path("runs/tiny_lm")
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    status, _, err = run("--target=theirs:honest", *TOKENS, f"--workdir={path}")
    assert status == 2 and "holds a run of train.main" in err
    assert [p.name for p in path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("name", "is_folder", "message"),
    [
        ("report.json", True, "report.json' is a folder, not a file"),
        ("leak.npz", True, "leak.npz' is a folder, not a file"),
        ("figures/dependency.png", True, "dependency.png' is a folder, not a file"),
        ("figures", False, "figures' is no folder that can be written"),
    ],
)
def test_a_folder_of_the_wrong_kind(run, name, is_folder, message):
    path = pathlib.Path("runs/audit") / name
    path.parent.mkdir(parents=True)
    path.mkdir() if is_folder else path.touch()
    status, out, err = run("--target=theirs:honest", *TOKENS)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_folder_that_cannot_be_written(run, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    status, _, err = run("--target=theirs:honest", *TOKENS)
    assert status == 2 and "'runs/audit' is no folder that can be written" in err


PAIR = np.zeros((1, 3), np.int32)


@pytest.mark.parametrize(
    ("inputs", "edited", "message"),
    [
        (PAIR[0], PAIR[0], "but int32 [3] and int32 [3]"),
        (PAIR, PAIR[:, :2], "but int32 [1, 3] and int32 [1, 2]"),
        (PAIR, PAIR + 0.5, "but int32 [1, 3] and float64 [1, 3]"),
        (PAIR, PAIR, "the two inputs are equal"),
    ],
)
def test_a_file_that_is_no_leak(run, inputs, edited, message):
    arrays = dict.fromkeys(replay._NAMES, 0)
    arrays |= {"vocab_size": 7, "probe": "edits", "mode": "evaluation"}
    np.savez("other.npz", **arrays | {"inputs": inputs, "edited": edited})
    status, out, err = run("--target=theirs:honest", "--replay=other.npz")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_replay_asks_about_the_kind_of_the_pair():
    """A pair that only rounds otherwise is no leak."""
    inputs = np.random.default_rng(0).normal(size=(1, 6, 3)).astype(np.float32)
    edited = inputs.copy()
    edited[0, 5] += 1
    fft = foreign.load("theirs:fft")
    finding = comparison.compare("edits", fft, inputs, edited, tolerance=1e-5)
    assert finding.kind == "rounding"
    arrays = {"inputs": inputs, "edited": edited, "vocab_size": 0, "seed": 0}
    arrays["callable"] = "theirs:fft"
    replayed = replay.replay(fft, arrays | {"probe": "edits", "mode": "evaluation"})
    assert replayed.kind == "rounding"
