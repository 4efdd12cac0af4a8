"""One head of exact attention in blocks, with memory O(T + S).

Block i of the queries visits the blocks j of the keys that its mask does not leave
empty, and corrects what it has so far as the largest score of its rows, m, grows:

    s  = scores(qᵢ, kⱼ), -inf where masked
    m' = max(m, rowmax s)              p  = exp(s - m')
    l  ← exp(m - m') l + rowsum p      a  ← exp(m - m') a + p vⱼ
    oᵢ = a / l                         log-sum-exp = m + log l

The derivative visits the same blocks once more, from the side of the keys, with the
saved m and l, so that nothing of the size T x S is ever kept:

    p  = exp(s - m) / l                dvⱼ += pᵀ doᵢ
    ds = p (doᵢ vⱼᵀ - rowsum(doᵢ oᵢ) + d log-sum-exp)
    dqᵢ, dkⱼ, and those of bias and score_mod: the transpose of `scores`, at ds

m and l are kept apart, since m + log l loses l where scores are huge. Milakov and
Gimelshein, 2018, arXiv:1805.02867 (online softmax); Rabe and Staats, 2021,
arXiv:2112.05682; Dao et al., 2022, arXiv:2205.14135.

Both passes are loops of forward-differentiable operations: `jax.jvp` of `jax.grad`, a
Hessian-vector product, works in the same memory. Forward mode alone, and reverse mode
over reverse mode, need implementation='reference'.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from attention import dropout, numerics, softmax, visits


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is static in every block.

    Attributes:
      query_block: queries of a block.
      key_block: keys of a block.
      softcap: as in `softmax.scores`.
      score_mod: `score_mod(floats, others, score, q_index, kv_index, batch, head)`,
        which closes over nothing; None: none.
      mask: `mask(floats, others, q_start, kv_start, batch, head) -> bool [bq bk]`, for
        partial blocks; the like.
      dropout_rate: the probability of dropping a weight.
      precision: of the matrix products.
    """

    query_block: int
    key_block: int
    softcap: float | None
    score_mod: Callable[..., Array] | None
    mask: Callable[..., Array]
    dropout_rate: float
    precision: lax.PrecisionLike


class Inputs(NamedTuple):
    """What is differentiated. Lengths are whole blocks, padded with zeros."""

    query: Float[Array, "T H"]  # scaled
    key: Float[Array, "S H"]
    value: Float[Array, "S D"]
    bias: Float[Array, "T|1 S|1"] | None
    sink: Float[Array, ""] | None
    floats: tuple[Array, ...]  # over which score_mod closes


class Route(NamedTuple):
    """The blocks that each block visits: those that need no mask, and those that do."""

    block: Int[Array, "I"]
    full: visits.Visits
    partial: visits.Visits

    def fold(self, step: Callable[..., Any], carry: Any) -> Any:
        """Applies carry ← step(masked, j, carry) to all blocks of one row."""
        carry = self.full.fold(functools.partial(step, False), carry)
        return self.partial.fold(functools.partial(step, True), carry)


class Context(NamedTuple):
    """What is not differentiated."""

    by_query: Route
    by_key: Route
    others: tuple[Array, ...]  # over which score_mod closes
    of_mask: Any  # the floats and others over which it closes
    rng: Array | None  # of dropout, in this head
    batch: Int[Array, ""]
    head: Int[Array, ""]


Outputs = tuple[Float[Array, "T D"], Float[Array, "T"]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(kernel: Kernel, inputs: Inputs, context: Context) -> Outputs:
    """Output and log-sum-exp of one head; -inf for a query that sees nothing."""
    return _forward(kernel, inputs, context)[0]


def _forward(kernel: Kernel, inputs: Inputs, context: Context) -> Any:
    keys, values = (_blocks(x, kernel.key_block) for x in (inputs.key, inputs.value))

    def query_block(block: Any) -> Any:
        query, route = block
        i = route.block

        def step(masked: bool, j: Array, carry: Any) -> Any:
            peak, total, mean = carry
            bias = _tile(kernel, inputs.bias, i, j)
            scores = _scores(
                kernel, context, masked, i, j, query, keys[j], bias, inputs.floats
            )
            new = jnp.maximum(peak, lax.stop_gradient(jnp.max(scores, axis=1)))
            weights = jnp.exp(scores - _finite(new)[:, None])
            decay = jnp.exp(peak - _finite(new))
            total = decay * total + jnp.sum(weights, axis=1)
            value = values[j].astype(weights.dtype)
            product = _matmul(kernel, _drop(kernel, context, i, j, weights), value)
            return new, total, decay[:, None] * mean + product

        row = jnp.zeros_like(query, shape=query.shape[0])
        if inputs.sink is None:
            carry = row - jnp.inf, row
        else:
            peak = row + lax.stop_gradient(inputs.sink)
            carry = peak, row + jnp.exp(inputs.sink - _finite(peak))
        mean = jnp.zeros_like(query, shape=(*row.shape, values.shape[-1]))
        peak, total, mean = route.fold(step, (*carry, mean))
        divisor = jnp.where(total == 0, 1, total)
        log_normalizer = jnp.where(total == 0, -jnp.inf, jnp.log(divisor) + peak)
        return mean / divisor[:, None], log_normalizer, _finite(peak), divisor

    queries = _blocks(inputs.query, kernel.query_block)
    results = lax.map(query_block, (queries, context.by_query))
    output, log_normalizer, peak, divisor = (_whole(x) for x in results)
    saved = inputs, context, output, peak, divisor
    return (output, log_normalizer), saved


def _backward(kernel: Kernel, saved: Any, cotangents: Outputs) -> tuple[Inputs, None]:
    inputs, context, output, peak, divisor = saved
    d_output, d_log_normalizer = cotangents
    # Divided by l here, once, and not in every weight.
    offset = (jnp.sum(d_output * output, axis=1) - d_log_normalizer) / divisor
    rows = d_output / divisor[:, None], offset, peak, inputs.query
    slopes, offsets, peaks, queries = (_blocks(x, kernel.query_block) for x in rows)

    def key_block(summed: Any, block: Any) -> Any:
        key, value, route = block
        j = route.block
        key, value = (x.astype(queries.dtype) for x in (key, value))

        def step(masked: bool, i: Array, carry: Any) -> Any:
            d_query, d_bias, d_floats, d_key, d_value = carry
            scores, transpose = jax.vjp(
                functools.partial(_scores, kernel, context, masked, i, j),
                queries[i],
                key,
                _tile(kernel, inputs.bias, i, j),
                inputs.floats,
            )
            weights = jnp.exp(scores - peaks[i][:, None])
            kept = _drop(kernel, context, i, j, weights)
            d_kept = _matmul(kernel, slopes[i], value.T)
            d_weights = _drop(kernel, context, i, j, d_kept)
            d_scores = weights * (d_weights - offsets[i][:, None])
            by_query, by_key, by_bias, by_floats = transpose(d_scores)
            return (
                _add(d_query, by_query, i),
                _add_tile(kernel, d_bias, by_bias, i, j),
                jax.tree.map(lambda x, y: x + y.astype(x.dtype), d_floats, by_floats),
                d_key + by_key,
                d_value + _matmul(kernel, kept.T, slopes[i]),
            )

        nothing = jnp.zeros_like(key), jnp.zeros_like(value)
        *summed, d_key, d_value = route.fold(step, (*summed, *nothing))
        return tuple(summed), (d_key, d_value)

    keys, values = (_blocks(x, kernel.key_block) for x in (inputs.key, inputs.value))
    zeros = jax.tree.map(_wide_zeros, (queries, inputs.bias, inputs.floats))
    (d_query, d_bias, d_floats), (d_key, d_value) = lax.scan(
        key_block, zeros, (keys, values, context.by_key)
    )
    d_sink = None
    if inputs.sink is not None:
        d_sink = -jnp.sum(jnp.exp(inputs.sink - peak) * offset)
    gradients = Inputs(
        _whole(d_query), _whole(d_key), _whole(d_value), d_bias, d_sink, d_floats
    )
    return jax.tree.map(lambda x, y: x.astype(y.dtype), gradients, inputs), None


attention.defvjp(_forward, _backward)


def _scores(
    kernel: Kernel,
    context: Context,
    masked: bool,
    i: Array,
    j: Array,
    query: Float[Array, "bq H"],
    key: Float[Array, "bk H"],
    bias: Float[Array, "bq|1 bk|1"] | None,
    floats: tuple[Array, ...],
) -> Float[Array, "bq bk"]:
    """Scores of block (i, j), -inf where masked."""
    at = i * kernel.query_block, j * kernel.key_block
    score_mod = kernel.score_mod
    if score_mod is not None:
        score_mod = functools.partial(score_mod, floats, context.others)

    scores = softmax.scores(
        query,
        key.astype(query.dtype),
        bias,
        scale=1,
        softcap=kernel.softcap,
        score_mod=score_mod,
        batch=context.batch,
        head=context.head,
        q_start=at[0],
        kv_start=at[1],
        precision=kernel.precision,
    )
    if masked:
        place = context.batch, context.head
        visible = kernel.mask(*context.of_mask, *at, *place)
        scores = jnp.where(visible, scores, -jnp.inf)
    return scores


def _drop(
    kernel: Kernel, context: Context, i: Array, j: Array, x: Float[Array, "bq bk"]
) -> Float[Array, "bq bk"]:
    """Zeros where the weights of block (i, j) are dropped, 1/(1 - rate) elsewhere."""
    if context.rng is None:
        return x
    start = i * kernel.query_block, j * kernel.key_block
    return dropout.apply(x, context.rng, rate=kernel.dropout_rate, start=start)


def _matmul(kernel: Kernel, a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=kernel.precision)


def _blocks(x: Shaped[Array, "L *A"], size: int) -> Shaped[Array, "L/size size *A"]:
    return x.reshape(-1, size, *x.shape[1:])


def _whole(x: Shaped[Array, "I size *A"]) -> Shaped[Array, "L *A"]:
    return x.reshape(-1, *x.shape[2:])


def _tile(
    kernel: Kernel, bias: Float[Array, "T|1 S|1"] | None, i: Array, j: Array
) -> Float[Array, "bq|1 bk|1"] | None:
    """The part of a bias that block (i, j) sees."""
    if bias is None:
        return None
    sizes = _tile_sizes(kernel, bias)
    # The start is clamped: a dimension of 1 is seen by every block.
    return lax.dynamic_slice(bias, (i * sizes[0], j * sizes[1]), sizes)


def _add_tile(
    kernel: Kernel, bias: Any, tile: Any, i: Array, j: Array
) -> Float[Array, "T|1 S|1"] | None:
    """Adds to the part of a bias's gradient that block (i, j) sees."""
    if bias is None:
        return None
    sizes = _tile_sizes(kernel, bias)
    start = i * sizes[0], j * sizes[1]
    tile += lax.dynamic_slice(bias, start, sizes)
    return lax.dynamic_update_slice(bias, tile, start)


def _tile_sizes(kernel: Kernel, bias: Float[Array, "T|1 S|1"]) -> tuple[int, int]:
    return min(kernel.query_block, bias.shape[0]), min(kernel.key_block, bias.shape[1])


def _add(blocks: Array, block: Array, i: Array) -> Array:
    return lax.dynamic_update_index_in_dim(blocks, blocks[i] + block, i, 0)


def _wide_zeros(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.zeros_like(x, dtype=numerics.accumulation_dtype(x.dtype))


def _finite(peak: Float[Array, "bq"]) -> Float[Array, "bq"]:
    """Of a row that has seen nothing 0, since -inf - -inf would be NaN."""
    return jnp.where(peak == -jnp.inf, 0, peak)
