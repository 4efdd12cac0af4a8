"""The table of claims: every row measures what it says, and is judged right."""

import inspect
import re
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from attention import masks
from train.bench import claims, memory, peers, trials, workload
from train.report import compilation, stopwatch

TINY = trials.Scale(divisor=256, rounds=1, seconds=0.0)


@pytest.fixture
def dense(monkeypatch):
    """The reference instead of flash: it compiles faster, and has no blocks."""
    monkeypatch.setattr(trials, "OURS", "reference")


def claim(measured, at_most=(1.0,)):
    def measure(scale):
        if isinstance(measured, Exception):
            raise measured
        return measured

    return claims.Claim("a work", at_most, "", measure)


@pytest.mark.parametrize(
    "measured, verdict",
    [
        ([1.0], "met"),
        ([1.01], "missed"),
        ([float("nan")], "missed"),
        (trials.Skipped("PyTorch is not installed"), "skipped"),
        (trials.Wrong("off by 1"), "wrong"),
        (RuntimeError("out of memory"), "missed"),
    ],
)
def test_verdicts(monkeypatch, measured, verdict):
    monkeypatch.setattr(claims, "CLAIMS", (claim(measured),))
    scale = trials.Scale(divisor=1, rounds=1, seconds=0.0)
    announced = []
    (row,) = claims.measure(scale, announce=announced.append)
    assert (row["asked"], row["verdict"]) == ("a work", verdict)
    assert announced == ["claim 1/1  a work"]
    if isinstance(measured, Exception):
        assert (row["measured"], row["reason"]) == (None, str(measured))


def test_every_part_of_a_row_is_judged(monkeypatch):
    rows = (claim([0.5, 0.9], (0.6, 0.7)), claim([0.5, 0.7], (0.6, 0.7)))
    monkeypatch.setattr(claims, "CLAIMS", rows)
    scale = trials.Scale(divisor=1, rounds=1, seconds=0.0)
    judged = claims.measure(scale, announce=print)
    assert [row["verdict"] for row in judged] == ["missed", "met"]
    scale = trials.Scale(divisor=2, rounds=1, seconds=0.0)
    judged = claims.measure(scale, announce=print)
    assert [row["verdict"] for row in judged] == ["not judged"] * 2


def test_every_row_measures_a_number_for_each_limit(dense):
    """All but those of processes and of all masks, which are tested apart."""
    left_out = {trials.compile_seconds, trials.peak}
    for row in claims.CLAIMS:
        measure = getattr(row.measure, "func", row.measure)
        if measure in left_out:
            continue
        if measure is trials.against:  # three rows differ in words alone
            left_out.add(measure)
        try:
            measured = row.measure(TINY)
        except trials.Skipped as reason:
            assert "PyTorch is not installed" in str(reason)
            continue
        assert len(measured) == len(row.at_most), row.asked
        assert all(x > 0 for x in measured), row.asked


def test_a_wrong_result_is_no_number(monkeypatch, dense):
    monkeypatch.setattr(workload, "tolerance", lambda dtype: -1.0)
    with pytest.raises(trials.Wrong, match="off by"):
        trials.against_full(8192, trials.window, True, TINY)
    with pytest.raises(trials.Wrong, match="off by"):
        trials.rows_of_lengths(TINY)


def test_without_pytorch_its_rows_are_skipped(monkeypatch):
    missing = peers.Contender(lambda: "PyTorch is not installed", dict)
    monkeypatch.setattr(peers, "CONTENDERS", {"torch": missing})
    with pytest.raises(trials.Skipped, match="PyTorch is not installed"):
        trials.against("torch", "eager", True, TINY)


def test_ratios_are_ours_to_theirs(monkeypatch):
    monkeypatch.setattr(
        stopwatch,
        "interleaved",
        lambda runs, turns: dict(zip(runs, ([1.0, 2.0, 9.0], [4.0]), strict=True)),
    )
    assert TINY.ratio(print, print) == 0.5


def test_documents_are_packed_in_full():
    scale = trials.Scale(divisor=64, rounds=1, seconds=0.0)
    mask = trials.documents(scale, 128).materialize(128, 128)[0, 0]
    np.testing.assert_array_equal(mask, np.tril(mask))
    starts = np.argmax(mask, axis=1)
    assert len(np.unique(starts)) == trials.DOCUMENTS
    assert (np.diff(starts) >= 0).all()


def test_bigbird_sees_five_blocks_in_the_middle():
    scale = trials.Scale(divisor=64, rounds=1, seconds=0.0)
    mask = trials.bigbird(scale, 128).materialize(128, 128)
    blocks = np.asarray(mask)[0, 0].reshape(64, 2, 64, 2)
    seen = blocks.any(axis=(1, 3)).sum(axis=1)
    assert (seen[2:-1] == 5).all()


def test_every_constructor_of_masks_is_compiled():
    built_in = trials.built_in(64, 8)
    kinds = {type(mask).__name__ for mask in built_in}
    text = inspect.unwrap(trials.built_in).__code__.co_names
    constructors = {
        name
        for name, x in vars(masks).items()
        if callable(x) and not re.match("_|[A-Z]", name)
    }
    assert constructors <= set(text)
    assert len(kinds) > 8
    for mask in built_in:
        if mask is not None:
            assert mask.materialize(64, 64).dtype == bool


def test_compilation_is_that_of_the_slowest(monkeypatch, dense):
    monkeypatch.setattr(trials, "built_in", lambda *sizes: [None] * 3)
    costs = map(compilation.Cost, [1.0, 3.0, 2.0], [0, 0, 0])
    monkeypatch.setattr(compilation, "cost", lambda *what: next(costs))
    assert trials.compile_seconds(TINY) == [3.0]


def test_memory_of_a_process_is_its_own():
    """Not that of this one, which is larger."""
    ballast = jnp.ones((2**27,), jnp.int8) + np.ones(2**27, np.int8)
    work = workload.Work(length=16, num_heads=1, num_kv_heads=1, backward=True)
    peak, error = memory.in_child(work, window=4, implementation="reference")
    assert 5e7 < peak < memory.peak_bytes() - 0.5 * ballast.nbytes
    assert error < 1e-5


def test_a_process_that_fails_says_so(monkeypatch):
    failed = subprocess.CompletedProcess([], -9, "", "Traceback\nKilled: out of memory")
    monkeypatch.setattr(subprocess, "run", lambda *what, **options: failed)
    work = workload.Work(length=16)
    with pytest.raises(RuntimeError, match="exit status -9: Killed: out of memory"):
        memory.in_child(work, window=None, implementation="reference")


def test_peaks_are_gigabytes(monkeypatch):
    asked = []

    def in_child(work, *, window, implementation):
        asked.append((work.length, window, implementation))
        return 2_500_000_000, 1e-6

    monkeypatch.setattr(memory, "in_child", in_child)
    *_, long, longest, _ = claims.CLAIMS
    scale = trials.Scale(divisor=1, rounds=1, seconds=0.0)
    assert long.measure(scale) == longest.measure(scale) == [2.5]
    assert asked == [(65536, None, "flash"), (2**20, 1024, "flash")]
    monkeypatch.setattr(memory, "in_child", lambda *x, **y: (1, float("nan")))
    with pytest.raises(trials.Wrong):
        long.measure(scale)
