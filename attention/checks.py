"""What every mechanism asks of its queries, keys and values before it computes.

    query [*B T N H], key [*B S K H], value [*B S K D]   ->   `Rows`, with one axis B

A `token_mask`, [B T] or of keys [B S], is True where a token is real, False at padding.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Shaped

from attention import heads, masks


class Rows(NamedTuple):
    """Queries, keys and values, their leading axes flattened to one batch axis.

    Attributes:
      query: queries.
      key: keys.
      value: values.
      batch: the leading axes *B, of product B; none: the batch is one row.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K D"]
    batch: tuple[int, ...]

    def restore(self, x: Array) -> Array:
        """Reshapes a result [B ...] to [*B ...]."""
        return x.reshape(*self.batch, *x.shape[1:])

    def without_padding(self, visible: masks.Mask | None) -> "Rows":
        """Writes zeros where the mask hides a token from all, since 0 · NaN is NaN."""
        if visible is None:
            return self

        def clear(x: Array, valid: Bool[Array, "#B L"] | None) -> Array:
            # A mask of another batch size is refused where it is evaluated.
            if valid is None or len(valid) not in (1, len(x)):
                return x
            return jnp.where(valid[:, :, None, None], x, 0)

        valid_keys = visible.valid_keys(self.key.shape[1])
        return self._replace(
            query=clear(self.query, visible.valid_queries(self.query.shape[1])),
            key=clear(self.key, valid_keys),
            value=clear(self.value, valid_keys),
        )


def rows(query: Array, key: Array, value: Array) -> Rows:
    """Checks shapes and dtypes of [*B T N H], [*B S K H], [*B S K D], and flattens *B.

    Raises:
      TypeError: if an array is not floating.
      ValueError: if shapes or dtypes do not fit each other.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(
                f"{name} must have at least 3 dimensions (length, heads, width), "
                f"got shape {x.shape}"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {x.dtype}")
        if x.dtype != query.dtype:
            raise ValueError(
                f"query, key and value must have one dtype, "
                f"got {query.dtype}, {key.dtype}, {value.dtype}"
            )
    *batch, _, num_heads, width = query.shape
    *_, kv_length, kv_heads, _ = key.shape
    if key.shape != (*batch, kv_length, kv_heads, width):
        raise ValueError(
            f"key must be [*B S K H] with *B={tuple(batch)} and H={width} of the "
            f"query {query.shape}, got {key.shape}"
        )
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"value must be [*B S K D] with *B, S and K of the key {key.shape}, "
            f"got {value.shape}"
        )
    heads.group_size(num_heads, kv_heads)
    flat = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)]
    return Rows(flat[0], flat[1], flat[2], tuple(batch))


def one_batch_axis(query: Array, key: Array, value: Array) -> Rows:
    """Checks arrays whose batch is one axis: [B T N H], [B S K H], [B S K D].

    Raises:
      TypeError: if an array is not floating.
      ValueError: if shapes or dtypes do not fit each other.
    """
    checked = rows(query, key, value)
    if len(checked.batch) != 1:
        raise ValueError(f"query must be [B T N H], got shape {jnp.shape(query)}")
    return checked


def shape(name: str, x: Array, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless x, an argument of that name, has the expected shape."""
    if x.shape != expected:
        raise ValueError(f"{name} must be {list(expected)}, got {list(x.shape)}")


def token_mask(mask: ArrayLike | None, expected: tuple[int, ...]) -> None:
    """Checks an argument `token_mask`, of tokens or of keys, unless it is None.

    Raises:
      TypeError: if it is not boolean.
      ValueError: if it has another shape than expected.
    """
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != bool:
            raise TypeError(f"token_mask must be boolean, got {mask.dtype}")
        shape("token_mask", mask, expected)


def only_real(
    x: Shaped[Array, "B T *E"],
    mask: Bool[ArrayLike, "B T"] | None,
    otherwise: float,
) -> Shaped[Array, "B T *E"]:
    """Writes `otherwise` at padding: not even a NaN that stands there has an effect.

    Raises:
      TypeError: if the mask is not boolean.
      ValueError: if the mask is not [B T].
    """
    if mask is None:
        return x
    token_mask(mask, x.shape[:2])
    return jnp.where(jnp.expand_dims(mask, tuple(range(2, x.ndim))), x, otherwise)
