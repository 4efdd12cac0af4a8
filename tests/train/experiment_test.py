"""A whole run, small: what it leaves behind, how it continues, what it refuses."""

import contextlib
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import masks
from models import mixers
from tests.support import files
from train import audit, benchmark, cli, experiment, main, workdir
from train.lm import loss, metrics
from train.proofs import causality, dependence
from train.text import baselines

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "tiny_lm.py")
TEXT = "the cat sat on the mat; a dog ate the hat. " * 40
SMALL = {
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.width": 16,
    "model.mlp_width": 32,
    "model.context": 8,
    "data.tokenizer": "chars",
    "optimizer.warmup_steps": 4,
    "train.steps": 12,
    "train.batch_size": 8,
    "train.log_every": 4,
    "train.checkpoint_every": 8,
    "audit.steps": 150,
    "audit.eval_sequences": 256,
    "audit.replacements": 1,
}


def flags_for(path, text, *more, **changes):
    fields = SMALL | {"data.path": text} | changes
    return [
        f"--config={CONFIG}",
        f"--workdir={path}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
        *more,
    ]


def run(monkeypatch, program, *arguments):
    """The exit status of a program run in this process."""
    monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.run(program.main, program.define_flags)
    return stopped.value.code


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "cat.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """The workdir of a finished run."""
    path = tmp_path_factory.mktemp("runs") / "small"
    with pytest.MonkeyPatch.context() as monkeypatch:
        status = run(monkeypatch, main, *flags_for(path, text))
    assert status == 0
    return path


@contextlib.contextmanager
def restored(file):
    """Gives a file of the finished run its text back."""
    text = file.read_text()
    try:
        yield text
    finally:
        file.write_text(text)


def test_report_says_what_design_promises(finished, text):
    report = json.loads((finished / "report.json").read_text())
    assert report["steps"] == 12
    assert report["parameters"] > 1000
    assert report["baselines"].keys() == {"uniform", "unigram", "bigram", "trigram"}
    vocabulary = len(set(TEXT))
    assert math.isclose(report["baselines"]["uniform"], math.log(vocabulary))
    assert 0 < report["val_loss"] < 2 * math.log(vocabulary)
    # Every character is one byte here.
    assert math.isclose(report["bits_per_byte"], report["val_loss"] / math.log(2))
    assert report["causality"]["passed"] is True
    assert [probe["name"] for probe in report["causality"]["probes"]] == [
        "edits",
        "gradients",
        "learning",
    ]
    assert report["tokens_per_second"] > 0
    assert report["data"]["path"] == str(text)
    assert report["data"]["tokens"] == len(TEXT)
    assert len(report["data"]["sha256"]) == 64
    assert {"python", "jax", "flax", "optax"} <= report["versions"].keys()


def test_workdir_holds_what_design_promises(finished):
    records = metrics.read(finished)
    assert [r["step"] for r in records if "loss" in r] == [4, 8, 12]
    assert [r["step"] for r in records if "val_loss" in r] == [8, 12]
    report = json.loads((finished / "report.json").read_text())
    assert records[-1]["val_loss"] == report["val_loss"]
    for name in ("loss", "attention", "dependency"):
        assert (finished / "figures" / f"{name}.png").stat().st_size > 1000
        assert files.arrays(finished / "figures" / f"{name}.npz")
    weights = files.arrays(finished / "figures" / "attention.npz")["weights"]
    assert weights.shape == (1, 2, 8, 8)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["12", "8"]


def test_rerun_of_a_finished_run_changes_no_result(finished, text, monkeypatch, capsys):
    lines = (finished / "metrics.jsonl").read_text()
    # That an audit repeats itself is the next test.
    monkeypatch.setattr(causality, "prove", lambda *arguments: [])
    monkeypatch.setattr(causality, "draw", lambda *arguments: None)
    with restored(finished / "report.json") as before:
        # Without a proof there is no verdict.
        assert run(monkeypatch, main, *flags_for(finished, text)) == 1
        after = json.loads((finished / "report.json").read_text())
    assert "continuing from step 12 of 12" in capsys.readouterr().out
    assert after["val_loss"] == json.loads(before)["val_loss"]
    assert (finished / "metrics.jsonl").read_text() == lines


def test_a_loss_too_good_for_text_is_accused(finished, text, monkeypatch):
    """Case B096: by the run, and still by a later audit, whatever the proofs say."""
    clear = dependence.Proof("edits", "clear", "by hand", {}, {})
    monkeypatch.setattr(causality, "prove", lambda *arguments: [clear])
    monkeypatch.setattr(causality, "draw", lambda *arguments: None)
    with restored(finished / "report.json"):
        assert run(monkeypatch, audit, f"--workdir={finished}") == 0
        monkeypatch.setattr(experiment, "validation_loss", lambda *arguments: 0.1)
        trigram = dict.fromkeys(("uniform", "unigram", "bigram", "trigram"), 1.0)
        monkeypatch.setattr(
            baselines, "nats_per_token", lambda *arguments, **options: trigram
        )
        assert run(monkeypatch, main, *flags_for(finished, text)) == 1
        report = json.loads((finished / "report.json").read_text())
        assert report["causality"]["probes"][-1]["name"] == "loss"
        assert run(monkeypatch, audit, f"--workdir={finished}") == 1


def test_audit_of_a_workdir(finished, monkeypatch, capsys):
    before = json.loads((finished / "report.json").read_text())
    assert run(monkeypatch, audit, f"--workdir={finished}") == 0
    assert "verdict: the model is causal" in capsys.readouterr().out
    after = json.loads((finished / "report.json").read_text())
    assert after == before


def test_audit_sees_a_model_that_looks_ahead(finished, monkeypatch, capsys):
    """A mask off by one, declared or not: exit 1, and the place is named."""
    mask = masks.causal(offset=1)
    ahead = mixers.Mixer(
        lambda config, layer: mask,
        lambda config, layer: mixers.SelfAttention(config, mask, False),
        "keys and values",
    )
    monkeypatch.setattr(mixers, "MIXERS", {"softmax": ahead})
    with restored(finished / "report.json"):
        assert run(monkeypatch, audit, f"--workdir={finished}") == 1
        report = json.loads((finished / "report.json").read_text())
    out = capsys.readouterr().out
    assert "FAILED  edits: output 0 depends on input 1" in out
    assert "FAILED  gradients" in out
    assert "verdict: NOT CAUSAL" in out
    assert report["causality"]["passed"] is False


def test_audit_sees_labels_that_are_not_shifted(finished, monkeypatch, capsys):
    """Edits and gradients cannot see them; learning on random tokens does."""
    monkeypatch.setattr(loss, "next_token", loss.same_token)
    with restored(finished / "report.json"):
        assert run(monkeypatch, audit, f"--workdir={finished}") == 1
    out = capsys.readouterr().out
    assert "passed  edits" in out
    assert "passed  gradients" in out
    assert "FAILED  learning: random tokens are predicted" in out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.num_heads": 3}, "width must be a multiple of num_heads"),
        ({"model.num_heads": 4, "model.num_kv_heads": 3}, "num_kv_heads=3"),
        ({"model.num_heads": 16}, "even head width"),
        ({"train.steps": -1}, "steps must be at least 1"),
        ({"train.steps": 1.5}, "train.steps"),
        ({"model.depth": 2}, "depth"),
        ({"model.implementation": "cudnn"}, "needs a CUDA device"),
        (
            {"model.implementation": "xla", "model.positions": "alibi"},
            "does not honour score_mod",
        ),
        (
            {"model.implementation": "xla", "model.dropout_rate": 0.1},
            "does not honour dropout",
        ),
        ({"data.path": "no/such/file.txt"}, "cannot be read"),
    ],
)
def test_bad_values_write_nothing(tmp_path, text, monkeypatch, capsys, changes, words):
    path = tmp_path / "run"
    assert run(monkeypatch, main, *flags_for(path, text, **changes)) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00binary", "not UTF-8"),
        (b"short", "too short"),
        (b"aaaaaaaa" * 50, "only one distinct character"),
    ],
)
def test_bad_texts_write_nothing(tmp_path, monkeypatch, capsys, content, words):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    assert run(monkeypatch, main, *flags_for(tmp_path / "run", file)) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_is_a_file(tmp_path, text, monkeypatch, capsys):
    path = tmp_path / "file"
    path.write_text("mine")
    assert run(monkeypatch, main, *flags_for(path, text)) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "--workdir=DIR is needed"),
        ("/proc/no/run", "cannot be written"),
        (f"{__file__}/run", "cannot be written"),
    ],
)
def test_a_workdir_that_cannot_be(text, monkeypatch, capsys, path, words):
    assert run(monkeypatch, main, *flags_for(path, text)) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("name", ["config.json", "corpus.json", "metrics.jsonl"])
def test_a_damaged_workdir_is_named(finished, text, monkeypatch, capsys, name):
    with restored(finished / name) as before:
        (finished / name).write_text('{"step": 1\n' + before)
        assert run(monkeypatch, main, *flags_for(finished, text)) == 2
        assert f"{name} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("program", [main, audit, benchmark])
def test_help_is_for_every_program(program, monkeypatch, capsys):
    assert not run(monkeypatch, program, "--help")
    assert program.__doc__.strip().splitlines()[0] in capsys.readouterr().out


def test_bfloat16_and_a_profile(tmp_path, text, monkeypatch):
    """Parameters and optimiser state stay float32; the trace changes no record."""
    monkeypatch.setattr(causality, "prove", lambda *arguments: [])
    monkeypatch.setattr(causality, "draw", lambda *arguments: None)
    path = tmp_path / "run"
    arguments = flags_for(path, text, "--profile", **{"model.dtype": "bfloat16"})
    assert run(monkeypatch, main, *arguments) == 1  # no proof, no verdict
    assert list((path / "profile").rglob("*.xplane.pb"))
    assert [r["step"] for r in metrics.read(path) if "loss" in r] == [4, 8, 12]
    model, state, *_ = audit.load(path)
    assert model.config.dtype == "bfloat16"
    floats = [
        x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert set(floats) == {jnp.dtype("float32")}


def test_sigterm_saves_and_exits_with_143(tmp_path, text):
    path = tmp_path / "run"
    many = {"train.steps": 10**6, "train.checkpoint_every": 10**6}
    process = subprocess.Popen(
        [sys.executable, "-m", "train.main", *flags_for(path, text, **many)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err == ""
    (saved,) = (path / "checkpoints").iterdir()
    assert metrics.read(path)[-1]["step"] == int(saved.name) > 0


def test_a_workdir_of_another_run(finished, text, monkeypatch, capsys):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    arguments = flags_for(finished, text, **{"optimizer.peak_lr": 0.5})
    assert run(monkeypatch, main, *arguments) == 2
    assert "optimizer.peak_lr is 0.003 there and 0.5 here" in capsys.readouterr().err
    after = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    assert after == before


def test_a_text_that_has_changed(finished, text, monkeypatch, capsys):
    with restored(text):
        text.write_text(TEXT + "!")
        assert run(monkeypatch, audit, f"--workdir={finished}") == 2
        assert "is not the one of this run" in capsys.readouterr().err


def test_audit_of_no_run(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, audit, f"--workdir={tmp_path}") == 2
    assert "holds no run" in capsys.readouterr().err
    assert run(monkeypatch, audit) == 2
    assert "--workdir=DIR is needed" in capsys.readouterr().err


def test_reports_are_updated_not_replaced(tmp_path):
    workdir.update_report(tmp_path, {"a": 1, "b": 2})
    workdir.update_report(tmp_path, {"b": 3})
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": 1, "b": 3}
