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
from jaxtyping import Array, Bool, Float, Inexact, Int

from attention import dropout, numerics, softmax
from attention.dot_product import block_lists


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What every block knows while the program is traced.

    Attributes:
      query_block: queries of a block.
      key_block: keys of a block.
      softcap: c in c · tanh(score / c); None: no cap.
      score_mod: `score_mod(floats, nonfloats, score, q_index, kv_index, batch, head)`,
        which closes over no array; None: scores stay as they are.
      mask: `mask(floats, nonfloats, q_start, kv_start, batch, head) -> bool [bq bk]`,
        for partial blocks; it closes over no array either.
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
    """The arrays that have derivatives; zeros pad T and S to whole blocks.

    float32, or float64, save for what score_mod closes over.
    """

    query: Float[Array, "T H"]  # scaled
    key: Float[Array, "S H"]
    value: Float[Array, "S D"]
    bias: Float[Array, "#T #S"] | None
    sink: Float[Array, ""] | None
    floats: tuple[Array, ...]  # over which score_mod closes


class Route(NamedTuple):
    """The blocks that each block visits: those that need no mask, and those that do."""

    block: Int[Array, "I"]
    full: block_lists.BlockLists
    partial: block_lists.BlockLists

    def fold(self, step: Callable[..., Any], carry: Any) -> Any:
        """Applies carry ← step(masked, j, carry) to all blocks of one row."""
        carry = self.full.fold(functools.partial(step, False), carry)
        return self.partial.fold(functools.partial(step, True), carry)


class Context(NamedTuple):
    """The arrays that have no derivatives."""

    by_query: Route
    by_key: Route
    nonfloats: tuple[Array, ...]  # over which score_mod closes
    mask_arrays: Any  # (floats, nonfloats) over which the mask closes
    rng: Array | None  # of dropout, in this head
    batch: Int[Array, ""]
    head: Int[Array, ""]


Outputs = tuple[Float[Array, "T D"], Float[Array, "T"]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(kernel: Kernel, inputs: Inputs, context: Context) -> Outputs:
    """Output and log-sum-exp of one head; -inf for a query that sees nothing."""
    return _forward(kernel, inputs, context)[0]


def _forward(kernel: Kernel, inputs: Inputs, context: Context) -> Any:
    queries = _rows(inputs.query, kernel.query_block)
    keys_t = _columns(inputs.key, kernel.key_block)
    values = _rows(inputs.value, kernel.key_block)
    # Under `jax.vmap` every output is mapped if any input is. Of one that all share,
    # such as a log-sum-exp where only values are mapped, the cotangent would be given
    # to each of them, and count as often.
    mapped = _mapped_zero((inputs, context)).astype(inputs.query.dtype)

    def query_block(route: Route) -> Any:
        query = queries[route.block]

        def step(masked: bool, j: Array, carry: Any) -> Any:
            peak, total, mean = carry
            tile = _Tile(kernel, context, route.block, j)
            bias = tile.part(inputs.bias)
            products = tile.matmul(query, keys_t[:, j])
            scores = tile.scores(masked, products, bias, inputs.floats)
            new = jnp.maximum(peak, lax.stop_gradient(jnp.max(scores, axis=1)))
            weights = jnp.exp(scores - _finite(new)[:, None])
            decay = jnp.exp(peak - _finite(new))
            total = decay * total + jnp.sum(weights, axis=1)
            product = tile.matmul(tile.drop(weights), values[j])
            return new, total, decay[:, None] * mean + product

        row = mapped + jnp.zeros_like(query, shape=query.shape[0])
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

    output, log_normalizer, peak, divisor = jax.tree.map(
        jnp.concatenate, lax.map(query_block, context.by_query)
    )
    saved = inputs, context, output, peak, divisor
    return (output, log_normalizer), saved


def _backward(kernel: Kernel, saved: Any, cotangents: Outputs) -> tuple[Inputs, None]:
    inputs, context, output, peak, divisor = saved
    d_output, d_log_normalizer = cotangents
    # Divided by l here, once, and not in every weight.
    offset = (jnp.sum(d_output * output, axis=1) - d_log_normalizer) / divisor
    by_query = inputs.query, d_output / divisor[:, None]
    queries, slopes = (_rows(x, kernel.query_block) for x in by_query)
    queries_t, slopes_t = (_columns(x, kernel.query_block) for x in by_query)
    peaks, offsets = (x.reshape(-1, kernel.query_block) for x in (peak, offset))
    keys, values = (_rows(x, kernel.key_block) for x in (inputs.key, inputs.value))

    def key_block(summed: Any, route: Route) -> Any:
        key, value = keys[route.block], values[route.block]
        key_t, value_t = key.T, value.T

        def step(masked: bool, i: Array, carry: Any) -> Any:
            d_query, d_bias, d_floats, d_key, d_value = carry
            tile = _Tile(kernel, context, i, route.block)
            scores, transpose = jax.vjp(
                functools.partial(tile.scores, masked),
                tile.matmul(queries[i], key_t),
                tile.part(inputs.bias),
                inputs.floats,
            )
            weights = jnp.exp(scores - peaks[i][:, None])
            d_weights = tile.drop(tile.matmul(slopes[i], value_t))
            d_scores = weights * (d_weights - offsets[i][:, None])
            d_products, by_bias, by_floats = transpose(d_scores)
            # Sums over queries are formed transposed, [H bk]: of a product that
            # contracts the first axis of both factors CPUs make three times the work.
            return (
                d_query.at[i].add(tile.matmul(d_products, key)),
                tile.add_part(d_bias, by_bias),
                jax.tree.map(lambda x, y: x + y.astype(x.dtype), d_floats, by_floats),
                d_key + tile.matmul(queries_t[:, i], d_products),
                d_value + tile.matmul(slopes_t[:, i], tile.drop(weights)),
            )

        nothing = jnp.zeros_like(key_t), jnp.zeros_like(value_t)
        *summed, d_key, d_value = route.fold(step, (*summed, *nothing))
        return tuple(summed), (d_key.T, d_value.T)

    zeros = jax.tree.map(_zeros, (queries, inputs.bias, inputs.floats))
    (d_query, d_bias, d_floats), by_key = lax.scan(key_block, zeros, context.by_key)
    d_query, d_key, d_value = map(jnp.concatenate, (d_query, *by_key))
    d_sink = None
    if inputs.sink is not None:
        d_sink = -jnp.sum(jnp.exp(inputs.sink - peak) * offset)
    gradients = Inputs(d_query, d_key, d_value, d_bias, d_sink, d_floats)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), gradients, inputs), None


attention.defvjp(_forward, _backward)


class _Tile(NamedTuple):
    """The scores of query block i and key block j, and what is computed of them."""

    kernel: Kernel
    context: Context
    i: Array
    j: Array

    @property
    def start(self) -> tuple[Array, Array]:
        """The index of the first query and of the first key."""
        return self.i * self.kernel.query_block, self.j * self.kernel.key_block

    def matmul(self, a: Array, b: Array) -> Array:
        """The product of two matrices."""
        return jnp.matmul(a, b, precision=self.kernel.precision)

    def scores(
        self,
        masked: bool,
        products: Float[Array, "bq bk"],
        bias: Float[Array, "#bq #bk"] | None,
        floats: tuple[Array, ...],
    ) -> Float[Array, "bq bk"]:
        """Scores, -inf where masked."""
        kernel, context = self.kernel, self.context
        score_mod = kernel.score_mod
        if score_mod is not None:
            score_mod = functools.partial(score_mod, floats, context.nonfloats)
        scores = softmax.modified(
            products,
            bias,
            softcap=kernel.softcap,
            score_mod=score_mod,
            batch=context.batch,
            head=context.head,
            start=self.start,
        )
        if masked:
            index = *self.start, context.batch, context.head
            visible = kernel.mask(*context.mask_arrays, *index)
            scores = jnp.where(visible, scores, -jnp.inf)
        return scores

    def drop(self, x: Float[Array, "bq bk"]) -> Float[Array, "bq bk"]:
        """Zeros where weights are dropped; those that are kept grow by 1/(1 - rate)."""
        if self.context.rng is None:
            return x
        rate = self.kernel.dropout_rate
        return dropout.apply(x, self.context.rng, rate=rate, start=self.start)

    def part(
        self, bias: Float[Array, "#T #S"] | None
    ) -> Float[Array, "#bq #bk"] | None:
        """The part of a bias that is added here."""
        return None if bias is None else lax.dynamic_slice(bias, *self._part(bias))

    def add_part(
        self,
        bias: Float[Array, "#T #S"] | None,
        x: Float[Array, "#bq #bk"] | None,
    ) -> Float[Array, "#T #S"] | None:
        """Adds x to the part of a bias's gradient that belongs here."""
        if bias is None or x is None:
            return None
        start, sizes = self._part(bias)
        x += lax.dynamic_slice(bias, start, sizes)
        return lax.dynamic_update_slice(bias, x, start)

    def _part(self, bias: Float[Array, "#T #S"]) -> Any:
        # Slices clamp their start: an axis of 1 is seen by every block.
        blocks = self.kernel.query_block, self.kernel.key_block
        sizes = tuple(map(min, blocks, bias.shape))
        return self.start, sizes


# Whatever a loop reads transposed is transposed outside of it, once.
def _rows(x: Float[Array, "L W"], size: int) -> Float[Array, "I {size} W"]:
    """Blocks of rows."""
    return x.reshape(-1, size, x.shape[1])


def _columns(x: Float[Array, "L W"], size: int) -> Float[Array, "W I {size}"]:
    """Blocks of columns of the transpose."""
    return x.T.reshape(x.shape[1], -1, size)


def _zeros(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """Zeros of the shape of x, in float32 at least."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.zeros_like(x)
    return jnp.zeros_like(x, dtype=numerics.accumulation_dtype(x.dtype))


def _mapped_zero(tree: Any) -> Bool[Array, ""]:
    """False; mapped by `jax.vmap` if any array of a tree is."""
    never = (jnp.any(x == x, where=False) for x in jax.tree.leaves(tree))
    return functools.reduce(jnp.logical_or, never)


def _finite(peak: Float[Array, "bq"]) -> Float[Array, "bq"]:
    """Replaces the -inf of a row that has seen nothing by 0: -inf - -inf is NaN."""
    return jnp.where(peak == -jnp.inf, 0, peak)
