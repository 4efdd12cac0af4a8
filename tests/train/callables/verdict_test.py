"""train.callables.verdict and screen: what is concluded from outcomes, and said."""

import numpy as np
import pytest
import rich.console

from attention.properties import findings, outcomes
from train.callables import screen, verdict


def row(probe, result):
    return outcomes.Outcome(probe, result, "")


def test_nothing_looked_at_is_not_verified():
    rows = [row("edits", "not applicable"), row("tiny", "refused")]
    assert verdict.verdict(rows) == "not verified"
    assert verdict.verdict([*rows, row("batch", "rounding")]) == "no leak found"
    assert verdict.verdict([row("learning", "clear")]) == "not verified"
    assert verdict.verdict([row("edits", "leak"), row("learning", "void")]) == "LEAK"


def test_without_the_main_probe_nothing_is_verified(capsys):
    rows = [outcomes.Outcome("edits", "refused", "id 4 is last"), row("batch", "clear")]
    assert verdict.verdict(rows) == "not verified"
    screen.show_verdict(rich.console.Console(), rows, [], [])
    reason = "the main probe, edits, was refused: id 4 is last"
    assert reason in capsys.readouterr().out
    assert verdict.verdict([*rows, row("tiny", "leak")]) == "LEAK"
    # It may be left out.
    rows[0] = row("edits", "skipped")
    assert verdict.verdict(rows) == "no leak found"


def test_a_verdict_names_the_probes_where_not_all_ran(capsys):
    rows = [row("edits", "clear"), row("batch", "rounding"), row("tiny", "skipped")]
    rows += [row("lengths", "refused"), row("huge", "not applicable")]
    screen.show_verdict(rich.console.Console(), rows, [], [])
    wanted = "verdict: no leak found by edits, batch; not run: tiny, lengths\n"
    assert wanted in capsys.readouterr().out


def finding(probe, movement, target_row=0):
    x = np.zeros((2, 3, 1))
    return findings.Finding("rounding", probe, 2, 1, movement, 2.0, 0, target_row, x, x)


@pytest.mark.parametrize(
    ("rounding", "words"),
    [
        (finding("edits", 9e-7), "up to 4.5e-07 of the edit (output 1 by input 2): su"),
        (finding("batch", 9e-7, 1), "(output 1 of row 1 by input 2 of row 0)"),
        (finding("gradients", 9e-7), "not 0, but 4.5e-07 of the largest (output 1 by"),
    ],
)
def test_of_rounding_the_size_and_the_positions_are_said(capsys, rounding, words):
    rows = [
        outcomes.Outcome(rounding.probe, "rounding", "", rounding),
        row("batch", "clear"),
    ]
    screen.show_verdict(rich.console.Console(), rows, [], [])
    out = " ".join(capsys.readouterr().out.split())
    assert "rounding: " in out and words in out
    screen.show_verdict(rich.console.Console(), [*rows, row("tiny", "leak")], [], [])
    assert "rounding" not in capsys.readouterr().out
