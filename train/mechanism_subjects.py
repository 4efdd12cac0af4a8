"""Every mechanism as the table of mechanisms takes it: a layer, and its core.

A layer maps x [B T E] to [B T E] and is told which tokens are real. Its core is the
mechanism itself, without projections, gates and norms: a function of the values, while
queries, keys, decays and the like stay what they are.
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
from models import mixers, recurrent

Config = config_lib.CausalLMConfig
OfValues = Callable[[Any], Array]

# Rows and positions that properties are shown on.
B, T = 2, 7
# Landmarks of Linformer.
LANDMARKS = 4
SMALL = Config(
    num_layers=2,
    num_heads=2,
    num_kv_heads=0,
    width=16,
    mlp_width=32,
    context=T,
    positions="none",
    mixers="softmax",
    convolution=0,
    window=3,
    globals=1,
    block=2,
    random=1,
    features=8,
    state=4,
    scale=0.0,
    use_bias=True,
    tie_embeddings=True,
    dropout_rate=0.0,
    dtype="float32",
    implementation="flash",
)
N, H = SMALL.num_heads, SMALL.head_width


class Layer(NamedTuple):
    """A mechanism between projections.

    Attributes:
      shapes: of its parameters.
      apply: (parameters, x [B T E], token_mask [B T] or None) to [B T E].
      stream: its module, with a state in the 'cache' collection; None: it has none.
    """

    shapes: Any
    apply: Callable[[Any, Array, Array | None], Array]
    stream: Any = None


class Core(NamedTuple):
    """A mechanism as a function of its values.

    Attributes:
      values: [B S ...].
      fn: the mechanism.
      softmax: what ought to be softmax attention to these values; None: without queries
        the question makes no sense.
      visible: what a query sees, for softmax.
      forms: other forms, by name; empty: there are none.
      loop: one token after another.
    """

    values: np.ndarray
    fn: OfValues
    softmax: OfValues | None = None
    visible: masks.Mask | None = None
    forms: Mapping[str, OfValues] = types.MappingProxyType({})
    loop: OfValues | None = None


class Subject(NamedTuple):
    """Layer, given sizes and the number of positions; and core, if there is one."""

    layer: Callable[[Config, int], Layer]
    core: Callable[[], Core] | None


def normal(*shape: int, seed: int = 0) -> Any:
    """Fixed normal numbers, float32 of NumPy."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = (normal(B, T, N, H, seed=seed) for seed in range(3))
LOG_DECAY = -np.exp(normal(B, T, N, H, seed=3))


def _mixer(name: str) -> Callable[[Config, int], Layer]:
    """A row of `models.mixers`, in its second layer."""

    def layer(config: Config, length: int) -> Layer:
        module = mixers.MIXERS[name].make(config, 1)
        x = jax.ShapeDtypeStruct((1, length, config.width), jnp.float32)
        init = functools.partial(module.init, deterministic=True)

        def apply(params: Any, x: Array, token_mask: Array | None) -> Array:
            found: Any = module.apply(
                params, x, deterministic=True, token_mask=token_mask
            )
            return found

        return Layer(
            jax.eval_shape(init, jax.random.key(0), x),
            apply,
            module.clone(decode=True) if name in config_lib.RECURRENT else None,
        )

    return layer


def _unprojected(
    fn: Callable[[Any, Any, Any, Any], Array],
    shapes: Callable[[Config, int], Any] = lambda config, length: {},
) -> Callable[[Config, int], Layer]:
    """A layer whose queries, keys and values are x, cut into heads."""

    def layer(config: Config, length: int) -> Layer:
        def apply(params: Any, x: Array, token_mask: Array | None) -> Array:
            heads = x.reshape(*x.shape[:2], config.num_heads, config.head_width)
            return fn(params, heads, heads, token_mask).reshape(x.shape)

        return Layer(shapes(config, length), apply)

    return layer


def _attention(name: str) -> Subject:
    """Softmax attention under the mask of a mixer."""

    def core() -> Core:
        visible = mixers.MIXERS[name].mask(SMALL, 1)

        def fn(values: Any) -> Array:
            return attention.dot_product_attention(
                QUERY, KEY, values, mask=visible, implementation="flash"
            )

        return Core(VALUE, fn, softmax=fn, visible=visible)

    return Subject(_mixer(name), core)


def _softmax_both_ways() -> Subject:
    def fn(values: Any) -> Array:
        return attention.dot_product_attention(
            QUERY, KEY, values, implementation="flash"
        )

    def attend(params: Any, x: Array, values: Array, real: Array | None) -> Array:
        del params
        mask = None if real is None else real[:, None, None]
        return attention.dot_product_attention(
            x, x, values, mask=mask, implementation="flash"
        )

    return Subject(_unprojected(attend), lambda: Core(VALUE, fn, softmax=fn))


def _linear_core(
    feature_map: linear.FeatureMap = linear.elu_plus_one, *, is_causal: bool
) -> Core:
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


def _performer_core() -> Core:
    projection = random_features.gaussian(jax.random.key(0), SMALL.features, H)
    return _linear_core(random_features.positive(projection), is_causal=True)


def _linear_both_ways() -> Subject:
    def attend(params: Any, x: Array, values: Array, real: Array | None) -> Array:
        del params
        return linear.attention(x, x, values, key_mask=real)

    return Subject(
        _unprojected(attend), functools.partial(_linear_core, is_causal=False)
    )


def _forms(
    call: Callable[..., tuple[Any, Array]], names: tuple[str, ...], *, has_queries: bool
) -> Core:
    """A recurrence whose forms go by name; `call` maps values and a form."""

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


def _retention_core() -> Core:
    log_decay = retention.log_decays(N)

    def call(values: Any, *, form: str) -> tuple[Any, Array]:
        return retention.attention(QUERY, KEY, values, log_decay, form=form)

    return _forms(call, ("chunked", "quadratic"), has_queries=True)


def _flat(x: Any) -> Any:
    return x.reshape(*x.shape[:2], -1)


def _rwkv_core() -> Core:
    def call(values: Any, *, form: str) -> tuple[Any, Array]:
        flat = _flat(values)
        log_decay, bonus = LOG_DECAY[0, 0].reshape(-1), KEY[0, 0].reshape(-1)
        state, y = rwkv.wkv(_flat(KEY), flat, log_decay, bonus, form=form)
        return state, y.reshape(values.shape)

    return _forms(call, ("associative", "quadratic"), has_queries=False)


def _rwkv6_core() -> Core:
    def call(values: Any, *, form: str) -> tuple[Any, Array]:
        return rwkv6.wkv(QUERY, KEY, values, LOG_DECAY, KEY[0, 0], form=form)

    return _forms(call, ("chunked", "quadratic"), has_queries=True)


def _mamba_core() -> Core:
    def call(values: Any, *, form: str) -> tuple[Any, Array]:
        x = _flat(values)
        channels, states = x.shape[-1], SMALL.state
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


def _gru_core() -> Core:
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


def _linformer() -> Subject:
    def projected(keys: Any, values: Any) -> OfValues:
        return lambda x: lowrank.attention(QUERY, KEY, x, keys, values)

    def core() -> Core:
        itself = np.eye(T, dtype=np.float32)
        return Core(
            VALUE,
            projected(*normal(2, LANDMARKS, T)),
            softmax=projected(itself, itself),
        )

    def shapes(config: Config, length: int) -> Any:
        del config
        one = jax.ShapeDtypeStruct((LANDMARKS, length), jnp.float32)
        return {"key": one, "value": one}

    def attend(params: Any, x: Array, values: Array, real: Array | None) -> Array:
        # As the paper does with shorter inputs: the first columns.
        keys, mixtures = (params[name][:, : x.shape[1]] for name in ("key", "value"))
        return lowrank.attention(x, x, values, keys, mixtures, key_mask=real)

    return Subject(_unprojected(attend, shapes), core)


def _additive() -> Subject:
    vector = normal(N, H, seed=4)

    def fn(values: Any) -> Array:
        return additive.attention(QUERY, KEY, values, vector)

    def loop(values: Any) -> Array:
        """Every query by itself, in NumPy."""
        outputs = []
        for i in range(T):
            energy = np.tanh(QUERY[:, i : i + 1] + KEY)
            weights = np.exp(np.einsum("bsnh,nh->bsn", energy, vector))
            weights /= weights.sum(axis=1, keepdims=True)
            outputs.append(np.einsum("bsn,bsnd->bnd", weights, values))
        return jnp.asarray(np.stack(outputs, axis=1))

    def shapes(config: Config, length: int) -> Any:
        del length
        heads = config.num_heads, config.head_width
        return {"score": jax.ShapeDtypeStruct(heads, jnp.float32)}

    def attend(params: Any, x: Array, values: Array, real: Array | None) -> Array:
        return additive.attention(x, x, values, params["score"], key_mask=real)

    core = Core(VALUE, fn, softmax=fn, forms={"queries": fn}, loop=loop)
    return Subject(_unprojected(attend, shapes), lambda: core)


SUBJECTS: Mapping[str, Subject] = types.MappingProxyType(
    {
        **{name: _attention(name) for name in config_lib.ATTENTION},
        "linear": Subject(
            _mixer("linear"), functools.partial(_linear_core, is_causal=True)
        ),
        "performer": Subject(_mixer("performer"), _performer_core),
        "retention": Subject(_mixer("retention"), _retention_core),
        "rwkv": Subject(_mixer("rwkv"), _rwkv_core),
        "rwkv6": Subject(_mixer("rwkv6"), _rwkv6_core),
        "mamba": Subject(_mixer("mamba"), _mamba_core),
        "gru": Subject(_mixer("gru"), _gru_core),
        "zero": Subject(_mixer("zero"), None),
        "softmax, both ways": _softmax_both_ways(),
        "linear, both ways": _linear_both_ways(),
        "linformer": _linformer(),
        "additive": _additive(),
    }
)
