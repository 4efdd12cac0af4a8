"""Annotations are held to what really comes and goes, at every call of the tests.

jaxtyping's import hook decorates each function of the packages with `checked`. Where a
test expects a call to be refused, its arguments break an annotation on purpose and the
refusal of the code itself is what matters: `pytest.raises` calls it unchecked.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import beartype
import beartype.roar
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

PACKAGES = ["attention", "models", "train"]
# Checks of one test, and how many of them are made so far; a call takes about two.
MOST_CALLS, calls = 10_000, [0]
_raises = pytest.raises
_generator = random.Random(0)
# As in PEP 484, an int will do where a float is expected.
_beartype = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def install() -> None:
    """Checks every function of the packages that is imported from now on."""
    jaxtyping.install_import_hook(PACKAGES, f"{__name__}.checked")
    pytest.raises = raises  # type: ignore[assignment]


def begin_test() -> None:
    """Checks the first calls of the next test; later ones repeat them in loops."""
    calls[0] = 0
    jaxtyping.config.update("jaxtyping_disable", False)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks arguments and results, but for what builds a dataclass.

    jax rebuilds pytrees around tracers, axes and placeholders, and flax clones modules.
    As with jax's own functions, an array of NumPy will do where one of jax is expected.
    """
    if function.__name__ == "__init__":
        return function
    check = _beartype(function)
    # beartype looks at random items of lists. Hypothesis minds who draws, so that these
    # draws come from a generator of their own.
    defaults = check.__kwdefaults__ or {}
    if "__beartype_getrandbits" in defaults:
        defaults["__beartype_getrandbits"] = _generator.getrandbits

    @functools.wraps(function)
    def check_arrays(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == MOST_CALLS:
            jaxtyping.config.update("jaxtyping_disable", True)
        try:
            return check(*args, **kwargs)
        except beartype.roar.BeartypeCallHintParamViolation:
            # The result is passed too: what comes in as NumPy may leave as NumPy.
            named = {key: _as_jax(x) for key, x in kwargs.items()}
            return check(*map(_as_jax, args), **named)

    return check_arrays


def _as_jax(argument: Any) -> Any:
    """Arrays of numbers, alone or in lists, tuples and dicts, as those of jax."""

    def leaf(x: Any) -> Any:
        is_numpy = isinstance(x, np.ndarray | np.generic)
        return jnp.asarray(x) if is_numpy and x.dtype.kind not in "OSUMm" else x

    return jax.tree.map(
        leaf, argument, is_leaf=lambda x: not isinstance(x, dict | list | tuple)
    )


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Calls inside of it may break annotations."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@contextlib.contextmanager
def raises(*expected: Any, **options: Any) -> Iterator[Any]:
    """`pytest.raises`, around code that is called unchecked."""
    with unchecked(), _raises(*expected, **options) as caught:
        yield caught
