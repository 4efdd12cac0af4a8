"""The verdict on a stranger's callable, in words and as the contents of report.json."""

import dataclasses
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from attention.properties import findings, outcomes
from train.callables import adapter, replay
from train.proofs import dependence

LEARNING = "learning"
# The probe without which nothing is verified, unless it was skipped.
MAIN = "edits"
LEAK, NO_LEAK, NOT_VERIFIED = "LEAK", "no leak found", "not verified"
# What the kind of an outcome says of causality; a kind that is missing says nothing.
PASSED = {
    "clear": True,
    "rounding": True,
    "nan-unsafe": True,
    "leak": False,
    "void": False,
}


@dataclasses.dataclass(frozen=True)
class Leak:
    """What shows that a target leaks.

    Attributes:
      seen: outcomes of the probes that saw it; the leak of the first is kept.
      smallest: the leak at the smallest pair of inputs; None for the learning proof,
        which edits nothing.
      file: file that holds this pair.
    """

    seen: Sequence[outcomes.Outcome]
    smallest: findings.Finding | None
    file: pathlib.Path


def verdict(results: Sequence[outcomes.Outcome]) -> str:
    """LEAK, NO_LEAK, or NOT_VERIFIED where too little was looked at or learned."""
    passed = {outcome.probe: PASSED.get(outcome.kind) for outcome in results}
    if any(outcome.kind == "leak" for outcome in results):
        return LEAK
    learned = passed.pop(LEARNING, True)
    enough = learned and any(passed.values()) and not refusals_of_main(results)
    return NO_LEAK if enough else NOT_VERIFIED


def refusals_of_main(results: Sequence[outcomes.Outcome]) -> list[str]:
    """Why the main probe was refused, if it was."""
    return [
        outcome.tried
        for outcome in results
        if (outcome.probe, outcome.kind) == (MAIN, "refused")
    ]


def as_json(
    target: adapter.Target,
    results: Sequence[outcomes.Outcome],
    leak: Leak | None,
    seconds: float,
) -> dict[str, Any]:
    """The contents of report.json.

    Args:
      target: the callable.
      results: outcomes of the probes.
      leak: the leak that was kept; None if none was seen.
      seconds: time that the audit took.
    """
    conclusion = verdict(results)
    return {
        "target": target.name,
        "framework": target.framework,
        "input": "tokens" if target.vocab_size else "embeddings",
        "length": target.length,
        "vocab_size": target.vocab_size,
        "width": target.width,
        "verdict": conclusion,
        "causality": {
            "passed": conclusion == NO_LEAK,
            "probes": [
                {
                    "name": outcome.probe,
                    "passed": PASSED.get(outcome.kind),
                    "result": outcome.kind,
                    "reason": outcome.tried,
                    "finding": outcome.finding and _finding_json(outcome.finding),
                    **outcome.figures,
                }
                for outcome in results
            ],
        },
        "leak": leak and _leak_json(target, leak),
        "notes": list(target.notes),
        "versions": _versions(),
        "seconds": seconds,
    }


def _leak_json(target: adapter.Target, leak: Leak) -> dict[str, Any]:
    """The leak as it stands in report.json."""
    first, small = leak.seen[0], leak.smallest
    if first.finding is None or small is None:
        return {"probe": first.probe, "reason": first.tried}
    return {
        **_finding_json(first.finding),
        "mode": replay.mode(first.finding),
        "probes": [outcome.probe for outcome in leak.seen],
        "shape": list(small.inputs.shape),
        "smallest": _finding_json(small),
        "file": leak.file.name,
        "replay": " ".join(replay.command(target, leak.file)),
        "by_hand": replay.by_hand(target, small, leak.file),
    }


def _finding_json(finding: findings.Finding) -> dict[str, Any]:
    names = ("kind", "probe", "source", "target", "row", "target_row")
    return {
        **{name: getattr(finding, name) for name in names},
        "movement": dependence.finite(finding.movement),
        "size": dependence.finite(finding.size),
        "length": finding.inputs.shape[1],
    }


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "jax": jax.__version__,
    }
    if torch := sys.modules.get("torch"):
        versions["torch"] = torch.__version__
    return versions
