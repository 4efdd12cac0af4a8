"""Whether two functions are the same: in their values and in their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray


def assert_equivalent(
    f: Callable[..., Any],
    g: Callable[..., Any],
    *args: Any,
    rng: PRNGKeyArray | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Two JAX functions agree: outputs, and gradients by every floating argument.

    Args:
      f: maps `args` to a tree of arrays.
      g: what it should equal.
      *args: trees of arrays.
      rng: key of the random normal cotangents; None: a fixed one.
      rtol: allowed difference, relative to g's.
      atol: allowed difference besides.

    Raises:
      AssertionError: naming the first array that differs, where and by how much.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, args))
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    by = [x for x, is_floating in zip(leaves, floating, strict=True) if is_floating]

    def both(function: Callable[..., Any]) -> tuple[Any, list[Array]]:
        def outputs(by: list[Array]) -> Any:
            given = iter(by)
            chosen = [
                next(given) if is_floating else x
                for x, is_floating in zip(leaves, floating, strict=True)
            ]
            return function(*jax.tree.unflatten(tree, chosen))

        values, pullback = jax.vjp(outputs, by)
        keys = iter(jax.random.split(key_or_fixed(rng), len(jax.tree.leaves(values))))
        cotangents = jax.tree.map(lambda y: _cotangent(next(keys), y), values)
        return values, pullback(cotangents)[0]

    (found, found_by), (wanted, wanted_by) = both(f), both(g)
    trees: list[Any] = [jax.tree.structure(values) for values in (found, wanted)]
    if trees[0] != trees[1]:
        raise AssertionError(f"outputs {trees[0]} against {trees[1]}")
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        assert_close(
            x, y, f"output {jax.tree_util.keystr(path)}".strip(), rtol=rtol, atol=atol
        )
    for i, (x, y) in enumerate(zip(found_by, wanted_by, strict=True)):
        assert_close(
            x, y, f"the gradient by floating argument {i}", rtol=rtol, atol=atol
        )


def key_or_fixed(rng: PRNGKeyArray | None) -> PRNGKeyArray:
    """The key, or the one that stands for None."""
    return jax.random.key(0) if rng is None else rng


def assert_close(
    found: Any, wanted: Any, what: str, *, atol: float, rtol: float = 0.0
) -> None:
    """Same shape, dtype and, within the tolerances, the same numbers; NaN is NaN.

    Raises:
      AssertionError: beginning with `what`, naming the worst difference.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise AssertionError(
            f"{what}: {found.dtype} {list(found.shape)} against "
            f"{wanted.dtype} {list(wanted.shape)}"
        )
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    close = np.isclose(found, wanted, rtol=rtol, atol=atol, equal_nan=True)
    if not close.all():
        with np.errstate(invalid="ignore"):
            error = np.where(
                close, -1, np.nan_to_num(np.abs(found - wanted), nan=np.inf)
            )
        index = np.unravel_index(np.argmax(error), error.shape)
        raise AssertionError(
            f"{what}: {found[index]:.8g} against {wanted[index]:.8g} "
            f"at {[int(i) for i in index]}, the worst of {np.sum(~close)} that differ"
        )


def _cotangent(key: PRNGKeyArray, output: Array) -> Any:
    if not jnp.issubdtype(output.dtype, jnp.floating):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jax.random.normal(key, output.shape, output.dtype)
