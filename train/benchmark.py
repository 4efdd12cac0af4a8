"""Measures attention, mixers or a training step, beside whatever else is installed.

    python -m train.benchmark --preset=cpu
    python -m train.benchmark --preset=smoke --target=package.module:callable
    python -m train.benchmark --compare a/results.json b/results.json
    python -m train.benchmark --what=train_step --config=configs/shakespeare_char.py
    python -m train.benchmark --what=mixers --workdir=runs/bench_mixers

--what=attention: implementations x lengths x dtypes x {jit, eager} x {forward,
forward+backward}, and a sweep over the number of heads at fixed width. All take turns
within a case, so that a busy machine slows all alike; medians and quartiles, the share
of the rate of a large matrix product in the same turns, compile time, traces, peak
temporary memory, and how time and memory grow with T. Everything is compared with the
reference before it is timed; what is wrong is not timed. A target has the signature of
`jax.nn.dot_product_attention` and is traceable by jax. --preset=cpu adds the table of
what is claimed, with a verdict per row.

Each case is written into WORKDIR/results.json when it is done: an interrupted run keeps
them. A picture for each dtype, and the arrays behind it, lie in WORKDIR/figures.

--what=train_step: milliseconds per step, and what the step's matrix products alone
would take at the rate measured in the same turns.

--what=mixers: how the time of mixers of linear time grows with T, and how many times as
fast as causal flash attention they are at T = 16384, each with a verdict.

Exit status: 0 measured, and all claims met; 1 a wrong result, a claim missed, or a
target that could not be measured; 2 unusable arguments.
"""

import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

# `python -m` searches the current folder first, where a user may have a models.py.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from train import cli
from train.bench import attention, mixers, tables, train_step
from train.report import terminal

sys.path.pop(0)

WHAT: Mapping[str, Any] = types.MappingProxyType(
    {"attention": attention, "train_step": train_step, "mixers": mixers}
)


def define_flags(values: flags.FlagValues) -> None:
    """Declares the program's flags."""
    flags.DEFINE_enum(
        "what", "attention", list(WHAT), "what is measured", flag_values=values
    )
    flags.DEFINE_integer(
        "rounds", None, "measurements of each", lower_bound=1, flag_values=values
    )
    for module in WHAT.values():
        module.define_flags(values)


def main(values: flags.FlagValues) -> int:
    """Parses flags, measures, and reports."""
    if values.compare is not None:
        _refuse_flags(values, define_flags, "--compare", but=("compare",))
        with cli.usage_errors():
            if len(values.compare) != 2:
                raise ValueError(f"--compare needs two files, got {values.compare}")
            paths = [pathlib.Path(path) for path in values.compare]
            tables.compare(terminal.console(), paths)
        return 0
    what = f"--what={values.what}"
    for name, module in WHAT.items():
        if name != values.what:
            shared = ("workdir",) if values.what == "mixers" else ()
            _refuse_flags(values, module.define_flags, what, but=shared)
    return WHAT[values.what].main(values)


def _refuse_flags(
    values: flags.FlagValues,
    define: Callable[[flags.FlagValues], None],
    reason: str,
    *,
    but: Sequence[str] = (),
) -> None:
    """Raises UsageError if a flag of a group that has no meaning here is present.

    Args:
      values: the parsed flags.
      define: declares the flags of the group.
      reason: with what they do not go together, for the message.
      but: names of flags that are allowed nevertheless.
    """
    group = flags.FlagValues()
    define(group)
    for name in group:
        if values[name].present and name not in but:
            raise cli.UsageError(f"--{name} does not go with {reason}")


def joined(arguments: Sequence[str]) -> list[str]:
    """Rewrites `--compare A B` as `--compare=A,B`, since a flag has a single value."""
    rewritten = list(arguments)
    if "--compare" in rewritten[:-2]:
        i = rewritten.index("--compare")
        rewritten[i : i + 3] = [f"--compare={rewritten[i + 1]},{rewritten[i + 2]}"]
    return rewritten


if __name__ == "__main__":
    sys.argv = joined(sys.argv)
    cli.run(main, define_flags)
