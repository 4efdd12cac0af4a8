"""attention.dot_product.choice: what stands for implementation=None, and why."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention.dot_product import api, choice, jax_nn


def zeros(length, dtype="float32", width=64):
    return jnp.zeros((1, length, 2, width), dtype)


def explained(length, dtype="float32", width=64, **options):
    x = zeros(length, dtype, width)
    return api.explain(x, x, x, **options)


def chosen(*args, **options):
    """The name that the explanation begins with."""
    return explained(*args, **options).split(":")[0]


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(jax_nn, "on_cuda", lambda: True)


def test_by_size_on_a_cpu():
    """The dense form for few scores, blocks for many."""
    edge = int(np.sqrt(choice.SCORES))
    assert chosen(edge - 1) == "reference"
    assert chosen(edge + 1) == "flash"


def test_what_is_chosen_is_what_runs(monkeypatch):
    """The entry asks the same function."""
    ran = []

    def row(name):
        def run(query, key, value, options):
            ran.append(name)
            return value, None

        return run

    rows = {name: row(name) for name in attention.IMPLEMENTATIONS}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", types.MappingProxyType(rows))
    for length in (4, 4096):
        x = zeros(length)
        attention.dot_product_attention(x, x, x)
        assert ran.pop() == chosen(length)


def test_every_implementation_is_spoken_of():
    lines = explained(8).splitlines()
    assert [line.split(":")[0] for line in lines][0] == "reference"
    assert {line.split(":")[0] for line in lines} == set(attention.IMPLEMENTATIONS)
    assert "cudnn: not chosen: there is no CUDA device" in explained(8)


def test_cudnn_where_it_honours_everything(on_cuda):
    assert chosen(1024, "bfloat16", is_causal=True) == "cudnn"
    assert chosen(1024, "float16", local_window_size=(7, 0)) == "cudnn"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float32"}, "float16 and bfloat16 only"),
        ({"width": 136}, "widths up to 128"),
        ({"width": 12}, "widths up to 128"),
        ({"softcap": 2.0}, "does not honour softcap"),
        ({"scale": jnp.float32(1)}, "its scale is a number"),
        ({"bias": jnp.zeros((1, 1, 1, 1))}, "differentiates a bias"),
        ({"return_residual": True}, "log-sum-exp has no gradient"),
        ({"local_window_size": (2, 1)}, "its windows are causal"),
        ({"length": 1023, "mask": jnp.ones((1, 1, 1, 1), bool)}, "even lengths"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_speaks_against_cudnn(on_cuda, options, words):
    """One reason each; blocks take its place."""
    options = {"length": 1024, "dtype": "bfloat16"} | options
    text = explained(options.pop("length"), **options)
    assert text.startswith("flash: chosen on cpu")
    (line,) = (x for x in text.splitlines() if x.startswith("cudnn"))
    assert words in line and ";" not in line
