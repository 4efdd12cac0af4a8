"""What a study claims of results made by hand; distances against loops."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from tests.support import files
from tests.train import study_test
from train.studies import batches, sweep, tasks
from train.studies.recall import by_distance, claims, picture, runs, summary, table

SETTINGS = study_test.settings()
NOISE = np.array([0.01, -0.01, 0.02, -0.02, 0.0])


def rows(mixer, accuracies, *, width=8, state=24):
    """The report of one mixer, and a sweep that must not count."""
    row = table.Row(
        "recall", mixer, width, 100, state, "test", 0.01, 0, 5, accuracy=0.0
    )
    swept = dataclasses.replace(row, split="validation", accuracy=0.123)
    return [
        swept,
        *(
            dataclasses.replace(row, seed=i, accuracy=float(accuracy))
            for i, accuracy in enumerate(accuracies)
        ),
    ]


def words(*groups, distances=(), settings=SETTINGS):
    points = claims.points([row for group in groups for row in group])
    reaches = claims.reaches(settings, distances)
    checks = claims.checks(settings, points, reaches)
    return summary.summary(
        settings,
        points,
        claims.compare(points, goal=settings.runs.goal),
        reaches,
        checks,
    )


@pytest.mark.parametrize(
    ("window", "zero", "sentence"),
    [
        (0.9 + NOISE, 0.5 - NOISE, "- window: above zero."),
        (0.5 + NOISE, 0.9 - NOISE, "- window: below zero."),
        (0.51 + NOISE, 0.5 - NOISE, "- window: not told apart from zero."),
        (np.ones(5), np.ones(5), "- window: not told apart from zero."),
        # Runs end at the goal, 0.99: no interval of width 0 tells them apart.
        (np.ones(5), np.full(5, 0.995), "- window: not told apart from zero."),
        # Each alone varies a lot, the paired difference does not.
        (0.5 + 20 * NOISE, 0.4 + 20 * NOISE + NOISE[::-1] / 2, "- window: above zero."),
        # One run that failed: a mean far higher, and an interval that holds 0.
        (np.ones(5), [0.1, 1, 1, 1, 1], "- window: not told apart from zero."),
    ],
    ids=[
        "above",
        "below",
        "overlapping",
        "all at 1",
        "all done",
        "paired",
        "one failed",
    ],
)
def test_claims_what_the_interval_supports(window, zero, sentence):
    text = words(rows("window", window), rows("zero", zero))
    lines = [line for line in text.splitlines() if line.startswith(("- w", "- z"))]
    assert lines == [sentence]


def test_more_comparisons_are_more_careful():
    """A difference that is told among two, and not among many."""
    close = rows("window", 0.55 + NOISE), rows("zero", 0.5 - NOISE)
    assert "window: above zero" in words(*close)
    rest = [rows(name, 0.2 + NOISE) for name in ("linear", "rwkv", "gru", "mamba")]
    text = words(*close, *rest)
    assert "window: above linear, rwkv, gru, mamba; not told apart from zero." in text
    points = claims.points([row for group in (*close, *rest) for row in group])
    assert len(claims.compare(points, goal=1.0)) == 6 - 1


def test_widths_are_compared_within_a_mixer_only():
    settings = study_test.settings(widths="8,16")
    text = words(
        rows("window", 0.9 + NOISE, width=16),
        rows("window", 0.5 + NOISE[::-1], width=8),
        rows("zero", 0.2 + NOISE, width=16),
        rows("zero", 0.2 - NOISE, width=8),
        settings=settings,
    )
    assert "- 16 against 8: window above; zero not told apart." in text
    assert text.count("- window: above zero.") == 2


def distance_rows(within, beyond, *, mixer="window"):
    """Accuracies of 5 runs at the distances 1 (in reach: 2) and 3 (beyond)."""
    return [
        table.DistanceRow(mixer, 8, seed, distance, round(1000 * share), 1000)
        for distance, shares in ((1, within), (3, beyond))
        for seed, share in enumerate(shares)
    ]


@pytest.mark.parametrize(
    ("within", "beyond", "holds"),
    [
        (0.9 + NOISE, 0.25 + NOISE[::-1] / 10, [True, True]),
        (0.9 + NOISE, 0.2 + NOISE / 10, [True, True]),
        (0.9 + NOISE, 0.255 + NOISE / 10, [True, True]),
        (0.9 + NOISE, 0.4 + NOISE[::-1], [False, True]),
        # Wide intervals show nothing: neither that runs guess.
        (0.9 + NOISE, [0.25, 0.25, 0.25, 0.25, 0.6], [False, True]),
        (0.26 + NOISE, 0.25 - NOISE / 10, [True, False]),
    ],
    ids=[
        "a step",
        "below chance",
        "by luck above",
        "above chance beyond",
        "one run recalls beyond",
        "no step",
    ],
)
def test_windows_must_step_down_to_chance(within, beyond, holds):
    """Chance is 1 of 4 values."""
    answers = distance_rows(within, beyond) + distance_rows(
        beyond, within, mixer="softmax"
    )
    reaches = claims.reaches(SETTINGS, answers)
    checks = claims.checks(SETTINGS, [], reaches)
    assert [check.passed for check in checks] == holds
    text = words(rows("window", within), distances=answers)
    assert text.count("- FAILS: ") == holds.count(False)
    assert text.count("- holds: ") == holds.count(True)


@pytest.mark.parametrize(("mean", "holds"), [(0.99, True), (0.98, False)])
def test_softmax_of_the_largest_width_must_reach_the_goal(mean, holds):
    settings = study_test.settings(widths="8,16", mixers="softmax")
    accuracies = mean + NOISE / 4
    points = claims.points(
        rows("softmax", accuracies, width=16) + rows("softmax", [0.1] * 5, width=8)
    )
    (check,) = claims.checks(settings, points, [])
    assert check.passed is holds
    other = study_test.settings(task="copy")
    assert claims.checks(other, points, []) == []


def swept(rate, accuracy, steps):
    return table.Row("recall", "gru", 8, 1, 1, "validation", rate, 0, steps, accuracy)


@pytest.mark.parametrize(
    ("rows", "rate"),
    [
        ([swept(0.1, 0.5, 9), swept(0.2, 0.7, 9), swept(0.3, 0.6, 9)], 0.2),
        # Beyond the goal of 0.9 the faster one.
        ([swept(0.1, 0.99, 9), swept(0.2, 0.91, 6), swept(0.3, 0.8, 3)], 0.2),
        # The mean counts, not the best run.
        ([swept(0.1, 0.9, 1), swept(0.1, 0.1, 9), swept(0.2, 0.6, 9)], 0.2),
        # So does the last of its seeds.
        ([swept(0.1, 1.0, 1), swept(0.1, 0.9, 9), swept(0.2, 0.9, 8)], 0.2),
    ],
)
def test_the_rate_is_chosen_by_accuracy_then_by_speed(rows, rate):
    assert runs.choose(rows, goal=0.9) == rate


class Scripted(runs.Program):
    """Runs whose accuracy follows a script: one row for each look."""

    def batch(self, seeds, split, index):
        mask = np.ones((len(seeds), 1, 100), bool)
        return batches.Batch(mask, mask, mask)


@pytest.mark.parametrize(
    ("groups", "used", "looks"),
    [(1, [2, 5, 4, 5], 3), (2, [2, 4, 4, 4], 2)],
    ids=["report", "sweep"],
)
def test_runs_stop_at_the_goal(groups, used, looks):
    """At 0.9; a sweep of 2 rates x 2 seeds is over with the first pair of them.

    5 steps are looks at 2, 4 and 5.
    """
    script = np.array([[95, 10, 20, 0], [95, 91, 92, 0], [95, 91, 92, 10]])
    if groups == 1:
        # What is off stays off, whatever it would show.
        script[1, :2] = 50, 80
    settings = study_test.settings(
        **{"runs.goal": 0.9, "runs.every": 2, "runs.seeds": 2}
    )
    seen = []

    def steps(state, on, count):
        seen.append((on.tolist(), count))
        return state, None

    def right(params, batch):
        del params
        shares = script[len(seen) - 1]
        return np.arange(100)[None, None] < shares[:, None, None]

    begun = sweep.Runs(state=types.SimpleNamespace(params=None), rng=None, factor=None)
    program = Scripted(settings, steps, right, lambda *arguments: None)
    _, steps_used, accuracy = runs.train(
        program, begun, [1, 2, 3, 4], "", groups=groups
    )
    assert steps_used == used and len(seen) == looks
    np.testing.assert_allclose(accuracy, script[looks - 1] / 100)
    assert seen[1] == ([False, True, True, True], 2)


def test_distances_are_those_of_a_loop():
    task = tasks.Recall(num_keys=5, num_values=3, num_pairs=3, num_slots=5)
    batch = batches.draw(task, jax.random.key(0), 0, batch_size=20)
    inputs, targets, mask = map(np.asarray, batch)
    right = np.random.default_rng(0).random(mask.shape) < 0.5
    wanted = np.zeros((2, task.length), int)
    for b, t in np.argwhere(mask):
        (pair,) = (i for i in range(0, 6, 2) if inputs[b, i] == inputs[b, t])
        assert inputs[b, pair + 1] == targets[b, t]
        wanted[:, t - pair - 1] += right[b, t], 1
    tally = by_distance.tally(right, inputs, mask)
    np.testing.assert_array_equal(tally, wanted)
    assert tally[1].sum() == 20 * 3


def test_tables_are_read_back_exactly(tmp_path):
    wanted = rows("window", np.random.default_rng(0).random(5))
    table.write(tmp_path / "a.csv", wanted, table.Row)
    assert table.read(tmp_path / "a.csv", table.Row) == wanted
    assert table.read(tmp_path / "b.csv", table.Row) == []
    text = (tmp_path / "a.csv").read_text()
    (tmp_path / "a.csv").write_text(text.replace(",8,", ",wide,"))
    with pytest.raises(ValueError, match="a.csv is damaged"):
        table.read(tmp_path / "a.csv", table.Row)


@pytest.mark.parametrize("state", [0, 24])
def test_a_picture_of_one_point(tmp_path, state):
    """No range of states, of one point or of none."""
    points = claims.points(rows("zero" if not state else "gru", NOISE, state=state))
    assert picture.accuracy(tmp_path, SETTINGS, points).exists()


def test_pictures_hold_the_means(tmp_path):
    points = claims.points(
        rows("window", 0.5 + NOISE) + rows("zero", 0.2 + NOISE, state=0)
    )
    picture.accuracy(tmp_path, SETTINGS, points)
    arrays = files.arrays(tmp_path / "accuracy.npz")
    np.testing.assert_array_equal(arrays["mixer"], ["window", "zero"])
    np.testing.assert_allclose(arrays["mean"], [0.5, 0.2])
    assert (arrays["low"] < arrays["mean"]).all()
    picture.distance(tmp_path, SETTINGS, distance_rows(0.9 + NOISE, 0.25 + NOISE))
    drawn = files.arrays(tmp_path / "distance.npz")["window 8"]
    np.testing.assert_allclose(drawn[:, :2], [[1, 0.9], [3, 0.25]])
