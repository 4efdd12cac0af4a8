"""The arguments of dot-product attention: validated once, for every implementation."""

import dataclasses
import functools
import math
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import checks, masks, softmax
from attention.masks import algebra

# Distances to the left and to the right, or one for both.
WindowSize = SupportsIndex | tuple[SupportsIndex, SupportsIndex]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What an implementation has to honour, for a batch flattened to one axis.

    Attributes have the names and meanings of the arguments of `dot_product_attention`:
    arrays are aligned with [B N T S], `scale` is a number, `dropout_rng` is None where
    nothing is dropped.
    """

    bias: Float[Array, "#B #N #T #S"] | None
    sinks: Float[Array, "N"] | None
    scale: float | Float[Array, ""]
    softcap: float | None = algebra.static()
    score_mod: softmax.ScoreMod | None = algebra.static()
    precision: lax.PrecisionLike = algebra.static()
    dropout_rate: float = algebra.static()
    dropout_rng: Array | None
    broadcast_dropout: bool = algebra.static()
    return_residual: bool = algebra.static()
    # One by one, since kernels know some masks by name.
    mask: masks.Mask | None
    is_causal: bool = algebra.static()
    local_window_size: tuple[int, int] | None = algebra.static()
    query_seq_lengths: Int[Array, "B"] | None
    key_value_seq_lengths: Int[Array, "B"] | None

    @property
    def visible(self) -> masks.Mask | None:
        """All masks together; None if every query sees every key."""
        parts = [] if self.mask is None else [self.mask]
        if self.is_causal:
            parts.append(masks.causal())
        if self.local_window_size is not None:
            parts.append(masks.window(*self.local_window_size))
        lengths = self.key_value_seq_lengths, self.query_seq_lengths
        if any(x is not None for x in lengths):
            parts.append(masks.lengths(*lengths))
        return functools.reduce(lambda a, b: a & b, parts) if parts else None


def bind(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: masks.Mask | Array | None,
    *,
    scale: float | Array | None,
    is_causal: bool,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    local_window_size: WindowSize | None,
    score_mod: softmax.ScoreMod | None,
    softcap: float | None,
    sinks: Array | None,
    precision: lax.PrecisionLike,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = False,
    return_residual: bool = False,
) -> tuple[checks.Rows, Options]:
    """Validates the arguments of `dot_product_attention`, and flattens the batch.

    Returns:
      Queries, keys and values, zero where padding hides them from all; and all else.

    Raises:
      TypeError: if an array is of the wrong kind.
      ValueError: if shapes or numbers do not fit.
    """
    rows = checks.rows(query, key, value)
    _, length, num_heads, width = rows.query.shape
    scores_shape = (*rows.batch, num_heads, length, rows.key.shape[1])
    if bias is not None:
        bias = _aligned(_floating(bias, name="bias"), scores_shape, name="bias")
    if mask is not None and not isinstance(mask, masks.Mask):
        mask = masks.dense(_aligned(jnp.asarray(mask), scores_shape, name="mask"))
    if sinks is not None:
        sinks = _floating(sinks, name="sinks")
        if sinks.shape != (num_heads,):
            raise ValueError(
                f"sinks must be one score per query head, [{num_heads}], "
                f"got shape {sinks.shape}"
            )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), got {dropout_rate}")
    if dropout_rate and dropout_rng is None:
        raise ValueError(f"dropout_rate={dropout_rate} needs a dropout_rng")
    options = Options(
        bias=bias,
        sinks=sinks,
        scale=1 / math.sqrt(max(width, 1)) if scale is None else scale,
        softcap=softcap,
        score_mod=score_mod,
        precision=precision,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng if dropout_rate else None,
        broadcast_dropout=broadcast_dropout,
        return_residual=return_residual,
        mask=mask,
        is_causal=is_causal,
        local_window_size=_window(local_window_size),
        query_seq_lengths=_lengths(
            query_seq_lengths, rows.batch, name="query_seq_lengths"
        ),
        key_value_seq_lengths=_lengths(
            key_value_seq_lengths, rows.batch, name="key_value_seq_lengths"
        ),
    )
    return rows.without_padding(options.visible), options


def _aligned(
    x: Array, scores_shape: tuple[int, ...], *, name: str
) -> Shaped[Array, "#B #N #T #S"]:
    """Aligns x from the right with [*B N T S], and flattens *B."""
    rank = max(len(scores_shape), 4)
    full = (1,) * (rank - len(scores_shape)) + scores_shape
    shape = (1,) * (rank - x.ndim) + x.shape
    if len(shape) != rank or any(
        n not in (1, m) for n, m in zip(shape, full, strict=True)
    ):
        raise ValueError(
            f"{name} must broadcast from the right against [*B N T S] = "
            f"{list(scores_shape)}, got {list(x.shape)}"
        )
    leading = shape[:-3]
    if any(n != 1 for n in leading):
        leading = full[:-3]
        x = jnp.broadcast_to(x.reshape(shape), (*leading, *shape[-3:]))
    return x.reshape(math.prod(leading), *shape[-3:])


def _floating(x: Array, *, name: str) -> Float[Array, "..."]:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {x.dtype}: booleans are a mask=")
    return x


def _window(size: WindowSize | None) -> tuple[int, int] | None:
    """(left, right) inclusive distances; one number is both of them."""
    if size is None:
        return None
    sizes = np.asarray(size)
    if sizes.dtype.kind not in "iu" or sizes.shape not in ((), (2,)) or sizes.min() < 0:
        raise ValueError(
            f"local_window_size must be a distance or (left, right), got {size!r}"
        )
    left, right = np.broadcast_to(sizes, (2,)).tolist()
    return left, right


def _lengths(
    lengths: Array | None, batch: tuple[int, ...], *, name: str
) -> Int[Array, "B"] | None:
    """Checks lengths [*B], and flattens them."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {lengths.dtype}")
    if lengths.shape not in (batch, batch or (1,)):
        raise ValueError(
            f"{name} must have the batch dimensions {list(batch)}, "
            f"got {list(lengths.shape)}"
        )
    return lengths.reshape(math.prod(batch)).astype(jnp.int32)


def materialize(
    mask: masks.Mask | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
) -> Bool[Array, "#B #N #T #S"] | None:
    """Evaluates a mask at all pairs of these queries and keys; None stays None."""
    if mask is None:
        return None
    batch_size, length, num_heads, _ = query.shape
    return mask.materialize(
        length, key.shape[1], batch_size=batch_size, num_heads=num_heads
    )
