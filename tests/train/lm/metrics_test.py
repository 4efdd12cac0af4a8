"""metrics.jsonl, TensorBoard event files and the progress line."""

import importlib.machinery
import json
import math
import sys
import types

import pytest
import rich.console

from train.lm import metrics


def _record(step, **values):
    return {"step": step, "loss": 1.0 / step, "tokens_per_second": 1234.5, **values}


def _write(workdir, steps, *, start, tensorboard=False):
    with metrics.writer(workdir, start=start, tensorboard=tensorboard) as write:
        for step in steps:
            write(_record(step))


def _steps(workdir):
    return [record["step"] for record in metrics.read(workdir)]


def test_a_line_a_record_flushed_at_once(tmp_path):
    with metrics.writer(tmp_path, start=0, tensorboard=False) as write:
        for step in (10, 20):
            write(_record(step))
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[-1]) == _record(step)
    assert len(lines) == 2
    assert metrics.read(tmp_path) == [_record(10), _record(20)]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_continuing_cuts_what_will_be_done_again(tmp_path):
    """Killed at 35 after a checkpoint at 20: nothing is dropped, nothing is twice."""
    _write(tmp_path, (10, 20, 30), start=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 35, "lo')
    assert _steps(tmp_path) == [10, 20, 30]
    with metrics.writer(tmp_path, start=20, tensorboard=False) as write:
        assert _steps(tmp_path) == [10, 20]
        write(_record(30))
        write(_record(40))
    assert _steps(tmp_path) == [10, 20, 30, 40]


def test_starting_again_from_nothing_cuts_everything(tmp_path):
    _write(tmp_path, (10, 20), start=0)
    _write(tmp_path, (5,), start=0)
    assert _steps(tmp_path) == [5]


def test_nothing_logged_yet(tmp_path):
    assert metrics.read(tmp_path) == []


def test_not_finite_values_are_valid_json(tmp_path):
    """Strict parsers know neither NaN nor Infinity."""

    def refuse(word):
        raise AssertionError(word)

    with metrics.writer(tmp_path, start=0, tensorboard=False) as write:
        write(_record(1, loss=math.nan, gradient_norm=math.inf))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["loss"] is None
    (record,) = metrics.read(tmp_path)
    assert math.isnan(record["loss"])
    assert math.isnan(record["gradient_norm"])


def test_tensorboard_needs_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install .* '\.\[tensorboard\]'"):
        _write(tmp_path, (), start=0, tensorboard=True)
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_every_scalar(tmp_path, monkeypatch):
    calls: list[object] = []

    class SummaryWriter:
        def __init__(self, directory, *, purge_step):
            calls.append((directory, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    fake = types.SimpleNamespace(
        SummaryWriter=SummaryWriter,
        __spec__=importlib.machinery.ModuleSpec("tensorboardX", None),
    )
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    _write(tmp_path, (30,), start=20, tensorboard=True)
    assert calls == [
        (str(tmp_path / "tensorboard"), 21),
        ("loss", 1 / 30, 30),
        ("tokens_per_second", 1234.5, 30),
        "closed",
    ]
    assert _steps(tmp_path) == [30]


def test_tensorboard_writes_an_event_file(tmp_path):
    pytest.importorskip("tensorboardX")
    _write(tmp_path, (10, 20), start=0, tensorboard=True)
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    assert b"tokens_per_second" in events.read_bytes()


def test_progress_without_a_terminal_is_plain_lines(capsys):
    with metrics.progress(40, start=0) as show:
        show(_record(10))
        show(_record(20))
    assert capsys.readouterr().out == (
        "step 10/40  loss 0.1000  1,234 tokens/s\n"
        "step 20/40  loss 0.0500  1,234 tokens/s\n"
    )


def test_progress_on_a_terminal_is_one_live_line(capsys, monkeypatch):
    terminal = rich.console.Console(force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(rich.console, "Console", lambda: terminal)
    with metrics.progress(40, start=10) as show:
        show(_record(20))
        show(_record(40))
    output = capsys.readouterr().out
    last = [line for line in output.splitlines() if "step" in line][-1]
    assert "step 40/40" in last
    assert "loss 0.0250" in last
    assert "1,234 tokens/s" in last
    assert "left" in last
