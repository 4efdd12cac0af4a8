"""Functions over positions, for the tests of the probes."""

import dataclasses

import numpy as np

from attention.properties import probes, subjects

T, E, V = 12, 3, 11
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(V, E)).astype(np.float32)


def subject(fn, **changes):
    vectors = subjects.Subject(
        fn=fn,
        length=T,
        vocab_size=None,
        width=E,
        training=None,
        gradient=None,
        seed=0,
        token_edit_budget=10_000,
    )
    return dataclasses.replace(vectors, **changes)


def tokens(fn, **changes):
    return subject(fn, **({"vocab_size": V, "width": None} | changes))


def next_one(x):
    return np.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))


def kind(probe, fn, **changes):
    return probes.run(probe, subject(fn, **changes)).kind
