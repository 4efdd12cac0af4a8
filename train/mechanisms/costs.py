"""How the cost of each mechanism grows with the length, and what decoding carries.

Growth is a factor: of what twice as many positions cost. Operations are counted as they
run (`report.operations`): the turns of a loop, and of attention the blocks that are
visited. Temporary memory is that of the compiled program, forward and backward.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import mixers
from train.mechanisms import cores, table
from train.report import compilation, operations

# Long enough for many blocks; narrow, so that what grows with T is not hidden.
LENGTH = 4096
GROWTH = dataclasses.replace(
    cores.SMALL, width=32, context=2 * LENGTH, window=256, block_size=128
)
# The language model's sizes (configs/tiny_lm.py), of one layer.
LAYER = dataclasses.replace(
    cores.SMALL,
    num_layers=4,
    num_heads=4,
    width=128,
    context=64,
    window=16,
    block_size=8,
    features=64,
    state_size=16,
    use_bias=False,
)


class Costs(NamedTuple):
    """What a layer costs.

    Attributes:
      parameters: at the language model's sizes.
      state: numbers that decoding carries after 64 tokens, and after 128; None: a
        layer that is not causal.
      operations: factor of the forward pass when T doubles; None: there are none.
      memory: factor of temporary bytes, forward and backward, likewise.
    """

    parameters: int
    state: tuple[int, int] | None
    operations: float | None
    memory: float | None


def costs(name: str) -> Costs:
    """Counts and compiles; nothing is timed.

    Args:
      name: of a row.
    """
    layer = table.SUBJECTS[name].layer
    shapes = layer(LAYER, LAYER.context).shapes
    parameters = jax.tree.leaves(shapes.get("params", shapes))
    state = None
    if name in mixers.MIXERS:
        size = functools.partial(mixers.MIXERS[name].state_size, LAYER, 1)
        state = size(LAYER.context), size(2 * LAYER.context)
    lengths = LENGTH, 2 * LENGTH
    return Costs(
        sum(math.prod(x.shape) for x in parameters),
        state,
        _factor(*(operations.count(*_call(name, length)) for length in lengths)),
        _factor(*(_temporary(*_call(name, length)) for length in lengths)),
    )


def _factor(single: int, double: int) -> float | None:
    return double / single if single else None


def _temporary(fn: Callable[[Any, Any], Any], params: Any, x: Any) -> int:
    """Temporary bytes of a compiled step, forward and backward."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(fn(params, x) ** 2)

    program = jax.jit(jax.grad(loss, argnums=(0, 1)))
    cost = compilation.cost(program, (params, x))
    assert cost.temporary_bytes is not None, "the compiler does not tell"
    return cost.temporary_bytes


def _call(name: str, length: int) -> tuple[Any, Any, Any]:
    """A layer of `GROWTH`, parameters of some value, and positions."""
    layer = table.SUBJECTS[name].layer(GROWTH, length)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), layer.shapes)
    x = jnp.ones((1, length, GROWTH.width))
    return lambda params, x: layer.apply(params, x, None), params, x
