"""train.study: a small study end to end, its files, and how it goes on."""

import csv
import json
import pathlib
import sys

import numpy as np
import pytest

from configs import recall
from train import cli, study
from train import config as config_lib
from train.studies.recall import claims, config, runs, table

ROOT = pathlib.Path(__file__).parents[2]
# One layer, of a window of 2 behind a convolution of width 2, sees 2 tokens back.
FLAGS = {
    "recall.num_keys": 4,
    "recall.num_values": 4,
    "recall.num_pairs": 2,
    "recall.num_slots": 3,
    "mixers": "window,zero",
    "widths": "8",
    "model.convolution": 2,
    "model.window": 2,
    "optimizer.warmup_steps": 2,
    "runs.factors": "0.5,1",
    "runs.seeds": 1,
    "runs.steps": 5,
    "runs.every": 3,
    "runs.batch_size": 2,
    "runs.rows": 8,
    "runs.test_batches": 2,
}


def settings(**changes):
    values = recall.get_config()
    with values.ignore_type():
        values.update_from_flattened_dict(FLAGS | changes)
    return config_lib.from_config_dict(values, config.StudyConfig)


def run(path, monkeypatch, **changes):
    """The program's exit status."""
    fields = (FLAGS | changes).items()
    arguments = [f"--config.{name}={value}" for name, value in fields]
    config_file = f"--config={ROOT / 'configs' / 'recall.py'}"
    monkeypatch.setattr(
        sys, "argv", ["study", config_file, f"--workdir={path}", *arguments]
    )
    with pytest.raises(SystemExit) as exit_:
        cli.run(study.main, study.define_flags)
    return exit_.value.code or 0


def lines(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A study of two mixers, done."""
    path = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as monkeypatch:
        status = run(path, monkeypatch)
    return path, status


def test_leaves_what_it_found(workdir):
    path, status = workdir
    rows = lines(path / "results.csv")
    names = [(row["mixer"], row["split"], row["seed"]) for row in rows]
    # One seed under two rates, then two fresh ones at the best.
    assert names == [
        (mixer, *run)
        for mixer in ("window", "zero")
        for run in (
            ("validation", "1"),
            ("validation", "1"),
            ("test", "2"),
            ("test", "3"),
        )
    ]
    for mixer in ("window", "zero"):
        of_mixer = [row for row in rows if row["mixer"] == mixer]
        assert [float(row["rate"]) for row in of_mixer[:2]] == [0.0015, 0.003]
        assert (
            of_mixer[2]["rate"]
            == of_mixer[3]["rate"]
            in (of_mixer[0]["rate"], of_mixer[1]["rate"])
        )
    assert {row["steps"] for row in rows} == {"5"}
    report = json.loads((path / "report.json").read_text())
    assert status == (0 if report["passed"] else 1)
    assert (path / "summary.md").read_text().startswith("# Recall")
    for name in ("accuracy", "distance"):
        assert (path / "figures" / f"{name}.png").exists()
        assert (path / "figures" / f"{name}.npz").exists()


@pytest.mark.parametrize(("passed", "wanted"), [(True, 0), (False, 1)])
def test_the_exit_status_is_that_of_the_assertions(
    workdir, passed, wanted, monkeypatch
):
    """Nothing is missing: the rerun only judges."""
    path, _ = workdir
    before = (path / "report.json").read_text()
    check = claims.Check("by hand", passed)
    monkeypatch.setattr(claims, "checks", lambda *arguments: [check])
    assert run(path, monkeypatch) == wanted
    assert json.loads((path / "report.json").read_text())["passed"] is passed
    (path / "report.json").write_text(before)


def test_distances_add_up_to_the_accuracy(workdir):
    path, _ = workdir
    answers = lines(path / "distance.csv")
    for row in lines(path / "results.csv"):
        if row["split"] == "test":
            of_mixer = [
                line
                for line in answers
                if (line["mixer"], line["seed"]) == (row["mixer"], row["seed"])
            ]
            right = sum(int(line["right"]) for line in of_mixer)
            asked = sum(int(line["count"]) for line in of_mixer)
            # 2 batches of 8 rows, each of 2 questions.
            assert asked == 2 * 8 * 2
            assert float(row["accuracy"]) == right / asked
            assert {int(line["distance"]) % 2 for line in of_mixer} == {1}


def test_goes_on_with_what_is_missing(workdir, monkeypatch):
    path, status = workdir
    whole = (path / "results.csv").read_text()
    before = table.read(path / "results.csv", table.Row)
    distances = table.read(path / "distance.csv", table.DistanceRow)
    kept = [line for line in whole.splitlines() if ",zero," not in line]
    (path / "results.csv").write_text("\n".join(kept) + "\n")
    ran = []

    def remember(settings, mixer, width, *, announce):
        ran.append((mixer, width))
        announce("sweep", 3, np.array([0.25, 0.5]))
        return tuple(
            [row for row in rows if row.mixer == mixer] for rows in (before, distances)
        )

    monkeypatch.setattr(runs, "run", remember)
    assert run(path, monkeypatch) == status
    assert run(path, monkeypatch) == status
    assert ran == [("zero", 8)]
    assert (path / "results.csv").read_text() == whole
    assert table.read(path / "distance.csv", table.DistanceRow) == distances


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runs.steps": 6}, "holds another run: runs.steps is 5 there and 6 here"),
        ({"mixers": "softmax,sotfmax"}, "mixers must be names out of"),
        ({"widths": "8,8"}, "widths must ascend"),
        ({"widths": "9"}, "width must be a multiple of num_heads"),
        ({"mixers": "zero,zero"}, "mixers must differ"),
        ({"task": "sorting"}, "task must be one of induction, copy,"),
        ({"runs.goal": 0.0}, "goal must be in (0, 1]"),
        ({"runs.factors": "0,1"}, "factors must be positive"),
        ({"runs.factors": "1"}, "factors x seeds must be 2 or more"),
    ],
    ids=str,
)
def test_refuses(workdir, monkeypatch, capsys, changes, words):
    path, _ = workdir
    before = (path / "config.json").read_text()
    assert run(path, monkeypatch, **changes) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert (path / "config.json").read_text() == before


def test_refuses_damaged_results(workdir, monkeypatch, capsys, tmp_path):
    path, _ = workdir
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (tmp_path / "results.csv").write_text("mixer,width\nzero,8\n")
    assert run(tmp_path, monkeypatch) == 2
    assert "results.csv is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["induction", "copy", "brackets"])
def test_the_other_tasks_have_a_config(task):
    defaults = config_lib.from_config_dict(recall.get_config(task), config.StudyConfig)
    assert defaults.rows_of is getattr(defaults, task)
    assert defaults.rows_of.length < 64


def test_the_default_study_is_whole():
    """Every mixer, two sizes, seeds enough, and windows that cannot see all."""
    defaults = config_lib.from_config_dict(recall.get_config(), config.StudyConfig)
    assert len(defaults.names) == 12 and len(defaults.sizes) == 2
    assert defaults.runs.count >= 5 and defaults.runs.goal == 0.99
    assert defaults.model.convolution == 4 and defaults.recall.num_pairs == 8
    model = defaults.model
    assert model.reach == model.num_layers * (model.window + 2)
    assert model.reach < 2 * defaults.recall.num_slots


def test_states_count_the_convolutions():
    """Keys and values of one earlier token, and one token of the convolution."""
    defaults = settings()
    shape = defaults.model.of("window", 8, defaults.recall.length)
    assert runs.carried(shape, defaults.recall.length) == 2 * 8 + 8
    shape = defaults.model.of("zero", 8, defaults.recall.length)
    assert runs.carried(shape, defaults.recall.length) == 0


def test_seeds_of_the_sweep_are_not_reported():
    swept, fresh = runs.seeds(settings(**{"runs.seeds": 2}))
    assert swept == [1, 2, 1, 2]
    assert len(fresh) == len(set(fresh)) == 4 and not set(fresh) & set(swept)
    assert np.uint32(fresh[-1]) == fresh[-1]
