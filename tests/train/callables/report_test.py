"""train.callables.report: the verdict and the picture, from rows."""

import numpy as np
import pytest
import rich.console

from attention.properties import findings, probes
from train.callables import report


def row(probe, result):
    return probes.Outcome(probe, result, "")


def test_nothing_looked_at_is_not_verified():
    rows = [row("edits", "not applicable"), row("tiny", "refused")]
    assert report.verdict(rows) == "not verified"
    assert report.verdict([*rows, row("batch", "rounding")]) == "no leak found"
    assert report.verdict([row("learning", "clear")]) == "not verified"
    assert report.verdict([row("edits", "leak"), row("learning", "void")]) == "LEAK"


def test_without_the_main_probe_nothing_is_verified(capsys):
    rows = [probes.Outcome("edits", "refused", "id 4 is last"), row("batch", "clear")]
    assert report.verdict(rows) == "not verified"
    report.show_verdict(rich.console.Console(), rows, [], [])
    reason = "the main probe, edits, was refused: id 4 is last"
    assert reason in capsys.readouterr().out
    assert report.verdict([*rows, row("tiny", "leak")]) == "LEAK"
    # It may be left out.
    rows[0] = row("edits", "skipped")
    assert report.verdict(rows) == "no leak found"


def test_a_verdict_names_the_probes_where_not_all_ran(capsys):
    rows = [row("edits", "clear"), row("batch", "rounding"), row("tiny", "skipped")]
    rows += [row("lengths", "refused"), row("huge", "not applicable")]
    report.show_verdict(rich.console.Console(), rows, [], [])
    wanted = "verdict: no leak found by edits, batch; not run: tiny, lengths\n"
    assert wanted in capsys.readouterr().out


def finding(probe, movement, target_row=0):
    x = np.zeros((2, 3, 1))
    return findings.Finding("rounding", probe, 2, 1, movement, 2.0, 0, target_row, x, x)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (finding("edits", 9e-7), "up to 4.5e-07 of the edit (output 1 by input 2): su"),
        (finding("batch", 9e-7, 1), "(output 1 of row 1 by input 2 of row 0)"),
        (finding("gradients", 9e-7), "not 0, but 4.5e-07 of the largest (output 1 by"),
    ],
)
def test_of_rounding_the_size_and_the_place_are_said(capsys, found, words):
    rows = [probes.Outcome(found.probe, "rounding", "", found), row("batch", "clear")]
    report.show_verdict(rich.console.Console(), rows, [], [])
    out = " ".join(capsys.readouterr().out.split())
    assert "rounding: " in out and words in out
    report.show_verdict(rich.console.Console(), [*rows, row("tiny", "leak")], [], [])
    assert "rounding" not in capsys.readouterr().out


@pytest.mark.parametrize(("result", "seen"), [("rounding", False), ("leak", True)])
def test_the_picture_shows_what_moved_by_more_than_rounding(tmp_path, result, seen):
    moved = np.tril(np.ones((3, 3)))
    moved[2, 0] = 1e-6
    moved[2, 1] = moved[0, 1] = np.inf
    edits = probes.Outcome("edits", result, "", moved=moved)
    assert report.draw(tmp_path / "figures", [edits], "") == ["figures/dependency.png"]
    dependency = np.load(tmp_path / "figures/dependency.npz")["dependency"]
    np.testing.assert_array_equal(dependency, [[1, seen, 0], [1, 1, 0], [0, 1, 1]])
