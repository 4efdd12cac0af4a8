"""Peak memory of a process that attends once, measured in a process of its own.

    python -m train.bench.memory '{"length": 4096, "backward": true}'

prints {"peak_bytes": ..., "error": ...} for `attention.dot_product_attention`. The
fields are those of `workload.Work`, `window` and `implementation`. The result is
checked after the peak has been read.
"""

import dataclasses
import functools
import json
import os
import pathlib
import resource
import subprocess
import sys
from typing import Any

import jax

import attention
from attention import masks
from train.bench import workload

_ROOT = pathlib.Path(__file__).parents[2]


def in_child(
    work: workload.Work, *, window: int | None, implementation: str | None
) -> tuple[int, float]:
    """Measures a fresh Python process that does this work.

    Args:
      work: shapes, dtype and direction of the call.
      window: number of keys that a query sees, counting its own position; None for the
        mask of `work`.
      implementation: name of an implementation of `attention.dot_product_attention`;
        None for the automatic choice.

    Returns:
      Peak bytes of the process, and the error of the result.

    Raises:
      RuntimeError: the process failed.
    """
    fields = dataclasses.asdict(work)
    fields |= {"window": window, "implementation": implementation}
    child = subprocess.run(
        [sys.executable, "-m", "train.bench.memory", json.dumps(fields)],
        cwd=_ROOT,
        env=os.environ | {"JAX_PLATFORMS": jax.default_backend()},
        capture_output=True,
        text=True,
    )
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:]
        raise RuntimeError(f"exit status {child.returncode}: {''.join(last)}")
    measured = json.loads(child.stdout)
    return measured["peak_bytes"], measured["error"]


def measure(
    work: workload.Work, *, window: int | None, implementation: str | None
) -> dict[str, Any]:
    """Does the work in this process, and reads its peak memory.

    Args:
      work: shapes, dtype and direction of the call.
      window: number of keys that a query sees, counting its own position; None for the
        mask of `work`.
      implementation: name of an implementation of `attention.dot_product_attention`;
        None for the automatic choice.

    Returns:
      `peak_bytes` and `error`, for JSON.
    """
    visible = work.visible if window is None else masks.sliding_window(window)
    kernel = functools.partial(
        attention.dot_product_attention, implementation=implementation
    )
    arrays = work.arrays()
    runner = workload.jax_runners(kernel, arrays, mask=visible)["jit"]
    runner.run()
    peak = peak_bytes()
    error = workload.expected(arrays, visible).error(runner)
    return {"peak_bytes": peak, "error": error}


def peak_bytes() -> int:
    """Returns the largest resident memory of this process so far."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        # On Linux a child's ru_maxrss starts from its parent's peak, VmHWM does not.
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    _fields = json.loads(sys.argv[1])
    _options = {name: _fields.pop(name) for name in ("window", "implementation")}
    print(json.dumps(measure(workload.Work(**_fields), **_options)))
