"""The alarm: a loss that is too good for text."""

import math

import pytest

from train.proofs import causality


def report(bits, *, trigram=2.5):
    """Of a run with one byte per token."""
    return {
        "val_loss": bits * math.log(2),
        "bits_per_byte": bits,
        "baselines": {"trigram": trigram * math.log(2)},
    }


def test_a_loss_below_that_of_text_is_a_leak():
    """Case B096: below 0.3 bits per byte."""
    proofs = causality.alarm(report(0.29))
    assert causality.verdict(proofs) == "NOT CAUSAL"
    assert not causality.passed(proofs)
    reason = causality.as_json(proofs)["probes"][0]["reason"]
    assert "0.29 bits per byte" in reason
    assert "trigrams need 2.5" in reason


@pytest.mark.parametrize("bits", [0.3, 2.0, 0.0, math.nan])
def test_other_losses_raise_no_alarm(bits):
    """0 is a loss without targets."""
    assert causality.alarm(report(bits)) == []


def test_text_that_repeats_itself_raises_no_alarm():
    assert causality.alarm(report(0.01, trigram=0.02)) == []
