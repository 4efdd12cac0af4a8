"""Three proofs that a language model predicts the next token without seeing it.

1. Edits. Replace token j: every logit at i < j keeps its bits.
2. Gradients. ∂yᵢ/∂xⱼ ≠ 0 exactly where the declared mask lets information pass.
3. Learning. On uniformly random tokens nothing can be learned: see `proofs.learning`.

The first two examine the function; only the third sees that the labels themselves
are wrong (not shifted, shifted the wrong way), because it runs the loss, the data
code and the loop too.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from attention.properties import (
    calls,
    edits,
    examination,
    findings,
    movements,
    subjects,
)

# 'void': nothing was shown, for or against the model.
Result = Literal["clear", "leak", "void"]


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a proof showed of a model.

    Attributes:
      name: 'edits', 'gradients' or 'learning'.
      result: the verdict.
      reason: why, in one line.
      figures: numbers for report.json.
      arrays: arrays that the verdict was read from, by position: [T] or [T T].
    """

    name: str
    result: Result
    reason: str
    figures: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def passed(self) -> bool:
        """Whether the model was shown to be causal."""
        return self.result == "clear"

    def as_json(self) -> dict[str, Any]:
        """The proof as an entry of report.json: everything but the arrays."""
        return {
            "name": self.name,
            "passed": self.passed,
            "result": self.result,
            "reason": self.reason,
            **self.figures,
        }


def reachable(
    masks: Sequence[Bool[movements.AnyArray, "T T"]],
) -> Bool[np.ndarray, "T T"]:
    """Computes which inputs reach which outputs through a stack of residual layers.

    (I ∨ Mᴸ) ⋯ (I ∨ M¹), a boolean product: a layer passes position i on to itself, and
    to i what its mask lets i attend to.

    Args:
      masks: masks [T T] of the layers, the first one first; True = may attend.

    Returns:
      Bool [T T]: whether output i is reached by input j.
    """
    itself = np.eye(len(masks[0]), dtype=bool)
    reach = itself
    for mask in masks:
        reach = (np.asarray(mask) | itself) @ reach
    return reach


def prove_by_edits(
    logits_fn: movements.Function,
    tokens: Int[movements.AnyArray, "B T"],
    *,
    vocab_size: int,
    replacements: int,
    rng: PRNGKeyArray,
) -> Proof:
    """Proof 1: no edit of a token moves an earlier logit, or another row's, by a bit.

    An edit that moves nothing at its own position proves nothing, so each position
    must move its own output at least once; nor does a function that refuses its input
    or answers differently each time, nor NaN that spreads: 0 x NaN is NaN.

    Args:
      logits_fn: tokens [B T] -> logits [B T V], compiled, without dropout.
      tokens: real text; one call per row, position and replacement.
      vocab_size: number V of ids.
      replacements: number of replacements per token and row.
      rng: key that draws them.

    Returns:
      The proof; its arrays: `moved`, [T T], the largest movement of output i by edits
      of token j.
    """
    subject = subjects.on_inputs(
        logits_fn,
        tokens,
        vocab_size=vocab_size,
        rng=rng,
        token_edit_budget=0,
        tolerance=0.0,
    )
    rows, length = tokens.shape
    count = min(replacements, vocab_size - 1)
    series = edits.one_row_at_a_time(
        subject,
        np.asarray(tokens),
        itertools.product(range(length), range(rows)),
        edits.ordinary_replacements(subject, count),
        causal=True,
    )
    done = rows * length * count
    result: Result = "clear"
    reason = f"{done} edits moved no bit of an earlier logit"
    leak, moved = None, np.zeros((length, length))
    try:
        seen = examination.examine("edits", subject, series)
    except (findings.NotDeterministic, calls.Refused) as error:
        result, reason = "void", str(error)
    else:
        finding, moved = seen.finding, seen.moved
        silent = np.flatnonzero(moved.diagonal() == 0)
        if finding is not None and finding.kind == "leak":
            leak = finding.error()
            result, reason = "leak", str(leak)
        elif finding is not None:
            result = "void"
            reason = f"token {finding.source} spreads NaN to output {finding.target}"
        elif len(silent):
            result = "void"
            reason = f"no edit of token {silent[0]} moved its own output"
    return Proof(
        name="edits",
        result=result,
        reason=reason,
        figures={
            "positions": length,
            "edits": done,
            "leak": _leak_figures(leak),
        },
        arrays={"moved": moved},
    )


def prove_by_gradients(
    from_embeddings: movements.Function,
    embeddings: Float[movements.AnyArray, "B T E"],
    declared: Bool[np.ndarray, "T T"],
    *,
    rng: PRNGKeyArray,
) -> Proof:
    """Proof 2: outputs depend on exactly the inputs that the declared mask says.

    A weight below the smallest float (a score about 100 under its row's maximum in
    float32) has no gradient: several rows make sure that a dependence shows in one.

    Args:
      from_embeddings: [B T E] -> logits [B T V], without dropout.
      embeddings: of real text, in float32.
      declared: whether output i may depend on input j through all layers, [T T], as
        `reachable` computes it.
      rng: key of the random cotangents.

    Returns:
      The proof; its arrays: `norms`, `dependency`, `declared`, all [T T].
    """
    norms = movements.jacobian_norms(from_embeddings, embeddings, rng=rng)
    dependency = norms != 0
    finite = np.isfinite(norms)
    allowed = np.tril(declared) | np.eye(len(declared), dtype=bool)
    leak = _find_dependence(np.where(finite, norms, 0), allowed)
    missing = np.argwhere(declared & ~dependency)
    result: Result = "clear"
    reason = "each output depends on exactly the declared inputs"
    if leak is not None:
        result, reason = "leak", str(leak)
    elif not finite.all():
        target, source = np.argwhere(~finite)[0]
        result = "void"
        reason = f"the derivative of output {target} by input {source} is not finite"
    elif np.any(declared != allowed):
        result = "void"
        reason = "the declared mask is not causal with every position seeing itself"
    elif len(missing):
        target, source = missing[0]
        result = "void"
        reason = (
            f"output {target} does not depend on input {source}, though the mask "
            "declares it: it is not the mask of this model, or a layer passes nothing"
        )
    return Proof(
        name="gradients",
        result=result,
        reason=reason,
        figures={
            "positions": len(declared),
            "declared": int(declared.sum()),
            "outside_declared": int((dependency & ~declared).sum()),
            "missing_from_declared": len(missing),
            "leak": _leak_figures(leak),
        },
        arrays={"norms": norms, "dependency": dependency, "declared": declared},
    )


def _find_dependence(
    sizes: Float[np.ndarray, "T_out T_in"],
    allowed: Bool[np.ndarray, "T_out T_in"],
) -> findings.LeakError | None:
    """The earliest source that reaches outside `allowed`, and its earliest target."""
    outside = np.argwhere(((sizes != 0) & ~allowed).T)
    if not len(outside):
        return None
    source, target = outside[0].tolist()
    size = float(sizes[target, source])
    return findings.LeakError(source, target, size, probe="gradients")


def _leak_figures(leak: findings.LeakError | None) -> dict[str, Any] | None:
    if leak is None:
        return None
    movement = finite(leak.movement)
    return {"source": leak.source, "target": leak.target, "movement": movement}


def finite(value: float) -> float | str:
    """The number, or the name of NaN or an infinity, which JSON does not have."""
    return float(value) if math.isfinite(value) else str(float(value))
