"""One head -> many: split and merge widths, and lift a one-head function.

Every mechanism is written for one head, on matrices, as in its paper:
`f(q [T H], k [S H], v [S D], ...) -> [T D]`. `over_heads` lifts it with `jax.vmap`
over the batch, the key/value heads and the query heads that share each of them:

    head n of the query reads head n // G of the keys and values,    G = N / K

K = N is multi-head attention (Vaswani et al., 2017, arXiv:1706.03762), K = 1
multi-query attention (Shazeer, 2019, arXiv:1911.02150), anything between grouped
attention (Ainslie et al., 2023, arXiv:2305.13245).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped


def head_width(width: int, num_heads: int) -> int:
    """H = E / N, the features of each head.

    Raises:
      ValueError: if N does not divide E.
    """
    if num_heads < 1 or width % num_heads:
        raise ValueError(
            "width must be a multiple of num_heads, "
            f"got width={width} and num_heads={num_heads}"
        )
    return width // num_heads


def group_size(num_heads: int, kv_heads: int) -> int:
    """G = N / K, the query heads that read one key/value head.

    Raises:
      ValueError: if K does not divide N.
    """
    if kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(
            "num_heads must be a multiple of num_kv_heads, "
            f"got num_heads={num_heads} and num_kv_heads={kv_heads}"
        )
    return num_heads // kv_heads


def split(x: Shaped[Array, "*B E"], num_heads: int) -> Shaped[Array, "*B N H"]:
    """Splits the width of each position into heads: E = N · H.

    Args:
      x: activations.
      num_heads: N.

    Returns:
      The same numbers, head n holding the features n·H … (n+1)·H - 1.

    Raises:
      ValueError: if N does not divide E.
    """
    return x.reshape(*x.shape[:-1], num_heads, head_width(x.shape[-1], num_heads))


def merge(x: Shaped[Array, "*B T N H"]) -> Shaped[Array, "*B T E"]:
    """Concatenates the heads of each position; the inverse of `split`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def over_heads(
    f: Callable[..., Any], *, out_axis: int, loop: Sequence[bool] = (False, False)
) -> Callable[..., Any]:
    """Lifts a function of one head to a batch of (grouped) heads.

    Args:
      f: `f(query [*T H], key [*S H], value [*S D], *rest) -> y`, for one head.
      out_axis: where the head axis N goes in every output of one row of the batch:
        1 for y of shape [T D] or [T], 0 for weights [T S].
      loop: whether rows, and whether heads, are taken one after another, and not
        vectorised: for functions whose loops end earlier for some than for others.

    Returns:
      `g(query [B *T N H], key [B *S K H], value [B *S K D], *rest)`. Each array in
      `rest` starts with the axes [B|1 N|1]; along an axis of 1 it is shared, not
      copied. None stays None. Outputs have a leading B and N at 1 + out_axis.

    Raises:
      ValueError: if K does not divide N.
    """

    def lifted(query: Array, key: Array, value: Array, *rest: Any) -> Any:
        *leading, num_heads, width = query.shape
        kv_heads = key.shape[-2]
        groups = group_size(num_heads, kv_heads)

        def to_groups(x: Array) -> Array:
            axes = (kv_heads, groups) if x.shape[1] != 1 else (1, 1)
            return x.reshape(x.shape[0], *axes, *x.shape[2:])

        query = query.reshape(*leading, kv_heads, groups, width)
        rest = jax.tree.map(to_groups, rest)
        rows, each = (_loop if one_by_one else jax.vmap for one_by_one in loop)
        one_kv_head = _over(each, f, (-2, None, None), out_axis)  # over the group
        one_row = _over(each, one_kv_head, (-3, -2, -2), out_axis)  # over K
        outputs = _over(rows, one_row, (0, 0, 0), 0)(query, key, value, *rest)

        def from_groups(y: Array) -> Array:
            at = 1 + out_axis
            return y.reshape(*y.shape[:at], num_heads, *y.shape[at + 2 :])

        return jax.tree.map(from_groups, outputs)

    return lifted


def _over(
    lift: Callable[..., Any],
    f: Callable[..., Any],
    in_axes: tuple[int | None, ...],
    out_axis: int,
) -> Callable[..., Any]:
    """Lifts f; arrays after the first three along axis 0, or shared if that is 1."""

    def lifted(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        rest = leaves[len(in_axes) :]
        axes = (*in_axes, *(0 if x.shape[0] != 1 else None for x in rest))
        leaves[len(in_axes) :] = [x if x.shape[0] != 1 else x[0] for x in rest]

        def one(*leaves: Any) -> Any:
            return f(*jax.tree.unflatten(structure, leaves))

        return lift(one, axes, out_axis)(*leaves)

    return lifted


def _loop(
    f: Callable[..., Any], in_axes: tuple[int | None, ...], out_axis: int
) -> Callable[..., Any]:
    """Computes what `jax.vmap` computes, one slice after another."""

    def looped(*args: Array) -> Any:
        def one(slices: Any) -> Any:
            slices = iter(slices)
            return f(*(x if a is None else next(slices) for x, a in pairs))

        pairs = list(zip(args, in_axes, strict=True))
        mapped = [jnp.moveaxis(x, a, 0) for x, a in pairs if a is not None]
        outputs = lax.map(one, mapped)
        return jax.tree.map(lambda y: jnp.moveaxis(y, 0, out_axis), outputs)

    return looped
