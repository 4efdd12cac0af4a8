"""The arguments of dot-product attention: validated once, for every implementation."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from attention import masks, softmax
from attention.masks import algebra


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What an implementation is asked to honour; the batch is flattened to one axis."""

    bias: Float[Array, "B|1 N|1 T|1 S|1"] | None
    sinks: Float[Array, "N"] | None
    scale: float | Float[Array, ""]
    softcap: float | None = algebra.static()
    score_mod: softmax.ScoreMod | None = algebra.static()
    precision: lax.PrecisionLike = algebra.static()
    dropout_rate: float = algebra.static()
    dropout_rng: Array | None
    broadcast_dropout: bool = algebra.static()
    return_residual: bool = algebra.static()
    # The masks as they were given, for kernels that know some of them by name ...
    mask: masks.Mask | None
    is_causal: bool = algebra.static()
    local_window_size: tuple[int, int] | None = algebra.static()
    query_seq_lengths: Int[Array, "B"] | None
    key_value_seq_lengths: Int[Array, "B"] | None
    # ... and all of them together.
    visible: masks.Mask | None


def check_inputs(query: Array, key: Array, value: Array) -> tuple[int, ...]:
    """Checks shapes and dtypes of [*B T N H], [*B S K H], [*B S K D]; returns *B."""
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
    if kv_heads == 0 or num_heads % kv_heads:
        raise ValueError(
            f"the query heads must be a multiple of the key/value heads, "
            f"got N={num_heads} and K={kv_heads}"
        )
    return tuple(batch)


def options(
    query: Array,
    key: Array,
    bias: Array | None,
    mask: masks.Mask | Array | None,
    *,
    scale: float | Array | None,
    is_causal: bool,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    local_window_size: int | tuple[int, int] | None,
    score_mod: softmax.ScoreMod | None,
    softcap: float | None,
    sinks: Array | None,
    dropout_rate: float,
    dropout_rng: Array | None,
    broadcast_dropout: bool,
    precision: lax.PrecisionLike,
    return_residual: bool,
) -> Options:
    """Validates the arguments of `dot_product_attention` against its shapes."""
    *batch, length, num_heads, width = query.shape
    scores_shape = (*batch, num_heads, length, key.shape[-3])
    if bias is not None:
        bias = _floating(bias, name="bias")
        bias = _aligned(bias, scores_shape, name="bias")
    if mask is not None and not isinstance(mask, masks.Mask):
        mask = masks.dense(_aligned(jnp.asarray(mask), scores_shape, name="mask"))
    window = None if local_window_size is None else _window(local_window_size)
    query_seq_lengths = _lengths(query_seq_lengths, batch, name="query_seq_lengths")
    key_value_seq_lengths = _lengths(
        key_value_seq_lengths, batch, name="key_value_seq_lengths"
    )
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
    return Options(
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
        local_window_size=window,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        visible=_visible(
            mask,
            is_causal,
            window,
            key_value_seq_lengths,
            query_seq_lengths,
        ),
    )


def _visible(
    mask: masks.Mask | None,
    is_causal: bool,
    window: tuple[int, int] | None,
    key_lengths: Array | None,
    query_lengths: Array | None,
) -> masks.Mask | None:
    """Every mask argument in one mask value; None if all may attend to all."""
    parts = [] if mask is None else [mask]
    if is_causal:
        parts.append(masks.causal())
    if window is not None:
        parts.append(masks.window(*window))
    if key_lengths is not None or query_lengths is not None:
        parts.append(masks.lengths(key_lengths, query_lengths))
    return functools.reduce(lambda a, b: a & b, parts) if parts else None


def _aligned(
    x: Array, scores_shape: tuple[int, ...], *, name: str
) -> Bool[Array, "B|1 N|1 T|1 S|1"]:
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


def _window(size: int | tuple[int, int]) -> tuple[int, int]:
    """(left, right) inclusive distances; one number stands for both."""
    sizes = np.asarray(size)
    if sizes.dtype.kind not in "iu" or sizes.shape not in ((), (2,)) or sizes.min() < 0:
        raise ValueError(
            f"local_window_size must be a distance or (left, right), got {size!r}"
        )
    left, right = np.broadcast_to(sizes, (2,)).tolist()
    return left, right


def _lengths(
    lengths: Array | None, batch: list[int], *, name: str
) -> Int[Array, "B"] | None:
    """One length per row of the flattened batch."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {lengths.dtype}")
    if lengths.shape not in (tuple(batch), tuple(batch) or (1,)):
        raise ValueError(
            f"{name} must have the batch dimensions {list(batch)}, "
            f"got {list(lengths.shape)}"
        )
    return lengths.reshape(math.prod(batch)).astype(jnp.int32)


def materialize(
    mask: masks.Mask | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
) -> Bool[Array, "B|1 N|1 T|1 S|1"] | None:
    """The mask of these queries and keys as an array; None stays None."""
    if mask is None:
        return None
    batch_size, length, num_heads, _ = query.shape
    return mask.materialize(
        length, key.shape[1], batch_size=batch_size, num_heads=num_heads
    )


def without_padding(
    visible: masks.Mask | None,
    query: Float[Array, "B T N H"],
    *keys_and_values: Float[Array, "B S K _"],
) -> list[Array]:
    """Zeros in place of rows that nothing may see, since 0 · NaN is NaN."""
    if visible is None:
        return [query, *keys_and_values]

    def clear(x: Array, valid: Bool[Array, "B|1 L"] | None) -> Array:
        # Rows that do not fit are refused where the mask is evaluated.
        if valid is None or len(valid) not in (1, len(x)):
            return x
        return jnp.where(valid[:, :, None, None], x, 0)

    valid_keys = visible.valid_keys(keys_and_values[0].shape[1])
    return [
        clear(query, visible.valid_queries(query.shape[1])),
        *(clear(x, valid_keys) for x in keys_and_values),
    ]
