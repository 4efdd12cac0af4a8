"""Implementation 'flash': exact attention in blocks, every feature, memory O(T + S).

`blockwise` computes one head. Here lengths are cut into blocks, the mask says
which pairs of them are empty, partial or full, and the head is lifted over heads and
batch. Empty blocks cost nothing, full ones are not masked. Where the blocks to visit
differ between rows (lengths, segments) or heads, these are taken one after another:
side by side, all would pay for the longest.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from attention import dropout, heads, masks, numerics
from attention.dot_product import arguments, block_lists, blockwise, closures, reference
from attention.masks import block_maps

Outputs = tuple[Float[Array, "B T N D"], Float[Array, "B T N"] | None]
Sizes = tuple[int, int]
# What one block takes with 8 heads of 64 in float32, measured on two cores of an AMD
# EPYC: what counts is how small blocks compare with large ones.
MILLISECONDS: Mapping[Sizes, float] = types.MappingProxyType(
    {(512, 256): 2.05, (256, 256): 1.7, (128, 128): 0.5}
)


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    options: arguments.Options,
    sizes: Sizes | None = None,
) -> Outputs:
    """Attends in blocks, forward and backward, in memory O(T + S).

    Args:
      query: queries.
      key: keys.
      value: values.
      options: masks, bias and all that changes scores or weights.
      sizes: queries and keys of a block; None: chosen by `block_sizes`.

    Returns:
      The output and, with `options.return_residual`, the log-sum-exp of every row, both
      in float32 (float64 for float64).

    Raises:
      TypeError: in forward mode, which has no rule here; `jax.jvp` of `jax.grad` has.
      ValueError: in reverse mode over reverse mode, or if the mask does not fit.
    """
    if 0 in (query.size, key.size, value.size):
        return reference.attention(query, key, value, options)
    # Raises if the mask does not fit; computes no T x S.
    jax.eval_shape(lambda: arguments.materialize(options.visible, query, key))
    if sizes is None:
        sizes = block_sizes(query.shape[1], key.shape[1], options.visible)
    # Numbers stay static under jit, so that masks made of them still skip blocks.
    leaves, structure = jax.tree.flatten(options)
    numbers = tuple(
        x if isinstance(x, (int, float, np.generic)) else None for x in leaves
    )
    arrays = [x if y is None else None for x, y in zip(leaves, numbers, strict=True)]
    # What a caller's function closes over may change, or be a tracer: no cached program
    # may keep it.
    run = _attention if _has_function(options) else _compiled
    return run(query, key, value, arrays, numbers, structure, sizes)


def _attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    arrays: Sequence[Array | None],
    numbers: tuple[Any, ...],
    structure: Any,
    sizes: Sizes,
) -> Outputs:
    leaves = [x if y is None else y for x, y in zip(arrays, numbers, strict=True)]
    options: arguments.Options = jax.tree.unflatten(structure, leaves)
    batch_size, T, num_heads, _ = query.shape
    S, dtype = key.shape[1], numerics.accumulation_dtype(query.dtype)
    axes = _varying_axes(query, key, value, *arrays)
    vary = functools.partial(_vary, axes)
    score_mod, floats, nonfloats = _score_mod(
        options.score_mod, (T, S), sizes, dtype, vary
    )
    # The gradient of an array that all devices share is summed over them at each block.
    lockstep = bool(floats and axes)
    by_query, by_key = _routes(T, S, sizes, options.visible, lockstep)
    mask, *mask_arrays = _mask(options.visible, S, sizes, vary)
    kernel = blockwise.Kernel(
        *sizes,
        softcap=options.softcap,
        score_mod=score_mod,
        mask=mask,
        dropout_rate=options.dropout_rate,
        precision=options.precision,
    )

    scale = jnp.asarray(options.scale, dtype)

    def one_head(query: Array, key: Array, value: Array, *rest: Any) -> Any:
        query, key, value = vary((query * scale, key, value))
        bias, sink, batch, head, by_query, by_key = vary(rest)
        rng = options.dropout_rng
        if rng is not None:
            index = (jnp.int32(0),) * 2 if options.broadcast_dropout else (batch, head)
            rng = dropout.of_head(rng, *index)
        return blockwise.attention(
            kernel,
            blockwise.Inputs(query, key, value, bias, sink, floats),
            blockwise.Context(
                by_query, by_key, nonfloats, mask_arrays, rng, batch, head
            ),
        )

    bias, sinks = options.bias, options.sinks
    one_by_one = [n > 1 for n in by_query.partial.columns.shape[:2]]
    output, log_normalizer = heads.over_heads(one_head, out_axis=1, loop=one_by_one)(
        _whole(query.astype(dtype), sizes[0], 1),
        # Wide already here, so that gradients of shared heads are summed in it, too.
        _whole(key.astype(dtype), sizes[1], 1),
        _whole(value.astype(dtype), sizes[1], 1),
        None if bias is None else _whole_bias(bias.astype(dtype), sizes),
        None if sinks is None else jnp.asarray(sinks, dtype)[None],
        jnp.arange(batch_size, dtype=jnp.int32)[:, None],
        jnp.arange(num_heads, dtype=jnp.int32)[None],
        by_query,
        by_key,
    )
    log_normalizer = log_normalizer[:, :T] if options.return_residual else None
    return output[:, :T], log_normalizer


_compiled = jax.jit(_attention, static_argnames=("numbers", "structure", "sizes"))


def _has_function(x: Any) -> bool:
    """Whether options, or the masks in them, hold a function of the caller."""
    if dataclasses.is_dataclass(x):
        return any(_has_function(getattr(x, f.name)) for f in dataclasses.fields(x))
    return callable(x)


def block_sizes(T: int, S: int, visible: masks.Mask | None) -> Sizes:
    """Chooses how many queries and how many keys a block has.

    Returns:
      Of the sizes in `MILLISECONDS` those with which this mask's blocks take the least
      time, the first ones for a mask that is made of data; evened out over T and S.
    """

    def cost(largest: Sizes) -> float:
        return MILLISECONDS[largest] * np.sum(
            _blocks(T, S, even(largest), visible).some
        )

    def even(largest: Sizes) -> Sizes:
        return _even(T, largest[0]), _even(S, largest[1])

    sizes = list(MILLISECONDS)
    if isinstance(_blocks(T, S, sizes[0], visible).some, np.ndarray):
        return even(min(sizes, key=cost))
    return even(sizes[0])


def _even(length: int, largest: int) -> int:
    """Returns a block size, at most the largest, that leaves the last nearly full."""
    count = -(-length // largest)
    return -(-length // count)


def _routes(
    T: int, S: int, sizes: Sizes, visible: masks.Mask | None, lockstep: bool
) -> tuple[blockwise.Route, blockwise.Route]:
    """Lists the key blocks that each query block visits, and the reverse.

    In lockstep all devices run the same steps, whatever their data: where blocks depend
    on data, every block is visited.
    """
    blocks = _blocks(T, S, sizes, visible)
    if lockstep and not isinstance(blocks.some, np.ndarray):
        everything = np.ones((1, 1, *blocks.some.shape[2:]), bool)
        blocks = block_maps.Blocks(everything, ~everything)
    # Padding of the keys must be masked, whatever the mask says of it.
    whole = np.arange(1, blocks.some.shape[3] + 1) * sizes[1] <= S
    full = blocks.some & blocks.every & whole[None, None, None]
    maps = full, blocks.some & ~full

    def route(maps: Sequence[Any]) -> blockwise.Route:
        block: Any = np.arange(maps[0].shape[2], dtype=np.int32)[None, None]
        return blockwise.Route(block, *map(block_lists.from_grid, maps))

    return route(maps), route([x.swapaxes(2, 3) for x in maps])


def _blocks(
    T: int, S: int, sizes: Sizes, visible: masks.Mask | None
) -> block_maps.Blocks:
    if visible is None:
        visible = masks.window(None, None)
    return visible.blocks(T, S, query_block=sizes[0], key_block=sizes[1])


def _mask(
    visible: masks.Mask | None,
    S: int,
    sizes: Sizes,
    vary: Callable[[Any], Any],
) -> tuple[Callable[..., Array], closures.Arrays, closures.Arrays]:
    """The mask of one block, apart from the arrays that it closes over."""

    def mask(q_start: Array, kv_start: Array, batch: Array, head: Array) -> Array:
        q_index = q_start + jnp.arange(sizes[0], dtype=jnp.int32)
        kv_index = kv_start + jnp.arange(sizes[1], dtype=jnp.int32)
        shown = (kv_index < S)[None]
        if visible is None:
            return shown
        index = {"batch": batch[None], "head": head[None]}
        return shown & visible.at(q_index, kv_index, **index, length=S)[0, 0]

    q_start, kv_start, batch, head = vary([jnp.int32(0)] * 4)
    return closures.hoist(mask, q_start, kv_start, batch, head)


def _score_mod(
    score_mod: Any,
    lengths: tuple[int, int],
    sizes: Sizes,
    dtype: Any,
    vary: Callable[[Any], Any],
) -> tuple[Callable[..., Array] | None, closures.Arrays, closures.Arrays]:
    """The score modifier of one block, apart from the arrays that it closes over."""
    if score_mod is None:
        return None, (), ()

    def within(score: Array, *index: Array, batch: Array, head: Array) -> Array:
        # Padding is told the last index: beyond it there may be no finite answer, and
        # 0 · NaN is NaN.
        q_index, kv_index = (
            jnp.minimum(x, n - 1) for x, n in zip(index, lengths, strict=True)
        )
        modified = score_mod(score, q_index, kv_index, batch=batch, head=head)
        return jnp.broadcast_to(modified, score.shape).astype(score.dtype)

    score = jnp.zeros(sizes, dtype)
    indices = (jnp.zeros(shape, jnp.int32) for shape in ((sizes[0], 1), (1, sizes[1])))
    index = {"batch": jnp.int32(0), "head": jnp.int32(0)}
    return closures.hoist(within, *vary([score, *indices]), **vary(index))


def _whole_bias(
    bias: Float[Array, "#B #N #T #S"], sizes: Sizes
) -> Float[Array, "#B #N _ _"]:
    """Pads a bias to whole blocks, but for the axes along which it is shared."""
    for size, axis in zip(sizes, (2, 3), strict=True):
        if bias.shape[axis] > 1:
            bias = _whole(bias, size, axis)
    return bias


def _whole(x: Array, size: int, axis: int) -> Array:
    """Pads an axis with zeros to whole blocks."""
    missing = -x.shape[axis] % size
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])


def _varying_axes(*arrays: Array | None) -> frozenset[str]:
    """The mesh axes along which devices hold different arrays: see `jax.shard_map`."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None)
    return frozenset().union(*axes)


def _vary(axes: frozenset[str], tree: Any) -> Any:
    """Gives every array of a tree the type of one that varies along these mesh axes.

    Under `jax.shard_map` what a loop carries must keep its type from step to step.
    """

    def cast(x: Any) -> Array:
        x = jnp.asarray(x)
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(sorted(missing)), to="varying")

    return jax.tree.map(cast, tree)
