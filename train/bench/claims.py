"""The claims about flash attention on a CPU, and whether they hold.

Each row states a piece of work and an upper limit; `trials` measures it. float32, 8
heads of 64 and the forward pass, unless a row says otherwise.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from train.bench import trials, workload


class Claim(NamedTuple):
    """A row of the table.

    Attributes:
      asked: description of the work.
      at_most: upper limits, a number for each part of the row.
      unit: unit of these numbers; empty for ratios.
      measure: measures the numbers.
    """

    asked: str
    at_most: tuple[float, ...]
    unit: str
    measure: Callable[[trials.Scale], list[float]]


_LONG = workload.Work(length=65536, num_heads=1, num_kv_heads=1, backward=True)
_LONGEST = workload.Work(length=2**20, num_heads=4, num_kv_heads=1)

CLAIMS = (
    Claim(
        "T=S=4096 causal, forward / forward+backward, against PyTorch SDPA",
        (0.65, 0.70),
        "",
        functools.partial(trials.against, "torch", "eager", True),
    ),
    Claim(
        "the same, not causal",
        (0.60, 0.70),
        "",
        functools.partial(trials.against, "torch", "eager", False),
    ),
    Claim(
        "the same, against jax.nn's XLA path (causal)",
        (0.18, 0.12),
        "",
        functools.partial(trials.against, "jax.nn.xla", "jit", True),
    ),
    Claim(
        "T=16384, causal window of 256, against full causal flash, forward",
        (0.10,),
        "",
        functools.partial(trials.against_full, 16384, trials.window, True),
    ),
    Claim(
        "12 packed documents at T=8192 (segments & causal), against full causal flash",
        (0.30,),
        "",
        functools.partial(trials.against_full, 8192, trials.documents, True),
    ),
    Claim(
        "B=4, lengths 512/1k/2k/4k in one call, against the four alone",
        (1.15,),
        "",
        trials.rows_of_lengths,
    ),
    Claim(
        "bigbird, blocks of 128, 5 of 64 key blocks per row, T=8192, against full "
        "flash, forward",
        (0.25,),
        "",
        functools.partial(trials.against_full, 8192, trials.bigbird, False),
    ),
    Claim(
        "any T from 1 to 512, implementation=None against the better of jax.nn and "
        "flash",
        (1.10,),
        "",
        trials.short,
    ),
    Claim(
        "temporary memory of forward+backward when T doubles (8k to 16k to 32k)",
        (2.2,),
        "",
        trials.memory_doubles,
    ),
    Claim(
        "T=65536, one head, causal, forward+backward: peak memory of the process",
        (1.5,),
        "GB",
        functools.partial(trials.peak, None, _LONG),
    ),
    Claim(
        "T=1,048,576, 4 query heads on 1 kv head of 64, causal window of 1,024, "
        "forward: peak memory of the process",
        (6.0,),
        "GB",
        functools.partial(trials.peak, 1024, _LONGEST),
    ),
    Claim(
        "trace and compile time, forward+backward, any built-in mask, T=65536",
        (15.0,),
        "s",
        trials.compile_seconds,
    ),
)


def measure(
    scale: trials.Scale, *, announce: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measures claim by claim.

    Args:
      scale: lengths, rounds and time of the measurements.
      announce: called with a description of the next claim.

    Yields:
      For each claim: `asked`, `at_most`, `unit`, `measured` (None if nothing was),
      `verdict` and `reason`. The verdict is 'met', 'missed', 'wrong', 'skipped', or
      'not judged' where lengths are divided.
    """
    for i, claim in enumerate(CLAIMS, 1):
        announce(f"claim {i}/{len(CLAIMS)}  {claim.asked}")
        yield {
            "asked": claim.asked,
            "at_most": list(claim.at_most),
            "unit": claim.unit,
        } | _judge(claim, scale)


def _judge(claim: Claim, scale: trials.Scale) -> dict[str, Any]:
    try:
        measured = claim.measure(scale)
    except trials.Skipped as reason:
        return {"measured": None, "verdict": "skipped", "reason": str(reason)}
    except trials.Wrong as reason:
        return {"measured": None, "verdict": "wrong", "reason": str(reason)}
    # Out of memory, in this process or in the child.
    except RuntimeError as reason:
        return {"measured": None, "verdict": "missed", "reason": str(reason)}
    met = all(x <= y for x, y in zip(measured, claim.at_most, strict=True))
    verdict = "met" if met else "missed"
    if scale.divisor > 1:
        verdict = "not judged"
    return {"measured": measured, "verdict": verdict, "reason": ""}
