"""A caller's function apart from the arrays that it closes over.

A derivative rule (`jax.custom_vjp`) sees its arguments only: an array over which a
function closes would have no gradient, or none that jax knows of. `hoist` makes such
arrays arguments.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

Arrays = tuple[Array, ...]


def hoist(
    f: Callable[..., Array], *examples: Array, **named: Array
) -> tuple[Callable[..., Array], Arrays, Arrays]:
    """Traces f once.

    Args:
      f: a function of arrays.
      *examples: arrays of the shapes and dtypes that it will be called with.
      **named: the same for its arguments by name.

    Returns:
      g, floats and nonfloats, where g(floats, nonfloats, ...) = f(...) and g closes
      over no array; the floats (or complex numbers) are the arrays with derivatives.
    """
    traced = jax.make_jaxpr(f)(*examples, **named)
    inner = traced.jaxpr
    # The arrays become its first arguments: g must not keep tracers alive.
    jaxpr = inner.replace(constvars=(), invars=[*inner.constvars, *inner.invars])
    constants = [jnp.asarray(x) for x in traced.consts]
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in constants]

    def g(floats: Arrays, nonfloats: Arrays, *args: Array, **named: Array) -> Array:
        first, second = iter(floats), iter(nonfloats)
        constants = [next(first if yes else second) for yes in is_float]
        (result,) = jax.core.eval_jaxpr(
            jaxpr, (), *constants, *jax.tree.leaves((args, named))
        )
        return result

    marked = list(zip(constants, is_float, strict=True))
    floats = tuple(x for x, yes in marked if yes)
    nonfloats = tuple(x for x, yes in marked if not yes)
    return g, floats, nonfloats
