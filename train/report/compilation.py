"""What XLA takes to compile a function, and what the compiled program takes to run."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """The cost of compiling, and of the program.

    Attributes:
      seconds: to trace and compile.
      temporary_bytes: peak memory of the program beside its arguments and results;
        None where the compiler does not report it.
    """

    seconds: float
    temporary_bytes: int | None


def cost(jitted: Any, arguments: Sequence[Any]) -> Cost:
    """Compiles a jitted function and reports what that took.

    Args:
      jitted: the result of `jax.jit`.
      arguments: positional arguments, or their `jax.ShapeDtypeStruct`s.
    """
    start = time.perf_counter()
    program = jitted.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    analysis = program.memory_analysis()
    return Cost(seconds, analysis and analysis.temp_size_in_bytes)
