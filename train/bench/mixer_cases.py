"""Primitives of mixers without their projections, as `mixers` measures them.

Every recurrent mixer of `models.mixers` takes part. One without a primitive here is
measured as a whole layer, its projections included, and is named so; the GRU, whose
recurrence is nothing without its projections, is left out.

Batch 1, float32, width 512: 8 heads of 64, or 512 channels (RWKV; Mamba, with 16
numbers of state in each). Gradients are taken of all arguments that differ between
tokens.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import attention
from attention import linear, mamba, random_features, retention, rwkv, rwkv6
from models import mixers
from train.mechanisms import cores

HEADS, WIDTH, CHANNELS, STATE, FEATURES = 8, 64, 512, 16, 64
FLASH = "flash"
LEFT_OUT = ("gru",)

_HEADS, _CHANNELS = (HEADS, WIDTH), (CHANNELS,)


class Contender(NamedTuple):
    """A primitive.

    Attributes:
      axes: axes of each argument after batch and length.
      f: maps these arguments to the outputs.
      claimed: whether it is claimed to be several times as fast as flash.
    """

    axes: tuple[tuple[int, ...], ...]
    f: Callable[..., Array]
    claimed: bool


def _flash(query: Array, key: Array, value: Array) -> Array:
    return attention.dot_product_attention(
        query, key, value, is_causal=True, implementation=FLASH
    )


def _performer(query: Array, key: Array, value: Array) -> Array:
    with jax.ensure_compile_time_eval():
        projection = random_features.gaussian(jax.random.key(0), FEATURES, WIDTH)
    return linear.attention(
        query,
        key,
        value,
        is_causal=True,
        feature_map=random_features.positive(projection),
    )


def _retention(query: Array, key: Array, value: Array) -> Array:
    return retention.attention(query, key, value, retention.log_decays(HEADS))[1]


def _rwkv(key: Array, value: Array) -> Array:
    log_decay = -jnp.exp(jnp.linspace(-5, 1, CHANNELS))
    return rwkv.wkv(key, value, log_decay, jnp.zeros(CHANNELS))[1]


def _rwkv6(receptance: Array, key: Array, value: Array, decay: Array) -> Array:
    return rwkv6.wkv(receptance, key, value, -jnp.exp(decay), jnp.zeros(_HEADS))[1]


def _mamba(x: Array, step_size: Array, B: Array, C: Array) -> Array:
    rates = jnp.broadcast_to(-jnp.arange(1.0, STATE + 1)[None], (CHANNELS, STATE))
    step_size = jax.nn.softplus(step_size)
    return mamba.selective_scan(x, step_size, rates, B, C, jnp.ones(CHANNELS))[1]


PRIMITIVES: Mapping[str, Contender] = types.MappingProxyType(
    {
        "linear": Contender(
            3 * (_HEADS,), functools.partial(linear.attention, is_causal=True), True
        ),
        "performer": Contender(3 * (_HEADS,), _performer, True),
        "retention": Contender(3 * (_HEADS,), _retention, False),
        "rwkv": Contender(2 * (_CHANNELS,), _rwkv, True),
        "rwkv6": Contender(4 * (_HEADS,), _rwkv6, False),
        "mamba": Contender((*2 * (_CHANNELS,), *2 * ((STATE,),)), _mamba, True),
    }
)


def whole_layer(name: str) -> Contender:
    """A mixer with its projections, of fixed random parameters.

    Args:
      name: key of `mixers.MIXERS`.
    """
    config = dataclasses.replace(
        cores.SMALL,
        num_heads=HEADS,
        width=HEADS * WIDTH,
        features=FEATURES,
        state_size=STATE,
    )

    def layer(x: Array) -> Any:
        module = mixers.MIXERS[name].make(config, 0)
        with jax.ensure_compile_time_eval():
            start = jnp.zeros((1, 1, config.width))
            variables = module.init(jax.random.key(0), start, deterministic=True)
        y: Any = module.apply(variables, x, deterministic=True)
        return y

    return Contender(((config.width,),), layer, False)


def _contenders(names: Iterable[str]) -> Iterator[tuple[str, Contender]]:
    for name in names:
        if name in PRIMITIVES:
            yield name, PRIMITIVES[name]
        elif name not in LEFT_OUT:
            yield f"{name} (whole layer)", whole_layer(name)


CONTENDERS: Mapping[str, Contender] = types.MappingProxyType(
    {
        **dict(_contenders(mixers.RECURRENT)),
        FLASH: Contender(3 * (_HEADS,), _flash, False),
    }
)


class Piece(NamedTuple):
    """A compiled program with its arguments: `run` returns when it is done."""

    run: Callable[[], Any]
    temporary_bytes: int | None


def piece(name: str, length: int, *, backward: bool) -> Piece:
    """Compiles a contender.

    Args:
      name: key of `CONTENDERS`.
      length: T.
      backward: whether the gradients of its arguments are computed too.

    Returns:
      The program with random arguments.
    """
    contender = CONTENDERS[name]
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.standard_normal((1, length, *axes), np.float32))
        for axes in contender.axes
    ]

    def energy(*arrays: Array) -> tuple[Array, Array]:
        output = contender.f(*arrays)
        return jnp.sum(output**2), output

    f: Callable[..., Any] = contender.f
    if backward:
        f = jax.grad(energy, argnums=range(len(arrays)), has_aux=True)
    compiled = jax.jit(f).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    return Piece(
        lambda: jax.block_until_ready(compiled(*arrays)),
        memory.temp_size_in_bytes if memory else None,
    )
