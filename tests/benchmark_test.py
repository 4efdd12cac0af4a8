"""The benchmark runs, counts right, and times nothing that is wrong."""

import importlib.util
import json
import sys

import pytest

from tests import experiment_test
from train import benchmark, cli, config

TINY = experiment_test.SMALL


def run(monkeypatch, text, *more, **changes):
    fields = TINY | {"data.path": text} | changes
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    monkeypatch.setattr(
        sys,
        "argv",
        ["benchmark", f"--config={experiment_test.CONFIG}", *arguments, *more],
    )
    with pytest.raises(SystemExit) as stopped:
        cli.run(benchmark.main, benchmark.define_flags)
    return stopped.value.code


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "cat.txt"
    path.write_text(experiment_test.TEXT)
    return path


def test_measures_without_pytorch(monkeypatch, text, tmp_path, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torch" else found(name, *rest),
    )
    output = tmp_path / "results.json"
    more = ("--rounds=2", "--steps=2", f"--output={output}")
    assert run(monkeypatch, text, *more) == 0
    assert "softlookup" in capsys.readouterr().out
    results = json.loads(output.read_text())
    low, median, high = results["milliseconds"]["softlookup"]
    assert 0 < low <= median <= high
    assert results["ratio"] == {"softlookup": 1.0}
    assert results["products_milliseconds"] > 0


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="an extra: PyTorch"
)
def test_pytorch_computes_the_same_and_refuses_what_it_lacks(monkeypatch, text, capsys):
    assert run(monkeypatch, text, "--rounds=1", "--steps=1") == 0
    assert "torch" in capsys.readouterr().out
    for changes in ({"model.positions": "alibi"}, {"train.accumulation": 2}):
        assert run(monkeypatch, text, **changes) == 2
        assert "the PyTorch peer needs" in capsys.readouterr().err


def test_operations_are_those_of_the_compiled_products():
    """6 per weight and token by hand, for one layer of width 16 and 9 ids."""
    settings = config.from_config_dict(
        cli._ConfigFile().parse(experiment_test.CONFIG), config.Config
    )
    found = benchmark.step_flops(settings, 9)
    model, train = settings.model, settings.train
    weights = model.num_layers * (4 * 128 * 128 + 2 * 128 * 512) + 9 * 128
    scores_and_sums = model.num_layers * 2 * 64 * 128
    assert found == 6 * train.batch_size * 64 * (weights + scores_and_sums)
