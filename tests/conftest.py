"""Every test: on CPU, strict about ranks, reproducible.

Tests marked `x64` need float64 arrays, which jax switches on for a whole process. A
plain run leaves them out and tests/x64_test.py runs them in a process of their own;
`pytest -m x64 tests/NAME_test.py` runs those of one file.
"""

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Sets jax up before any test module is imported."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_enable_x64", config.option.markexpr == "x64")


@pytest.fixture
def torch() -> Any:
    """PyTorch, where it is installed."""
    return pytest.importorskip("torch")
