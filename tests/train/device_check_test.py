"""The check of a device: its oracle and cases, what it calls wrong, what it leaves."""

import dataclasses
import functools
import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention.dot_product import api, reference
from tests.contract import wrong_implementations
from tests.support import oracle
from train import cli, device_check, workdir
from train.device import checks, plans, speed

ALONE = {"grouped": (checks.HIGHEST,)}
SMOKE = plans.PRESETS["smoke"]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the program; returns its status, report, output and errors."""

    def run(*arguments, preset="smoke", **changes):
        changed = {"smoke": dataclasses.replace(SMOKE, **changes)}
        monkeypatch.setattr(plans, "PRESETS", {**plans.PRESETS, **changed})
        flags = [f"--preset={preset}", f"--workdir={tmp_path}", *arguments]
        monkeypatch.setattr(sys, "argv", ["device_check", *flags])
        with pytest.raises(SystemExit) as stopped:
            cli.run(device_check.main, device_check.define_flags)
        path = tmp_path / workdir.REPORT
        report = json.loads(path.read_text()) if path.exists() else None
        return stopped.value.code, report, *capsys.readouterr()

    return run


@pytest.fixture
def implementations(monkeypatch):
    """Replaces `attention.IMPLEMENTATIONS`."""

    def implementations(**rows):
        table = types.MappingProxyType({"reference": reference.attention, **rows})
        monkeypatch.setattr(attention, "IMPLEMENTATIONS", table)
        monkeypatch.setattr(api, "IMPLEMENTATIONS", table)

    return implementations


def verdicts(report, part="correctness"):
    return {
        row["implementation"]: (row["verdict"], row.get("reason"))
        for row in report["rows"][part]
    }


def test_smoke_from_end_to_end(run):
    """cases B030 and B074, in small."""
    status, report, out, _ = run()
    assert status == 0
    assert report["complete"] and report["passed"] and not report["broken"]
    assert list(report["rows"]) == list(report["seconds"]) == list(device_check.PARTS)
    rows = report["rows"]["correctness"]
    assert len(rows) == len(SMOKE.cases) * len(attention.IMPLEMENTATIONS)
    for row in rows:
        if row["implementation"] == "cudnn":
            assert row["verdict"] == "refused" and "CUDA device" in row["reason"]
            continue
        assert row["verdict"] == "right"
        assert row["chosen"] == (row["implementation"] == "reference")
        for name in checks.RESULTS:
            assert 0 < row["errors"][name] <= row["tolerances"][name]
    for mask in ("window", "documents"):
        ours, theirs = (x for x in report["rows"]["masks"] if x["mask"] == mask)
        assert (ours["verdict"], theirs["verdict"]) == ("measured", "measured")
        assert ours["ratio"] == ours["milliseconds"][1] / theirs["milliseconds"][1]
    (step,) = report["rows"]["train_step"]
    assert step["first"] == step["on_cpu"]
    assert step["last"]["loss"] < step["first"]["loss"]
    assert step["steps"] > SMOKE.rounds * SMOKE.steps
    assert {x["verdict"] for x in report["rows"]["benchmark"]} == {"measured"}
    assert "cudnn refused bfloat16" in out and "reference*" in out
    assert "passed: 10 right, 3 refused, 6 measured" in out


def test_a_wrong_implementation_is_found(run, implementations):
    implementations(wrong=wrong_implementations.reads_head_n_mod_k)
    status, report, out, _ = run("--parts=correctness", cases=ALONE)
    assert status == 1 and report["complete"] and not report["passed"]
    judged = verdicts(report)
    assert judged["reference"] == ("right", "")
    verdict, reason = judged["wrong"]
    assert verdict == "wrong" and "out is off by" in reason and "dk is off" in reason
    assert "NOT passed: 1 right, 1 wrong" in out


def test_what_must_not_refuse_and_what_is_no_number(run, implementations):
    def refuses(query, key, value, options):
        raise NotImplementedError("no such kernel")

    def nan(query, key, value, options):
        output, residual = reference.attention(query, key, value, options)
        return jnp.nan * output, residual

    implementations(flash=refuses, other=refuses, nan=nan)
    status, report, *_ = run("--parts=correctness", cases=ALONE)
    assert status == 1
    judged = verdicts(report)
    assert judged["flash"][0] == "failed" and "no such kernel" in judged["flash"][1]
    assert judged["other"][0] == "refused"
    assert judged["nan"][0] == "wrong"
    *_, row = report["rows"]["correctness"]
    assert row["errors"]["out"] is None


def test_a_part_that_breaks_does_not_keep_the_others(run, monkeypatch):
    def breaks(inputs):
        yield [{"verdict": "right"}]
        raise RuntimeError("the device is gone")

    def rests(inputs):
        inputs.note("a note")
        yield []

    parts = {"benchmark": rests, "correctness": rests} | {"masks": breaks}
    monkeypatch.setattr(device_check, "PARTS", parts)
    monkeypatch.setattr(device_check.verdict, "_SHOW", {"masks": print})
    status, report, out, err = run("--parts=masks,benchmark")
    assert status == 1 and not report["passed"]
    assert "the device is gone" in report["broken"]["masks"]
    assert report["rows"] == {"masks": [{"verdict": "right"}], "benchmark": []}
    assert report["notes"] == ["a note"]
    assert "masks: broken: RuntimeError" in out and "Traceback" in err


def test_what_is_done_is_kept_when_interrupted(run, monkeypatch):
    def interrupted(inputs):
        yield [{"verdict": "right"}]
        raise KeyboardInterrupt

    monkeypatch.setattr(device_check, "PARTS", {"benchmark": interrupted})
    monkeypatch.setattr(device_check.verdict, "_SHOW", {"benchmark": print})
    status, report, *_ = run("--parts=benchmark")
    assert status == 130
    assert not report["complete"] and not report["passed"]
    assert report["rows"] == {"benchmark": [{"verdict": "right"}]}


def test_the_benchmark_ends_when_time_is_up(run):
    status, report, out, _ = run("--parts=benchmark", seconds=0.0)
    assert status == 0 and report["rows"] == {"benchmark": []}
    assert report["notes"] == ["time is up: 0 of 1 cases of the benchmark"]
    assert "time is up" in out


def test_flash_must_not_refuse_a_mask_and_its_peer_may(implementations):
    def refuses(query, key, value, options):
        raise NotImplementedError("no such kernel")

    implementations(flash=refuses)
    rows = speed.against_dense(
        SMOKE.sweep, length=64, peer="cudnn", announce=lambda words: None
    )
    ours, theirs = next(rows)
    assert (ours["verdict"], theirs["verdict"]) == ("failed", "refused")
    assert "no such kernel" in ours["reason"] and "ratio" not in ours


def test_training_must_be_as_on_the_cpu_and_learn():
    first = {"loss": 5.0, "gradient norm": 2.0}
    judge = functools.partial(speed.judge_steps, first)
    assert judge({"loss": 4.0}, first) == ({"loss": 0.0, "gradient norm": 0.0}, [])
    assert judge({"loss": 4.0}, None) == ({}, [])
    _, reasons = judge({"loss": math.nan}, {"loss": 5.2, "gradient norm": math.nan})
    assert [x.split(" ")[-1] for x in reasons] == ["3.8e-02", "nan", "fallen"]


def test_the_oracle_is_the_loop_over_single_numbers():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, 5, n, 3)) for n in (4, 2, 2, 4)]
    visible = rng.random((2, 4, 5, 5)) < 0.6
    visible[0, 0, 0] = False
    *inputs, output_gradient = arrays
    wanted = oracle.attention(*inputs, visible=visible, output_gradient=output_gradient)
    results = checks.oracle(arrays, visible)
    for name, x in zip(checks.RESULTS, results, strict=True):
        np.testing.assert_allclose(x, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", checks.CASES)
def test_the_arguments_of_a_case_show_what_the_oracle_is_told(name):
    case = checks.cases(16, 8)[name]
    query, key, *_ = case.inputs("float32")
    shown = attention.attention_weights(query, key, **case.static, **case.arrays) > 0
    np.testing.assert_array_equal(shown, np.broadcast_to(case.visible, shown.shape))


def test_every_case_and_dtype_is_in_the_preset_for_gpus():
    """case B030 has its shapes there, and B074 its tolerances and sizes."""
    plan = plans.PRESETS["gpu"]
    assert plan.cases.keys() == set(checks.CASES)
    assert set(plan.cases.values()) == {checks.VARIANTS}
    table = checks.cases(plan.length, plan.width)
    assert table["B074"].sizes[1::3] == (256, 64)
    assert table["B030"].sizes == (4, 32, 4, 4, 16)
    assert table["B030"].arrays["mask"].shape == (4, 1, 1, 32)
    assert checks.FLOAT32.output == 2e-3
    assert checks.HIGHEST.output == 1e-5
    assert checks.BFLOAT16.output == 2e-2


def test_the_report_of_a_run_is_not_lost(run, tmp_path):
    (tmp_path / workdir.CONFIG).write_text("{}")
    status, report, _, err = run()
    assert (status, report) == (2, None)
    assert "holds a run" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--parts=speed"], "--parts must be of"),
        (["--parts="], "--parts must be of"),
        (["--preset=gpu"], "needs a GPU"),
        (["--preset=huge"], "preset"),
        (["--workdir=setup.cfg"], "setup.cfg"),
        (["--config.data.path=no_such_text"], "no_such_text"),
        (["--config=no_such_config.py"], "no_such_config.py"),
    ],
)
def test_unusable_arguments(run, monkeypatch, arguments, words):
    monkeypatch.chdir(device_check.CONFIG.parent.parent)  # where there is a setup.cfg
    status, report, out, err = run(*arguments)
    assert (status, report, out) == (2, None, "")
    assert err.count("\n") == 1 and words in err
