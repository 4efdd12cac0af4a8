"""The alarm: a loss that is too good for text."""

from train import causality


def test_a_loss_below_that_of_text_is_a_leak():
    """Case B096: below 0.3 bits per byte."""
    found = causality.alarm(0.29, trigram=2.5)
    assert causality.verdict(found) == "NOT CAUSAL"
    assert not causality.passed(found)
    assert "0.29 bits per byte" in causality.report(found)["probes"][0]["reason"]


def test_an_honest_loss_raises_no_alarm():
    assert causality.alarm(0.3, trigram=2.5) == []


def test_text_that_repeats_itself_raises_no_alarm():
    assert causality.alarm(0.01, trigram=0.02) == []
