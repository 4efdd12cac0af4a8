"""Wrong edits of attention in blocks, of its lists of blocks, and of the choice."""

import types

_BLOCKWISE = (
    (
        "decay = jnp.exp(peak - _finite(new))",
        "decay = jnp.ones_like(peak)",
        "what was summed below a smaller peak is not corrected",
    ),
    (
        "total = decay * total + jnp.sum(weights, axis=1)",
        "total = total + jnp.sum(weights, axis=1)",
        "the sum is not corrected for a new peak",
    ),
    (
        "return new, total, decay[:, None] * mean + product",
        "return new, total, mean + product",
        "the mean is not corrected for a new peak",
    ),
    (
        "jnp.log(divisor) + peak",
        "jnp.log(divisor)",
        "the log-sum-exp lacks the peak",
    ),
    (
        "row + jnp.exp(inputs.sink - _finite(peak))",
        "row",
        "a sink sets the peak and takes no weight",
    ),
    (
        "- d_log_normalizer) / divisor",
        ") / divisor",
        "the log-sum-exp has no gradient",
    ),
    (
        "d_scores = weights * (d_weights - offsets[i][:, None])",
        "d_scores = weights * d_weights",
        "the gradient ignores the normaliser",
    ),
    (
        "by_query = inputs.query, d_output / divisor[:, None]",
        "by_query = inputs.query, d_output",
        "weights are not normalised in the gradient of values",
    ),
    (
        "d_weights = tile.drop(tile.matmul(slopes[i], value_t))",
        "d_weights = tile.matmul(slopes[i], value_t)",
        "dropped weights have gradients",
    ),
    (
        "tile.matmul(slopes_t[:, i], tile.drop(weights))",
        "tile.matmul(slopes_t[:, i], weights)",
        "values of dropped weights have gradients",
    ),
    (
        "d_query.at[i].add(tile.matmul(d_products, key))",
        "d_query.at[route.block].add(tile.matmul(d_products, key))",
        "gradients of queries land in the block of the keys",
    ),
    (
        "d_sink = -jnp.sum(jnp.exp(inputs.sink - peak) * offset)",
        "d_sink = jnp.sum(jnp.exp(inputs.sink - peak) * offset)",
        "a sink's gradient has the wrong sign",
    ),
    (
        "if masked:",
        "if not masked:",
        "full blocks are masked, and partial ones are not",
    ),
    (
        "return self.i * self.kernel.query_block, self.j * self.kernel.key_block",
        "return self.i * self.kernel.query_block, self.j * self.kernel.query_block",
        "key positions are counted in blocks of queries",
    ),
    (
        "jnp.where(peak == -jnp.inf, 0, peak)",
        "peak",
        "a row that sees nothing yet is NaN",
    ),
)

_FLASH = (
    (
        "full = blocks.some & blocks.every & whole[None, None, None]",
        "full = blocks.some & blocks.every",
        "padding of the keys is attended to",
    ),
    (
        "maps = full, blocks.some & ~full",
        "maps = full, blocks.some & ~blocks.every",
        "blocks that are full but for padding are skipped",
    ),
    (
        "x.swapaxes(2, 3) for x in maps",
        "x for x in maps",
        "keys are visited by the queries that they visit",
    ),
    (
        "shown = (kv_index < S)[None]",
        "shown = (kv_index <= S)[None]",
        "one key of padding is attended to",
    ),
    (
        "kv_index = kv_start + jnp.arange",
        "kv_index = q_start + jnp.arange",
        "masks are evaluated at the wrong keys",
    ),
    (
        "index = (jnp.int32(0),) * 2 if options.broadcast_dropout else (batch, head)",
        "index = (batch, head)",
        "broadcast_dropout is ignored",
    ),
    (
        "one_by_one = [n > 1 for n in by_query.partial.columns.shape[:2]]",
        "one_by_one = (False, False)",
        "short rows pay for long ones",
    ),
    (
        "if bias.shape[axis] > 1:",
        "if bias.shape[axis] >= 1:",
        "a shared axis of a bias is padded",
    ),
    (
        'return lax.pcast(x, tuple(sorted(missing)), to="varying")',
        "return x",
        "what a loop carries changes its type under shard_map",
    ),
    (
        "run = _attention if _has_function(options) else _compiled",
        "run = _compiled",
        "a cached program keeps tracers",
    ),
)

_BLOCK_LISTS = (
    (
        "if length == 1 and self.counts is None:",
        "if length >= 1 and self.counts is None:",
        "only the first block is visited",
    ),
    (
        "None if same else counts)",
        "None)",
        "every row visits as many blocks as the longest",
    ),
    (
        "columns = jnp.argsort(~grid, axis=-1, stable=True)",
        "columns = jnp.argsort(grid, axis=-1, stable=True)",
        "lists of data begin with empty blocks",
    ),
)

_CLOSURES = (
    (
        "jax.tree.leaves((args, named))",
        "jax.tree.leaves((named, args))",
        "arguments that are given by name come first",
    ),
    (
        "jnp.issubdtype(x.dtype, jnp.inexact)",
        "jnp.issubdtype(x.dtype, jnp.integer)",
        "arrays of floats have no gradients",
    ),
)

_CHOICE = (
    (
        "if T * S < SCORES:",
        "if T * S < 0:",
        "blocks are chosen at any size",
    ),
    (
        "width > 128 or width % 8 != 0",
        "width > 128",
        "cuDNN is asked for odd widths",
    ),
)

ROWS = types.MappingProxyType(
    {
        "attention/dot_product/blockwise.py": _BLOCKWISE,
        "attention/dot_product/flash.py": _FLASH,
        "attention/dot_product/block_lists.py": _BLOCK_LISTS,
        "attention/dot_product/closures.py": _CLOSURES,
        "attention/dot_product/choice.py": _CHOICE,
    }
)
