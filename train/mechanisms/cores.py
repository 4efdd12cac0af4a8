"""The cores of the table of mechanisms: each mechanism as a function of its values.

A core has no projections, gates or norms. Its queries, keys, decays and other inputs
are small constants.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import attention
from attention import (
    additive,
    linear,
    lowrank,
    mamba,
    masks,
    random_features,
    retention,
    rwkv,
    rwkv6,
)
from models import config as config_lib
from models import recurrent

OfValues = Callable[[Any], Array]

# The batch size and the number of positions on which properties are checked.
B, T = 2, 7
# Landmarks of Linformer.
LANDMARKS = 4
SMALL = config_lib.CausalLMConfig(
    num_layers=2,
    num_heads=2,
    num_kv_heads=None,
    width=16,
    mlp_width=32,
    context=T,
    positions="none",
    mixers="softmax",
    convolution=None,
    window=3,
    global_tokens=1,
    block_size=2,
    random_blocks=1,
    features=8,
    state_size=4,
    scale=None,
    use_bias=True,
    tie_embeddings=True,
    dropout_rate=0.0,
    dtype="float32",
    implementation="flash",
)
N, H = SMALL.num_heads, SMALL.head_width


class Core(NamedTuple):
    """A mechanism as a function of its values.

    Attributes:
      values: the values [B S ...] on which the core is checked.
      fn: the mechanism, a function of values.
      softmax: the function that is compared with softmax attention; None if the
        mechanism has no queries.
      visible: the mask of the softmax attention; None: every query sees every key.
      forms: further forms of the mechanism, by name, which must equal `loop`.
      loop: the mechanism computed one token after another; None if there is no loop.
    """

    values: np.ndarray
    fn: OfValues
    softmax: OfValues | None = None
    visible: masks.Mask | None = None
    forms: Mapping[str, OfValues] = types.MappingProxyType({})
    loop: OfValues | None = None


def normal(*shape: int, seed: int = 0) -> Any:
    """Draws normal float32 numbers with a fixed seed."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = (normal(B, T, N, H, seed=seed) for seed in range(3))
LOG_DECAY = -np.exp(normal(B, T, N, H, seed=3))


def softmax_core(visible: masks.Mask | None) -> Core:
    """Softmax attention under a mask, in blocks."""

    def fn(values: Any) -> Array:
        return attention.dot_product_attention(
            QUERY, KEY, values, mask=visible, implementation="flash"
        )

    return Core(VALUE, fn, softmax=fn, visible=visible)


def linear_core(
    feature_map: linear.FeatureMap = linear.elu_plus_one, *, is_causal: bool
) -> Core:
    """Linear attention."""

    def form(name: str, chunk: int | None = None) -> OfValues:
        return lambda values: linear.attention(
            QUERY,
            KEY,
            values,
            feature_map=feature_map,
            is_causal=is_causal,
            form=name,
            chunk=chunk,
        )

    chunked = form("chunked", 3 if is_causal else None)
    return Core(
        VALUE,
        chunked,
        softmax=chunked,
        visible=masks.causal() if is_causal else None,
        forms={"chunked": chunked, "quadratic": form("quadratic")},
        loop=form("recurrent"),
    )


def performer_core() -> Core:
    """Linear attention with random features."""
    projection = random_features.gaussian(jax.random.key(0), SMALL.features, H)
    return linear_core(random_features.positive(projection), is_causal=True)


def _forms(
    call: Callable[..., tuple[Any, Array]], names: tuple[str, ...], *, has_queries: bool
) -> Core:
    """Makes the core of a recurrence, `call(values, form=name) -> (state, outputs)`."""

    def form(name: str) -> OfValues:
        return lambda values: call(values, form=name)[1]

    fn = form(names[0])
    return Core(
        VALUE,
        fn,
        softmax=fn if has_queries else None,
        visible=masks.causal(),
        forms={name: form(name) for name in names},
        loop=form("recurrent"),
    )


def retention_core() -> Core:
    """Retention."""
    log_decay = retention.log_decays(N)

    def call(values: Any, *, form: str) -> tuple[Any, Array]:
        return retention.attention(QUERY, KEY, values, log_decay, form=form)

    return _forms(call, ("chunked", "quadratic"), has_queries=True)


def _flat(x: Any) -> Any:
    return x.reshape(*x.shape[:2], -1)


def rwkv_core() -> Core:
    """RWKV-4; its channels are reshaped to heads."""

    def call(values: Any, *, form: str) -> tuple[Any, Array]:
        flat = _flat(values)
        log_decay, bonus = LOG_DECAY[0, 0].reshape(-1), KEY[0, 0].reshape(-1)
        state, y = rwkv.wkv(_flat(KEY), flat, log_decay, bonus, form=form)
        return state, y.reshape(values.shape)

    return _forms(call, ("associative", "quadratic"), has_queries=False)


def rwkv6_core() -> Core:
    """RWKV-6."""

    def call(values: Any, *, form: str) -> tuple[Any, Array]:
        return rwkv6.wkv(QUERY, KEY, values, LOG_DECAY, KEY[0, 0], form=form)

    return _forms(call, ("chunked", "quadratic"), has_queries=True)


def mamba_core() -> Core:
    """Mamba's selective scan; its values are the inputs x."""

    def call(values: Any, *, form: str) -> tuple[Any, Array]:
        x = _flat(values)
        channels, states = x.shape[-1], SMALL.state_size
        state, y = mamba.selective_scan(
            x,
            np.exp(_flat(KEY)),
            -np.exp(normal(channels, states)),
            normal(B, T, states),
            normal(B, T, states, seed=1),
            normal(channels),
            form=form,
        )
        return state, y.reshape(values.shape)

    return _forms(call, ("chunked", "associative", "quadratic"), has_queries=False)


def gru_core() -> Core:
    """A GRU; its values are the input products W_r x, W_z x and W x."""
    M = SMALL.width
    kernels = recurrent.Kernels(*normal(3, M, M))

    def scan(x: Any) -> Array:
        return jax.vmap(lambda x: recurrent.scan(kernels, x, jnp.zeros(M))[0])(x)

    def loop(x: Any) -> Array:
        states = [jnp.zeros((B, M))]
        for i in range(T):
            step = functools.partial(recurrent.step, kernels)
            states.append(jax.vmap(step)(states[-1], x[:, i]))
        return jnp.stack(states[1:], axis=1)

    return Core(normal(B, T, 3, M), scan, forms={"scan": scan}, loop=loop)


def linformer_core() -> Core:
    """Linformer; with identity projections it must equal softmax attention."""

    def projected(keys: Any, values: Any) -> OfValues:
        return lambda x: lowrank.attention(QUERY, KEY, x, keys, values)

    itself = np.eye(T, dtype=np.float32)
    return Core(
        VALUE, projected(*normal(2, LANDMARKS, T)), softmax=projected(itself, itself)
    )


def additive_core() -> Core:
    """Additive attention; its loop is one query after another, in NumPy."""
    vector = normal(N, H, seed=4)

    def fn(values: Any) -> Array:
        return additive.attention(QUERY, KEY, values, vector)

    def loop(values: Any) -> Array:
        outputs = []
        for i in range(T):
            energy = np.tanh(QUERY[:, i : i + 1] + KEY)
            weights = np.exp(np.einsum("bsnh,nh->bsn", energy, vector))
            weights /= weights.sum(axis=1, keepdims=True)
            outputs.append(np.einsum("bsn,bsnd->bnd", weights, values))
        return jnp.asarray(np.stack(outputs, axis=1))

    return Core(VALUE, fn, softmax=fn, forms={"queries": fn}, loop=loop)
