"""How programs are compiled: quickly in most tests, and as users do where it matters.

Compiling is most of the suite's time, and most programs run once or twice on a few
numbers. XLA compiles them several times as fast if it does not optimise machine code.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax

# Options of XLA, as most tests set them and as they are by default.
_QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
_USUAL: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
}
if importlib.metadata.version("jaxlib") < "0.11":
    # XLA stops at an option which it does not know, and newer ones do not know this.
    _QUICK["xla_cpu_use_fusion_emitters"] = False
    _USUAL["xla_cpu_use_fusion_emitters"] = True

QUICK_FLAGS = " ".join(f"--{name}={value}" for name, value in _QUICK.items())


def as_users_do(fn: Callable[..., Any]) -> Any:
    """Compiles with XLA's default options: where its roundings are the question."""
    return jax.jit(fn, compiler_options=_USUAL)
