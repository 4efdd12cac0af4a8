"""The program from flags to files: what it times, refuses, keeps and compares."""

import functools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from matplotlib import image

import attention
from tests.support import files
from train import benchmark, cli
from train.bench import claims, peers, presets, tables, workload
from train.report import terminal

ROOT = pathlib.Path(__file__).parents[2]
ONE = ("--lengths=8", "--head_counts=", "--directions=forward", "--modes=jit")
reference = functools.partial(
    attention.dot_product_attention, implementation="reference"
)


def honest(query, key, value, *, is_causal):
    return reference(query, key, value, is_causal=is_causal)


def wrong(query, key, value, *, is_causal):
    return reference(query, key, value)


def raises(query, key, value, *, is_causal):
    raise RuntimeError("a kernel's own trouble")


def interrupted(query, key, value, *, is_causal):
    if query.shape[1] > 8:
        raise KeyboardInterrupt
    return reference(query, key, value, is_causal=is_causal)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the program; returns its status, output and errors."""

    def run(*arguments, workdir=tmp_path):
        arguments = [f"--workdir={workdir}", *arguments] if workdir else arguments
        monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.run(benchmark.main, benchmark.define_flags)
        written = capsys.readouterr()
        return stopped.value.code, written.out, written.err

    return run


def smoke(*more, target=None, implementations="reference"):
    named = [f"--target=tests.train.benchmark_test:{target}"] if target else []
    return ["--preset=smoke", f"--implementations={implementations}", *named, *more]


def results_of(path):
    return json.loads((path / tables.RESULTS).read_text())


def test_smoke_from_end_to_end(run, tmp_path):
    sizes = ("--lengths=4,8,16", "--head_counts=2")
    status, out, _ = run(*smoke(*sizes, target="honest", implementations=""))
    assert status == 0
    results = results_of(tmp_path)
    assert results["complete"] and results["preset"] == "smoke"
    rows = results["rows"]
    assert len(rows) == (3 + 1) * 2 * 2  # sizes, directions, modes
    for row in rows:
        low, median, high = row["milliseconds"]
        assert row["verdict"] == "measured"
        assert 0 < low <= median <= high
        assert row["flops_per_second"] > 0 and row["share_of_product"] > 0
        assert row["traces"] == (1 if row["mode"] == "jit" else None)
    assert {row["implementation"] for row in rows} == {"target"}
    jit = [x for x in results["exponents"] if x["mode"] == "jit"]
    assert len(jit) == 2 and all(x["memory"] > 1 for x in jit)
    machine = results["machine"]
    assert {"driver", "xla_flags", "precision", "git"} <= machine.keys()
    assert machine["versions"]["jax"] and machine["cores"]
    assert results["claims"] == []
    picture = tmp_path / "figures" / "attention_float32.png"
    assert image.imread(picture).std() > 0.01
    arrays = files.arrays(picture.with_suffix(".npz"))
    x, *_ = arrays["target jit, forward, time by length"]
    np.testing.assert_array_equal(x, [4, 8, 16])
    assert "8/8  T=8, 2 heads of 8, float32, forward+backward: target jit" in out
    assert "traces" in out and "T=16" in out and "N=2" in out


def test_a_wrong_target_is_not_timed(run, tmp_path):
    status, out, _ = run(*smoke(*ONE, target="wrong"))
    assert status == 1
    row, other = results_of(tmp_path)["rows"]
    assert (row["implementation"], row["verdict"]) == ("target", "wrong")
    assert "milliseconds" not in row and "off by" in row["reason"]
    assert other["verdict"] == "measured"
    assert f"target jit, forward, float32, T=8, N=2: wrong: {row['reason']}" in out


def test_a_target_that_raises_is_named(run, tmp_path):
    status, out, _ = run(*smoke(*ONE, target="raises"))
    assert status == 1
    assert results_of(tmp_path)["rows"][0]["verdict"] == "refused"
    assert "RuntimeError: a kernel's own trouble" in out


def test_what_is_done_is_kept_when_interrupted(run, tmp_path):
    lengths = [*ONE, "--lengths=8,16"]
    status, out, _ = run(*smoke(*lengths, target="interrupted"))
    assert status == 130
    results = results_of(tmp_path)
    assert not results["complete"]
    assert [row["length"] for row in results["rows"]] == [8, 8]
    assert (tmp_path / "figures" / "attention_float32.png").exists()
    assert "target jit" in out


def test_the_slow_are_not_asked_for_more(run, tmp_path):
    status, *_ = run(*smoke(*ONE, "--lengths=8,16", "--patience=0"))
    assert status == 0
    first, second = results_of(tmp_path)["rows"]
    assert first["verdict"] == "measured"
    assert second["verdict"] == "skipped" and "at T=8" in second["reason"]


def test_what_does_not_fit_is_not_run(run, monkeypatch, tmp_path):
    monkeypatch.setattr(workload, "memory_limit", lambda: 10)
    status, *_ = run(*smoke(*ONE, "--modes=jit,eager"))
    assert status == 0
    for row in results_of(tmp_path)["rows"]:
        assert row["verdict"] == "refused" and "bytes" in row["reason"]


@pytest.mark.parametrize("verdict, status", [("met", 0), ("missed", 1), ("wrong", 1)])
def test_claims_are_shown_and_decide_the_status(
    run, monkeypatch, tmp_path, verdict, status
):
    judged = {
        "asked": "some work",
        "at_most": [0.5, 0.7],
        "unit": "GB",
        "measured": [0.25, 0.625],
        "verdict": verdict,
        "reason": "",
    }
    monkeypatch.setattr(claims, "measure", lambda scale, announce: iter([judged]))
    assert run(*smoke(*ONE))[0] == 0
    got, out, _ = run(*smoke(*ONE, "--claims=1"))
    assert got == status
    assert results_of(tmp_path)["claims"] == [judged]
    assert "some work" in out and "0.5 / 0.7 GB" in out and "0.25 / 0.625 GB" in out


def test_compare(run, tmp_path):
    assert run(*smoke(*ONE))[0] == 0
    first = results_of(tmp_path)
    for row in first["rows"]:
        row["milliseconds"] = [2.0 * x for x in row["milliseconds"]]
    paths = [tmp_path / "results.json", tmp_path / "twice.json"]
    paths[1].write_text(json.dumps(first))
    done = subprocess.run(
        [sys.executable, "-m", "train.benchmark", "--compare", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "reference jit, forward, float32, B=1 T=8 N=2 K=2 H=8" in done.stdout
    assert " 2.00 " in done.stdout


def test_compare_steps_and_claims(tmp_path, capsys):
    claims = [
        {"asked": "memory", "unit": "GB", "measured": [1.5]},
        {"asked": "without PyTorch", "unit": "", "measured": None},
    ]
    for name, factor in (("a", 1), ("b", 3)):
        step = {"what": "train_step", "milliseconds": {"torch": [1, 2 * factor, 9]}}
        (tmp_path / f"{name}_step").write_text(json.dumps(step))
        rest = {"what": "attention", "rows": [], "claims": claims}
        (tmp_path / f"{name}_claims").write_text(json.dumps(rest))
    console = terminal.console()
    tables.compare(console, [tmp_path / "a_step", tmp_path / "b_step"])
    assert "torch, ms per step" in (out := capsys.readouterr().out) and "3.00" in out
    tables.compare(console, [tmp_path / "a_claims", tmp_path / "b_claims"])
    assert "memory (1) GB" in (out := capsys.readouterr().out) and "1.00" in out
    with pytest.raises(ValueError, match="nothing in common"):
        tables.compare(console, [tmp_path / "a_step", tmp_path / "b_claims"])


def test_compare_as_it_is_written():
    join = benchmark.joined
    assert join(["p", "--compare", "a", "b"]) == ["p", "--compare=a,b"]
    assert join(["p", "--compare=a,b"]) == ["p", "--compare=a,b"]
    assert join(["p", "--compare", "a"]) == ["p", "--compare", "a"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--preset=smoke", "--implementations=flush"], "no implementation 'flush'"),
        (["--preset=smoke", "--implementations=splash"], "nobody is left"),
        (["--preset=smoke", "--lengths=8,4"], "lengths must ascend"),
        (["--preset=smoke", "--lengths=0"], "at least 1"),
        (["--preset=smoke", "--lengths=x"], "'x'"),
        (["--preset=smoke", "--dtypes=int8"], "dtypes must be of"),
        (["--preset=smoke", "--modes="], "modes must be of"),
        (["--preset=smoke", "--dtypes=float64"], "--jax_enable_x64"),
        (["--preset=smoke", "--head_counts=3"], "head_counts must divide"),
        (["--preset=smoke", "--num_kv_heads=3"], "num_kv_heads must divide"),
        (["--preset=smoke", "--target=no_such:kernel"], "no module 'no_such'"),
        (["--preset=huge"], "preset"),
        (["--workdir=setup.cfg"], "setup.cfg"),
        (["--steps=3"], "--steps does not go with --what=attention"),
        (["--what=train_step", "--preset=cpu"], "--preset does not go with"),
        (["--compare=a.json"], "two files"),
        (["--compare=a.json,b.json"], "a.json"),
        (["--compare=setup.cfg,setup.cfg"], "setup.cfg holds no results"),
        (["--compare=a,b", "--rounds=2"], "--rounds does not go with --compare"),
    ],
)
def test_unusable_arguments(run, monkeypatch, arguments, words):
    monkeypatch.chdir(ROOT)  # where there is a setup.cfg
    status, out, err = run(*arguments, workdir=None)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and words in err


def test_presets_are_for_those_who_exist():
    for name, plan in presets.PRESETS.items():
        unknown = set(plan.implementations) - set(peers.CONTENDERS)
        assert not unknown, name
    cpu = presets.PRESETS["cpu"]
    assert cpu.claims == 1
