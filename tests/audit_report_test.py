"""train.audit_report: the verdict and the picture, from rows."""

import numpy as np
import pytest
import rich.console

from attention import probes
from train import audit_report


def row(probe, result):
    return probes.Outcome(probe, result, "")


def test_nothing_looked_at_is_not_verified():
    rows = [row("edits", "not applicable"), row("tiny", "refused")]
    assert audit_report.verdict(rows) == "not verified"
    assert audit_report.verdict([*rows, row("batch", "rounding")]) == "no leak found"
    assert audit_report.verdict([row("learning", "clear")]) == "not verified"
    assert (
        audit_report.verdict([row("edits", "leak"), row("learning", "void")]) == "LEAK"
    )


def test_without_the_main_probe_nothing_is_verified(capsys):
    rows = [probes.Outcome("edits", "refused", "id 4 is last"), row("batch", "clear")]
    assert audit_report.verdict(rows) == "not verified"
    audit_report.show_verdict(rich.console.Console(), rows, [], [])
    reason = "the main probe, edits, was refused: id 4 is last"
    assert reason in capsys.readouterr().out
    assert audit_report.verdict([*rows, row("tiny", "leak")]) == "LEAK"
    # It may be left out.
    rows[0] = row("edits", "skipped")
    assert audit_report.verdict(rows) == "no leak found"


@pytest.mark.parametrize(("result", "leaks"), [("rounding", False), ("leak", True)])
def test_the_picture_shows_what_moved_by_more_than_rounding(tmp_path, result, leaks):
    moved = np.tril(np.ones((3, 3)))
    moved[2, 0] = 1e-6
    moved[2, 1] = moved[0, 1] = np.inf
    edits = probes.Outcome("edits", result, "", moved=moved)
    assert audit_report.draw(tmp_path / "figures", [edits], "") == [
        "figures/dependency.png"
    ]
    dependency = np.load(tmp_path / "figures/dependency.npz")["dependency"]
    np.testing.assert_array_equal(dependency, [[1, leaks, 0], [1, 1, 0], [0, 1, 1]])
