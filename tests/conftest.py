"""Every test: on CPU, strict about ranks, reproducible.

Tests marked `x64` need float64 arrays, which jax switches on for a whole process. A
plain run leaves them out and tests/x64_test.py runs them in a process of their own;
`pytest -m x64 tests/NAME_test.py` runs those of one file.

Compiling is most of the suite's time. XLA is therefore asked to do it quickly, but for
what `compiling.as_users_do` compiles. Compiled programs are kept in `.jax_cache`, where
the workers of one run, the processes that tests start and the next run find them; jax
reads these settings from the environment, which processes inherit. The folder may be
deleted at any time.

Every annotated signature is checked at each call, unless TYPES=off.
"""

import gc
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parent.parent / ".jax_cache"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

from tests.support import annotations, compiling

os.environ["XLA_FLAGS"] = f"{compiling.QUICK_FLAGS} {os.environ.get('XLA_FLAGS', '')}"

_COMPILED = pathlib.Path(__file__).parent.parent / ".jax_cache"
_DAYS_KEPT = 14

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

if os.environ.get("TYPES") != "off":
    annotations.install()


def pytest_configure(config: pytest.Config) -> None:
    """Sets jax up before any test module is imported."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_enable_x64", config.option.markexpr == "x64")
    if not hasattr(config, "workerinput"):
        _forget_old_programs()


def pytest_collection_finish() -> None:
    """Takes what was imported out of garbage collection, a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_runtest_setup() -> None:
    """What each test calls is checked anew."""
    annotations.begin_test()


def _forget_old_programs() -> None:
    """Every edit of the source leaves programs that no run asks for again."""
    for program in _COMPILED.glob("*-cache"):
        if time.time() - program.stat().st_mtime > _DAYS_KEPT * 24 * 3600:
            program.unlink(missing_ok=True)


@pytest.fixture
def torch() -> Any:
    """PyTorch, where it is installed."""
    return pytest.importorskip("torch")
