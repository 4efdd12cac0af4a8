"""python -m train.audit --target=...: one screen, the files it leaves, exit status."""

import contextlib
import io
import json
import os
import pathlib
import shlex
import subprocess
import sys

import numpy as np
import pytest

from attention.properties import probes
from tests.support import files, strangers
from train.report import dependency_figure

ROOT = pathlib.Path(__file__).parents[3]


folder, run = strangers.folder, strangers.run
TOKENS, VECTORS = strangers.TOKENS, strangers.VECTORS


def report():
    return json.loads(pathlib.Path("runs/audit/report.json").read_text())


def results():
    return {row["name"]: row["result"] for row in report()["causality"]["probes"]}


def fits_a_screen(out):
    lines = out.splitlines()
    return len(lines) <= 24 and max(map(len, lines)) <= 80


def left():
    """Every file of the audit."""
    path = pathlib.Path("runs/audit")
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


FILES = ["figures/dependency.npz", "figures/dependency.png", "report.json"]


def test_an_honest_target(run):
    status, out, err = run("--target=theirs:honest", *TOKENS)
    assert (status, err) == (0, "")
    assert fits_a_screen(out)
    assert "verdict: no leak found" in out
    assert left() == FILES
    contents = report()
    assert contents["target"] == "theirs:honest" and contents["framework"] == "NumPy"
    assert (contents["input"], contents["length"], contents["vocab_size"]) == (
        "tokens",
        6,
        7,
    )
    assert contents["verdict"] == "no leak found" and contents["leak"] is None
    assert contents["causality"]["passed"] is True
    assert [row["name"] for row in contents["causality"]["probes"]] == [*probes.PROBES]
    assert results()["edits"] == "clear"
    assert results()["gradients"] == "not applicable"
    assert {"python", "numpy", "jax"} <= contents["versions"].keys()
    assert contents["seconds"] > 0
    dependency = files.arrays("runs/audit/figures/dependency.npz")["dependency"]
    np.testing.assert_array_equal(dependency, np.tri(6, dtype=bool))


def test_a_leak(run):
    status, out, _ = run("--target=theirs:leaky", *TOKENS)
    assert status == 1
    assert fits_a_screen(out)
    leak = report()["leak"]
    arrays = files.arrays("runs/audit/leak.npz")
    assert f"LEAK: output 3 depends on input 5: it moved by {leak['movement']:.3g}" in (
        out
    )
    assert (leak["source"], leak["target"], leak["row"]) == (5, 3, leak["target_row"])
    assert (leak["probe"], leak["mode"], leak["length"]) == ("edits", "evaluation", 6)
    assert {"edits", "batch", "batch sizes"} <= {*leak["probes"]}
    assert report()["causality"]["passed"] is False and report()["verdict"] == "LEAK"
    # The smallest input: one row, nothing after the edit.
    assert leak["shape"] == list(arrays["inputs"].shape) == [1, 6]
    assert (leak["smallest"]["row"], leak["smallest"]["length"]) == (0, 6)
    assert (arrays["inputs"] != arrays["edited"]).nonzero()[1].tolist() == [5]
    moved = np.abs(arrays["after"] - arrays["before"])[0]
    assert moved[3].max() == pytest.approx(arrays["movement"])
    assert np.flatnonzero(moved.max(axis=-1)).tolist() == [3, 5]
    dependency = files.arrays("runs/audit/figures/dependency.npz")["dependency"]
    wanted = np.tri(6, dtype=bool)
    wanted[3, 5] = True
    np.testing.assert_array_equal(dependency, wanted)
    # Both ways to replay it are on the screen.
    assert leak["replay"] in out
    assert all(line in out for line in leak["by_hand"])
    assert by_hand(leak) == pytest.approx(arrays["movement"])
    status, out, _ = run(*shlex.split(leak["replay"])[3:])
    assert (status, out.count("\n")) == (1, 1)
    at_the_pair = "still leaks, at the smallest pair: output 3 depends on input 5: it "
    assert out == f"{at_the_pair}moved by {float(arrays['movement']):.3g}\n"
    # A mended callable of another name, in the same place.
    status, out, _ = run("--target=theirs:honest", "--replay=runs/audit/leak.npz")
    assert status == 0 and out.startswith("no leak any more, ")
    assert out.endswith(": no output moves (the leak was of theirs:leaky)\n")


def by_hand(leak):
    """What the lines print, pasted where nothing is known."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec("\n".join(leak["by_hand"]), {})
    return float(out.getvalue())


@pytest.mark.parametrize("name", ["leak", "x"])
def test_a_callable_that_is_called_like_a_name_of_the_lines(run, name):
    assert run(f"--target=theirs:{name}", *TOKENS, "--skip=batch")[0] == 1
    assert by_hand(report()["leak"]) > 0


def test_a_clean_audit_leaves_nothing_of_a_leak(run):
    run("--target=theirs:leaky", *TOKENS)
    assert left() == sorted([*FILES, "leak.npz"])
    run("--target=theirs:honest", *TOKENS, "--skip=edits")
    assert left() == ["report.json"]
    assert results()["edits"] == "skipped"


def test_a_leak_across_the_batch(run):
    status, out, _ = run("--target=theirs:across", *TOKENS)
    assert status == 1
    leak = report()["leak"]
    assert (leak["row"], leak["target_row"]) == (1, 0)
    assert leak["source"] == leak["target"] == 2
    assert "output 2 of row 0 depends on input 2 of row 1" in out
    assert leak["shape"] == [2, 3]
    assert by_hand(leak) > 0
    assert run("--target=theirs:across", "--replay=runs/audit/leak.npz")[0] == 1


def test_a_leak_in_training_mode(run):
    status, out, _ = run("--target=theirs:in_training", *TOKENS)
    assert status == 1
    assert results()["edits"] == "clear" and results()["training"] == "leak"
    leak = report()["leak"]
    assert (leak["probe"], leak["mode"]) == ("training", "training")
    assert "only in training mode, where dropout" in out
    replayed = ("--replay=runs/audit/leak.npz",)
    assert run("--target=theirs:in_training", *replayed)[0] == 1
    status, _, err = run("--target=theirs:honest", *replayed)
    assert status == 2 and "training mode, which the callable lacks" in err


def test_a_leak_that_only_the_derivative_shows(run):
    status, out, _ = run("--target=theirs:by_derivative", *VECTORS)
    assert status == 1
    assert fits_a_screen(out)
    leak = report()["leak"]
    assert leak["probes"] == ["gradients"]
    assert (leak["source"], leak["target"], leak["shape"]) == (1, 0, [1, 2, 3])
    assert "its derivative in a random direction is" in " ".join(out.split())
    dependency = files.arrays("runs/audit/figures/dependency.npz")["dependency"]
    assert np.argwhere(np.triu(dependency, 1)).tolist() == [[0, 1]]
    assert by_hand(leak) > 1e-3
    replayed = ("--replay=runs/audit/leak.npz",)
    assert run("--target=theirs:by_derivative", *replayed)[0] == 1
    status, _, err = run("--target=theirs:fft", *replayed)
    assert status == 2 and "a derivative needs" in err


def test_a_leak_in_pytorch(run, folder):
    pytest.importorskip("torch")
    (folder / "theirs.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = torch.nn.Embedding(7, 7)\n"
        "        self.dropout = torch.nn.Dropout(0.5)\n"
        "    def forward(self, tokens):\n"
        "        x = self.embedding(tokens)\n"
        "        return self.dropout(x + x.roll(-1, dims=1))\n"
        "model = Model()\n"
    )
    assert run("--target=theirs:model", *TOKENS)[0] == 1
    assert report()["framework"] == "PyTorch" and "torch" in report()["versions"]
    leak = report()["leak"]
    assert (leak["source"], leak["target"]) == (1, 0)
    assert results()["training"] == "leak"
    assert by_hand(leak) > 0
    assert run("--target=theirs:model", "--replay=runs/audit/leak.npz")[0] == 1


def test_rounding_and_nan_are_reported_and_not_failed(run):
    status, out, _ = run("--target=theirs:fft", *VECTORS)
    assert status == 0
    assert results()["edits"] == "rounding"
    assert results()["non-finite"] == "nan-unsafe"
    rows = report()["causality"]["probes"]
    findings = [row["finding"] for row in rows if row["result"] == "rounding"]
    share = max(finding["movement"] / finding["size"] for finding in findings)
    assert f"rounding: outputs that must not move do by up to {share:.2g} of" in out
    assert "nan-unsafe: 0 x NaN" in out
    assert report()["causality"]["passed"] is True
    (edits, *_) = report()["causality"]["probes"]
    assert edits["finding"]["kind"] == "rounding"
    dependency = files.arrays("runs/audit/figures/dependency.npz")["dependency"]
    assert not np.triu(dependency, 1).any()


def test_a_target_that_ignores_its_input_is_doubted(run):
    status, out, _ = run("--target=theirs:constant", *TOKENS)
    assert status == 0
    assert "no edit moved any output" in out


def test_a_picky_target_is_refused_elsewhere(run):
    status, out, _ = run("--target=theirs:picky", *TOKENS)
    rows = {row["name"]: row for row in report()["causality"]["probes"]}
    assert rows["lengths"]["result"] == "refused"
    assert rows["lengths"]["passed"] is None
    assert rows["batch sizes"]["result"] == "clear" and status == 0
    assert "verdict: no leak found by edits, batch, batch sizes; not run: le" in out


def test_a_leak_under_huge_inputs_only_says_so(run):
    status, out, _ = run("--target=theirs:maximum", *VECTORS)
    assert status == 1
    leak = report()["leak"]
    assert leak["probes"] == ["huge"]
    assert f"only under inputs of size {leak['size']:.3g}" in out


def test_a_target_that_changes_its_mind_is_misuse(run):
    status, _, err = run("--target=theirs:moody", *TOKENS)
    assert status == 2 and err.count("\n") == 1
    assert err.startswith("error: not deterministic: equal inputs [")
    assert left() == []


@pytest.mark.parametrize(
    ("trainer", "status", "result", "words"),
    [
        ("counted", 0, "clear", "learning: random tokens are not predicted"),
        ("told", 1, "leak", "verdict: LEAK: random tokens are predicted"),
        ("idle", 1, "void", "learning: the control did not learn"),
        ("broken", 1, "refused", "RuntimeError: out of memory (theirs.py, line 90)"),
    ],
)
def test_a_trainer(run, trainer, status, result, words):
    quick = [name for name in probes.PROBES if name != "batch"]
    code, out, _ = run(
        "--target=theirs:honest",
        f"--trainer=theirs:{trainer}",
        f"--skip={','.join(quick)}",
        *TOKENS,
    )
    assert code == status
    assert fits_a_screen(out)
    assert results()["learning"] == result
    assert words in " ".join(out.split())
    assert ("not verified" in out) == (result in ("void", "refused"))
    (*_, proof) = report()["causality"]["probes"]
    assert ("log_vocab" in proof) == (result != "refused")
    assert left() == ["report.json"]


def test_an_interrupted_audit_leaves_no_report(run, monkeypatch):
    run("--target=theirs:leaky", *TOKENS)

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(dependency_figure, "draw", interrupt)
    assert run("--target=theirs:honest", *TOKENS)[0] == 130
    assert "report.json" not in left() and "leak.npz" not in left()


def test_as_a_program(folder):
    """From the stranger's own folder, in another process, beside names of ours."""
    (folder / "models.py").write_text("raise RuntimeError\n")
    (folder / "attention.py").write_text("raise RuntimeError\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "train.audit", "--target=theirs:leaky", *TOKENS],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "LEAK: output 3 depends on input 5" in done.stdout
    assert fits_a_screen(done.stdout)
