"""--what=train_step runs, counts right, and says what its peer lacks."""

import dataclasses
import functools
import importlib.util
import json
import math
import sys

import jax
import jax.extend as jex
import jax.numpy as jnp
import pytest

from models import transformer
from tests.train import experiment_test
from train import benchmark, cli, config
from train.bench import train_step

TINY = experiment_test.SMALL


def run(monkeypatch, text, *more, **changes):
    fields = TINY | {"data.path": text} | changes
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    monkeypatch.setattr(
        sys,
        "argv",
        ["benchmark", "--what=train_step", f"--config={experiment_test.CONFIG}"]
        + [*arguments, *more],
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
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torch" else find_spec(name, *rest),
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
def test_pytorch_computes_the_same_or_is_left_out(monkeypatch, text, capsys):
    assert run(monkeypatch, text, "--rounds=1", "--steps=1") == 0
    assert "torch" in capsys.readouterr().out
    for changes in ({"model.positions": "alibi"}, {"train.accumulation": 2}):
        assert run(monkeypatch, text, "--rounds=1", "--steps=1", **changes) == 0
        assert "PyTorch is left out: the PyTorch peer needs" in capsys.readouterr().out


def product_flops(jaxpr):
    """Two per multiplication of every dot_general, read off the traced program."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, output = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(output) * math.prod(left[i] for i in contracted)
        for inner in jex.core.jaxprs_in_params(equation.params):
            total += product_flops(inner)
    return total


@pytest.mark.parametrize("num_kv_heads", [None, 1])
def test_operations_are_those_of_the_traced_products(num_kv_heads):
    """The backward pass takes each product of the forward pass twice."""
    settings = config.from_config_dict(
        cli._ConfigFile().parse(experiment_test.CONFIG), config.Config
    )
    sizes = dataclasses.replace(settings.model, num_kv_heads=num_kv_heads)
    settings = dataclasses.replace(settings, model=sizes)
    model = transformer.CausalLM(sizes, 9)
    tokens = jnp.zeros((settings.train.batch_size, sizes.context), jnp.int32)
    forward = functools.partial(model.apply, deterministic=True)
    variables = jax.eval_shape(
        functools.partial(model.init, deterministic=True), jax.random.key(0), tokens
    )
    traced = jax.make_jaxpr(forward)(variables, tokens)
    operations = train_step.step_flops(settings, variables["params"], vocab_size=9)
    assert operations == 3 * product_flops(traced.jaxpr)
