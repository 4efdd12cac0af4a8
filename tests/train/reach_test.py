"""How far back gradients reach: assertions, words, and the program in small."""

import dataclasses
import functools
import json
import math
import pathlib
import sys

import numpy as np
import pytest
from matplotlib import image

import configs.reach
from tests.support import files
from train import cli, config, reach
from train.studies import intervals
from train.studies.reach import runs, settings, summary
from train.text import data

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "reach.py")
TEXT = "the cat sat on the mat; a dog ate the hat. " * 40
SMALL = {
    "runs": 2,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.width": 8,
    "model.mlp_width": 16,
    "gru_mlp_width": 4,
    "model.context": 8,
    "data.tokenizer": "chars",
    "optimizer.warmup_steps": 4,
    "steps": 24,
    "batch_size": 4,
    "rows": 3,
    "timing.shortest": 4,
    "timing.longest": 8,
    "timing.width": 8,
    "timing.rounds": 2,
}


@functools.cache
def study_config():
    return config.from_config_dict(configs.reach.get_config(), settings.Config)


def test_a_half_life_needs_a_fall():
    fall = {"mean": -0.2, "low": -0.3, "high": -0.1}
    life = summary.half_life({"slope": fall, "residuals": [0.9, 1.0]})
    assert life == pytest.approx(
        {"mean": math.log(2) / 0.2, "low": math.log(2) / 0.3, "high": math.log(2) / 0.1}
    )
    unclear = {"mean": -0.1, "low": -0.3, "high": 0.1}
    assert summary.half_life({"slope": unclear, "residuals": [0.1, 0.1]}) is None
    # A line that does not describe the norms has no life to halve.
    assert summary.half_life({"slope": fall, "residuals": [1.0, 1.1]}) is None


@pytest.mark.parametrize(
    "exponential, power, words",
    [
        ([0.1, 0.12, 0.11], [2.0, 2.1, 2.05], "an exponential fits better"),
        ([2.0, 2.1, 2.05], [0.1, 0.12, 0.11], "a power law fits better"),
        ([0.1, 0.1, 0.2], [0.2, 0.3, 0.1], "not told apart"),
        ([1.2, 1.3, 1.2], [2.0, 2.1, 2.0], "neither line describes it"),
    ],
)
def test_a_line_is_nearer_only_if_the_runs_tell(exponential, power, words):
    gradients = {
        "exponential": {"residuals": exponential},
        "power": {"residuals": power},
    }
    assert words in summary.nearer(gradients)


def measurements_by_hand(attention_slopes, gru_slopes, losses):
    """Exact exponentials, before and after, over 9 distances."""
    k = np.arange(9.0)
    return {
        name: runs.Measurements(
            parameters=5,
            losses=np.array(losses),
            norms={stage: np.array(slopes)[:, None] * k for stage in settings.STAGES},
        )
        for name, slopes in zip(
            settings.MODELS, (attention_slopes, gru_slopes), strict=True
        )
    }


@pytest.mark.parametrize(
    "gru, losses, held",
    [
        ([-0.5, -0.52], [1.0, 1.1], [True, True, True]),
        ([-0.5, -0.52], [1.0, 3.1], [False, True, True]),
        ([-0.5, -0.52], [1.0, math.nan], [False, True, True]),
        ([-0.5, 0.3], [1.0, 1.1], [True, False, False]),
    ],
)
def test_assertions_are_of_intervals(gru, losses, held):
    small = dataclasses.replace(
        study_config(), model=dataclasses.replace(study_config().model, context=9)
    )
    times = {
        name: [[0.0, 2.0 ** (n * i), 1e9] for i in range(7)]
        for n, name in enumerate(settings.MODELS, 1)
    }
    measured = measurements_by_hand([-0.01, -0.03], gru, losses)
    report = summary.findings(measured, times, small, unigram=3.0)
    assert list(report["checks"].values()) == held
    assert report["passed"] == all(held)
    # There are words for every result, a loss that is not finite included.
    assert summary.words(report).count("Does NOT hold") == held.count(False)
    difference = intervals.of_difference(
        np.array(gru), np.array([-0.01, -0.03]), level=1 - 0.05 / 6
    )
    assert report["difference_of_slopes"]["after"] == pytest.approx(
        difference._asdict()
    )
    exponents = report["step_time"]["exponents"]
    assert exponents == pytest.approx({"attention": 1.0, "GRU": 2.0})
    norms = report["models"]["GRU"]["after"]["norms"]
    assert norms == pytest.approx(
        {"1": np.exp(np.mean(gru)), "8": np.exp(8 * np.mean(gru))}
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "cat.txt"
    path.write_text(TEXT)
    return path


def run(monkeypatch, path, text, **changes):
    fields = SMALL | {"data.path": text} | changes
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    where = [f"--workdir={path}"] if path else []
    monkeypatch.setattr(
        sys, "argv", ["reach", f"--config={CONFIG}", *where, *arguments]
    )
    with pytest.raises(SystemExit) as stopped:
        cli.run(reach.main, reach.define_flags)
    return stopped.value.code


def test_the_program_leaves_numbers_words_and_pictures(
    monkeypatch, text, tmp_path, capsys
):
    path = tmp_path / "new" / "reach"
    status = run(monkeypatch, path, text)
    report = json.loads((path / "report.json").read_text())
    assert status == (0 if report["passed"] else 1)
    assert report["distances"] == [1, 7]
    for name in settings.MODELS:
        model = report["models"][name]
        assert len(model["validation_losses"]) == 2
        assert list(model["before"]["norms"]) == ["1", "7"]
        assert model["before"]["norms"] != model["after"]["norms"]
        low, median, high = np.array(report["step_time"]["milliseconds"][name]).T
        assert len(low) == 2 and (low > 0).all() and (low <= high).all()
        assert report["step_time"]["exponents"][name] is None
    words = (path / "summary.md").read_text()
    assert "g(7)" in words and "T = 8" in words
    assert "training the GRU's slope minus attention's" in capsys.readouterr().out
    for name in ("gradients", "step_time"):
        assert image.imread(path / "figures" / f"{name}.png").std() > 0.01
    arrays = files.arrays(path / "figures" / "gradients.npz")
    assert arrays["log norms, GRU, after"].shape == (2, 8)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": 99}, "rows=99"),
        ({"model.mixers": "gru"}, "model.mixers must be softmax"),
        ({"nearest": 6}, "nearest must leave three distances"),
        ({"runs": 1}, "runs must be at least 2"),
        ({"timing.longest": 2}, "longest must be at least 4"),
        ({"timing.width": 9}, "width must be a multiple"),
    ],
)
def test_what_cannot_be_used_is_refused(
    monkeypatch, text, tmp_path, capsys, changes, message
):
    assert run(monkeypatch, tmp_path / "reach", text, **changes) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "reach").exists()


def test_a_workdir_is_one_study_s(monkeypatch, text, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}\n")
    assert run(monkeypatch, tmp_path, text) == 2
    assert "holds another run: seed is None there" in capsys.readouterr().err
    assert run(monkeypatch, None, text) == 2
    assert "--workdir=DIR is needed" in capsys.readouterr().err


def test_rows_are_spread_over_the_validation_split():
    tokens = np.arange(101, dtype=np.int32)
    corpus = data.Corpus(tokens, tokens, None, "", "")
    rows = runs.text_rows(corpus, rows=3, context=10)
    np.testing.assert_array_equal(rows[:, 0], [0, 40, 90])
    np.testing.assert_array_equal(rows[2], np.arange(90, 100))
