"""--what=mixers: what takes part, what is claimed, and the program in small."""

import json

import chex
import jax
import jax.numpy as jnp
import pytest

from models import mixers as models_mixers
from tests.train import benchmark_test
from train.bench import mixer_cases, mixers

run = benchmark_test.run
FORWARD, BOTH = mixers.DIRECTIONS


def test_every_mixer_of_linear_time_takes_part():
    """But the GRU, which is nothing without its projections."""
    names = {x.removesuffix(" (whole layer)") for x in mixer_cases.CONTENDERS}
    names.remove("flash")
    assert names == set(models_mixers.RECURRENT) - {"gru"}
    assert mixer_cases.PRIMITIVES.keys() <= set(models_mixers.RECURRENT)


def test_a_mixer_without_a_primitive_takes_part_as_a_whole_layer(monkeypatch):
    monkeypatch.setattr(mixer_cases, "LEFT_OUT", ())
    found = dict(mixer_cases._contenders(["linear", "gru"]))
    assert list(found) == ["linear", "gru (whole layer)"]
    assert not found["gru (whole layer)"].claimed


@pytest.mark.parametrize("name", [*mixer_cases.CONTENDERS, "gru"])
def test_contenders_have_the_sizes_of_the_claims(name):
    contender = mixer_cases.CONTENDERS.get(name) or mixer_cases.whole_layer(name)
    arrays = [
        jax.ShapeDtypeStruct((1, 6, *axes), jnp.float32) for axes in contender.axes
    ]
    output = jax.eval_shape(contender.f, *arrays)
    chex.assert_type(output, jnp.float32)
    chex.assert_tree_shape_prefix(output, (1, 6))
    chex.assert_size(output, 6 * 512)


def row(part, name, length, milliseconds, direction=FORWARD):
    return {
        "part": part,
        "implementation": name,
        "direction": direction,
        "length": length,
        "milliseconds": [0.0, milliseconds, 1e9],
    }


def rows(exponent=1.0, forward=10.0, both=10.0, name="rwkv"):
    """Flash takes 30 ms."""
    return [
        *(row("growth", name, n, n**exponent) for n in (2, 4, 8)),
        row("race", name, 8, forward),
        row("race", "flash", 8, 30.0),
        row("race", name, 8, both, BOTH),
        row("race", "flash", 8, 30.0, BOTH),
    ]


@pytest.mark.parametrize(
    "measured, verdicts",
    [
        (rows(), ["met", "met"]),
        (rows(exponent=1.16), ["missed", "met"]),
        (rows(exponent=1.14, forward=10.1), ["met", "missed"]),
        (rows(both=10.1), ["met", "missed"]),
        (rows(both=20.0, name="rwkv6"), ["met", "not claimed"]),
        (rows()[:3], ["met"]),
        (rows()[:2], []),
    ],
)
def test_claims_are_judged(measured, verdicts):
    assert [x["verdict"] for x in mixers.claims(measured, judged=True)] == verdicts
    unjudged = mixers.claims(measured, judged=False)
    assert [x["verdict"] for x in unjudged] == ["not judged"] * len(verdicts)


def test_numbers_are_exponents_and_speeds():
    growth, race = mixers.claims(rows(1.1, 10.0, 5.0), judged=True)
    assert growth["measured"] == pytest.approx([1.1])
    assert race["measured"] == pytest.approx([3.0, 6.0])


@pytest.fixture
def two(monkeypatch):
    """One mixer beside flash, for few compilations."""
    kept = {name: mixer_cases.CONTENDERS[name] for name in ("linear", "flash")}
    monkeypatch.setattr(mixer_cases, "CONTENDERS", kept)
    monkeypatch.setattr(mixers, "LENGTHS", (2048, 4096, 8192))


def test_the_program_in_small(run, two, tmp_path):
    status, out, _ = run("--what=mixers", "--divisor=1024", "--rounds=1")
    assert status == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["complete"] and results["machine"]["cores"]
    cases = [(x["part"], x["implementation"], x["length"]) for x in results["rows"]]
    race = [("race", "linear", 16), ("race", "flash", 16)]
    assert cases == [*(("growth", "linear", n) for n in (2, 4, 8)), *race, *race]
    for x in results["rows"]:
        low, median, high = x["milliseconds"]
        assert 0 < low <= median <= high and x["temporary_bytes"] > 0
    assert {x["verdict"] for x in results["claims"]} == {"not judged"}
    assert "race at T=16" in out and "linear: time ~ T^" in out
    path = tmp_path / "results.json"
    status, out, _ = run("--compare", f"{path},{path}", workdir=None)
    assert status == 0 and "linear jit, forward+backward" in out


def test_a_missed_claim_is_status_1(run, two, monkeypatch, tmp_path):
    monkeypatch.setattr(mixers, "measure", lambda **_: [rows(both=11.0)])
    monkeypatch.setattr(
        mixers, "rendered", lambda results: [json.dumps(results["claims"])]
    )
    monkeypatch.setattr(
        mixer_cases,
        "CONTENDERS",
        {"rwkv": mixer_cases.Contender((), print, True)},
    )
    assert run("--what=mixers")[0] == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert [x["verdict"] for x in results["claims"]] == ["met", "missed"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--what=mixers", "--lengths=8"), "--lengths does not go with --what=mixers"),
        (("--what=mixers", "--steps=3"), "--steps does not go with --what=mixers"),
        (("--divisor=2",), "--divisor does not go with --what=attention"),
        (("--what=mixers", "--divisor=4096"), "divisor"),
    ],
)
def test_flags_of_others_are_refused(run, arguments, message):
    status, _, errors = run(*arguments)
    assert status == 2 and message in errors


def test_train_step_keeps_refusing_a_workdir(run):
    status, _, errors = run("--what=train_step")
    assert status == 2
    assert "--workdir does not go with --what=train_step" in errors
