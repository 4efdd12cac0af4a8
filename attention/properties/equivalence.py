"""Whether two functions are the same: in their values and in their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from attention.properties import calls


def assert_equivalent(
    f: Callable[..., Any],
    g: Callable[..., Any],
    *args: Any,
    rng: PRNGKeyArray | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Asserts that two JAX functions agree, in outputs and gradients.

    The gradients are those by every floating point argument.

    Args:
      f: maps `args` to a tree of arrays.
      g: the function that it should equal.
      *args: trees of arrays.
      rng: key of the random normal cotangents; None stands for a fixed one.
      rtol: allowed difference, relative to g's.
      atol: allowed absolute difference, besides.

    Raises:
      AssertionError: naming the first array that differs, where and by how much.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, args))
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    by = [x for x, is_floating in zip(leaves, floating, strict=True) if is_floating]

    def values_and_gradients(function: Callable[..., Any]) -> tuple[Any, list[Array]]:
        def outputs(by: list[Array]) -> Any:
            replaced = iter(by)
            chosen = [
                next(replaced) if is_floating else x
                for x, is_floating in zip(leaves, floating, strict=True)
            ]
            return function(*jax.tree.unflatten(tree, chosen))

        values, pullback = jax.vjp(outputs, by)
        rngs = jax.random.split(calls.key_or_fixed(rng), len(jax.tree.leaves(values)))
        keys = iter(rngs)
        cotangents = jax.tree.map(lambda y: _cotangent(next(keys), y), values)
        return values, pullback(cotangents)[0]

    (actual, actual_by), (expected, expected_by) = map(values_and_gradients, (f, g))
    trees: list[Any] = [jax.tree.structure(values) for values in (actual, expected)]
    if trees[0] != trees[1]:
        raise AssertionError(f"outputs {trees[0]} against {trees[1]}")
    for (path, x), y in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        what = f"output {jax.tree_util.keystr(path)}".strip()
        assert_close(x, y, what, rtol=rtol, atol=atol)
    for i, (x, y) in enumerate(zip(actual_by, expected_by, strict=True)):
        what = f"the gradient by floating argument {i}"
        assert_close(x, y, what, rtol=rtol, atol=atol)


def assert_close(
    actual: Any, expected: Any, what: str, *, atol: float, rtol: float = 0.0
) -> None:
    """Asserts the same shape, dtype and, within tolerances, numbers; NaN equals NaN.

    Args:
      actual: array that is compared.
      expected: array that it should equal.
      what: name of the array, for the message.
      atol: allowed absolute difference.
      rtol: allowed difference, relative to `expected`.

    Raises:
      AssertionError: beginning with `what`, naming the worst difference.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {actual.dtype} {list(actual.shape)} against "
            f"{expected.dtype} {list(expected.shape)}"
        )
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    close = np.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    if not close.all():
        with np.errstate(invalid="ignore"):
            error = np.where(
                close, -1, np.nan_to_num(np.abs(actual - expected), nan=np.inf)
            )
        index = np.unravel_index(np.argmax(error), error.shape)
        raise AssertionError(
            f"{what}: {actual[index]:.8g} against {expected[index]:.8g} "
            f"at {[int(i) for i in index]}, the worst of {np.sum(~close)} that differ"
        )


def _cotangent(key: PRNGKeyArray, output: Array) -> Any:
    if not jnp.issubdtype(output.dtype, jnp.floating):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jax.random.normal(key, output.shape, output.dtype)
