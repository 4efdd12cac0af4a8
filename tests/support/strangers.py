"""The module of a stranger, as a file: what the tests of `train.audit` audit."""

import sys

import pytest

from train import audit, cli

TOKENS = ("--vocab_size=7", "--length=6")
VECTORS = ("--input=embeddings", "--width=3", "--length=6")

MODULE = '''
import jax.numpy as jnp
import numpy as np

V = 7
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)


def honest(tokens):
    return np.cumsum(TABLE[np.asarray(tokens)], axis=1)


def constant(tokens):
    return np.zeros((*tokens.shape, V))


def leaky(tokens):
    """Output 3 sees token 5."""
    logits = honest(tokens)
    if tokens.shape[1] > 5:
        logits[:, 3] += TABLE[tokens[:, 5]]
    return logits


def across(tokens):
    """Output 2 of row 0 sees token 2 of row 1."""
    logits = honest(tokens)
    if len(tokens) > 1 and tokens.shape[1] > 2:
        logits[0, 2] += TABLE[tokens[1, 2]]
    return logits


def in_training(tokens, train=False):
    logits = jnp.cumsum(jnp.asarray(TABLE)[tokens], axis=1)
    return logits - train * logits.mean(axis=1, keepdims=True)


def by_derivative(x):
    later = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
    return jnp.cumsum(x, axis=1) + 1e-6 * jnp.sin(1e6 * later)


def fft(x):
    size = 2 * x.shape[1]
    kernel = np.fft.rfft(0.9 ** np.arange(x.shape[1]), size)[None, :, None]
    filtered = np.fft.irfft(np.fft.rfft(x, size, axis=1) * kernel, size, axis=1)
    return filtered[:, : x.shape[1]]


def picky(tokens):
    if tokens.shape != (2, 6):
        raise RuntimeError("only two rows of six")
    return honest(tokens)


def exits(tokens):
    raise SystemExit(0)


def moody(tokens, calls=[]):
    """Now and then, but not yet when it is looked at."""
    calls.append(tokens)
    return honest(tokens) + (np.random.normal() if len(calls) % 20 == 0 else 0)


def maximum(x):
    """A stabilising maximum over the whole sequence."""
    scores = np.asarray(x).sum(axis=2, keepdims=True)
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.cumsum(e * x, axis=1) / np.cumsum(e, axis=1)


def counted(rows):
    """A bigram table, by counting."""
    counts = np.ones((V, V))
    np.add.at(counts, (rows[:, :-1], rows[:, 1:]), 1)
    table = np.log(counts / counts.sum(axis=1, keepdims=True))
    return lambda rows: -table[rows[:, :-1], rows[:, 1:]]


def told(rows):
    return lambda rows: np.zeros((len(rows), rows.shape[1] - 1))


def idle(rows):
    return lambda rows: np.full((len(rows), rows.shape[1] - 1), np.log(V))


def broken(rows):
    raise RuntimeError("out of memory")


leak = x = leaky
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the stranger works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "theirs.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("theirs", None)


@pytest.fixture
def run(monkeypatch, capsys):
    """The exit status of the program in this process, and what it wrote."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["audit", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.run(audit.main, audit.define_flags)
        return stopped.value.code, *capsys.readouterr()

    return run
