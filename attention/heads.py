"""One head -> many: split and merge widths, and lift a one-head function.

Every mechanism is written for one head, on matrices, as in its paper:
`f(q [T H], k [S H], v [S D], ...) -> [T D]`. `over_heads` lifts it with `jax.vmap`
over the batch, the key/value heads and the query heads that share each of them:

    head n of the query reads head n // G of the keys and values,    G = N / K

K = N is multi-head attention (Vaswani et al., 2017, arXiv:1706.03762), K = 1
multi-query attention (Shazeer, 2019, arXiv:1911.02150), anything between grouped
attention (Ainslie et al., 2023, arXiv:2305.13245).
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Shaped


def split(x: Shaped[Array, "*B T E"], num_heads: int) -> Shaped[Array, "*B T N H"]:
    """Splits the width of each position into heads: E = N · H.

    Args:
      x: activations.
      num_heads: N.

    Returns:
      The same numbers, head n holding the features n·H … (n+1)·H - 1.

    Raises:
      ValueError: if N does not divide E.
    """
    width = x.shape[-1]
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"the width {width} does not divide into {num_heads} heads")
    return x.reshape(*x.shape[:-1], num_heads, width // num_heads)


def merge(x: Shaped[Array, "*B T N H"]) -> Shaped[Array, "*B T E"]:
    """Concatenates the heads of each position; the inverse of `split`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def over_heads(f: Callable[..., Any], *, out_axis: int) -> Callable[..., Any]:
    """Lifts a function of one head to a batch of (grouped) heads.

    Args:
      f: `f(query [T H], key [S H], value [S D], *rest) -> y`, for one head.
      out_axis: where the head axis N goes in every output of one row of the batch:
        1 for y of shape [T D] or [T], 0 for weights [T S].

    Returns:
      `g(query [B T N H], key [B S K H], value [B S K D], *rest)`. Each array in
      `rest` starts with the axes [B|1 N|1]; along an axis of 1 it is shared, not
      copied. None stays None. Outputs have a leading B and N at 1 + out_axis.

    Raises:
      ValueError: if K does not divide N.
    """

    def lifted(query: Array, key: Array, value: Array, *rest: Any) -> Any:
        batch, length, num_heads, width = query.shape
        kv_heads = key.shape[2]
        if kv_heads == 0 or num_heads % kv_heads:
            raise ValueError(
                f"the query heads must be a multiple of the key/value heads, "
                f"got N={num_heads} and K={kv_heads}"
            )
        groups = num_heads // kv_heads

        def to_groups(x: Array) -> Array:
            own = (kv_heads, groups) if x.shape[1] != 1 else (1, 1)
            return x.reshape(x.shape[0], *own, *x.shape[2:])

        query = query.reshape(batch, length, kv_heads, groups, width)
        rest = jax.tree.map(to_groups, rest)
        one_kv_head = _vmap(f, (1, None, None), out_axis)  # over the group
        one_row = _vmap(one_kv_head, (1, 1, 1), out_axis)  # over key/value heads
        outputs = _vmap(one_row, (0, 0, 0), 0)(query, key, value, *rest)

        def from_groups(y: Array) -> Array:
            at = 1 + out_axis
            return y.reshape(*y.shape[:at], num_heads, *y.shape[at + 2 :])

        return jax.tree.map(from_groups, outputs)

    return lifted


def _vmap(
    f: Callable[..., Any], in_axes: tuple[int | None, ...], out_axis: int
) -> Callable[..., Any]:
    """Vmap in which trailing arguments are mapped over axis 0, or shared if it is 1."""

    def mapped(query: Array, key: Array, value: Array, *rest: Any) -> Any:
        axes = jax.tree.map(lambda x: 0 if x.shape[0] != 1 else None, rest)
        rest = jax.tree.map(lambda x: x if x.shape[0] != 1 else x[0], rest)
        return jax.vmap(f, in_axes=(*in_axes, *axes), out_axes=out_axis)(
            query, key, value, *rest
        )

    return mapped
