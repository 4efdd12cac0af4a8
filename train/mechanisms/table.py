"""The table of mechanisms: for each its declared properties, its layer and its core.

Every mixer of `models.mixers` has a row. A mixer that is not named here is declared to
have the properties of all mixers of its kind; `_CORES` adds the properties of cores.

A layer maps x [B T E] to [B T E], and takes a mask of the real tokens. A core is the
mechanism without projections, as a function of its values.
"""

import functools
import types
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

import attention
from attention import additive, linear, lowrank
from models import config as config_lib
from models import mixers
from train.mechanisms import cores

Config = config_lib.CausalLMConfig


class Layer(NamedTuple):
    """A mechanism as a layer.

    Attributes:
      shapes: shapes and dtypes of the layer's parameters.
      apply: a function (parameters, x [B T E], token_mask [B T] or None) -> [B T E].
      stream: the layer's module with a state in the 'cache' collection; None if the
        layer has no such state.
    """

    shapes: Any
    apply: Callable[[Any, Array, Array | None], Array]
    stream: Any = None


class Subject(NamedTuple):
    """A row of the table of mechanisms.

    Attributes:
      holds: names of the properties, out of `properties.PROPERTIES`, that the mechanism
        has.
      must_fail: names of the properties that the mechanism must violate. The remaining
        properties do not apply to it.
      layer: makes the layer from its sizes and the number of positions.
      core: makes the core; None if the mechanism has none.
    """

    holds: Set[str]
    must_fail: Set[str]
    layer: Callable[[Config, int], Layer]
    core: Callable[[], cores.Core] | None


class Known(NamedTuple):
    """The core of a recurrent mixer, and the properties that the core adds.

    Attributes:
      core: makes the core; None if the mixer has none.
      holds: names of the properties that the mixer has in addition to those of all
        recurrent mixers.
      must_fail: names of the properties that the mixer must violate in addition to
        those of all recurrent mixers.
    """

    core: Callable[[], cores.Core] | None
    holds: Set[str] = frozenset()
    must_fail: Set[str] = frozenset()


def _mixer(name: str) -> Callable[[Config, int], Layer]:
    """Makes the layer of a row of `models.mixers`, with layer index 1."""

    def layer(config: Config, length: int) -> Layer:
        module = mixers.MIXERS[name].make(config, 1)
        x = jax.ShapeDtypeStruct((1, length, config.width), jnp.float32)
        init = functools.partial(module.init, deterministic=True)

        def apply(params: Any, x: Array, token_mask: Array | None) -> Array:
            output: Any = module.apply(
                params, x, deterministic=True, token_mask=token_mask
            )
            return output

        return Layer(
            jax.eval_shape(init, jax.random.key(0), x),
            apply,
            module.clone(decode=True) if mixers.MIXERS[name].is_recurrent else None,
        )

    return layer


def _unprojected(
    fn: Callable[[Any, Any, Any, Any], Array],
    shapes: Callable[[Config, int], Any] = lambda config, length: {},
) -> Callable[[Config, int], Layer]:
    """Makes a layer whose queries, keys and values are x, split into heads."""

    def layer(config: Config, length: int) -> Layer:
        def apply(params: Any, x: Array, token_mask: Array | None) -> Array:
            heads = x.reshape(*x.shape[:2], config.num_heads, config.head_width)
            return fn(params, heads, heads, token_mask).reshape(x.shape)

        return Layer(shapes(config, length), apply)

    return layer


def _attention(name: str) -> Subject:
    def core() -> cores.Core:
        return cores.softmax_core(mixers.MIXERS[name].mask(cores.SMALL, 1))

    return Subject(
        holds={"causal", "padding", "batch", "hull", "softmax"},
        must_fail={"permutation"},
        layer=_mixer(name),
        core=core,
    )


def _recurrent(name: str) -> Subject:
    known = _CORES.get(name, Known(core=None))
    return Subject(
        holds={"causal", "padding", "batch", "streaming", *known.holds},
        must_fail={"permutation", *known.must_fail},
        layer=_mixer(name),
        core=known.core,
    )


def _zero(name: str) -> Subject:
    return Subject(
        holds={"causal", "padding", "batch", "permutation"},
        must_fail=set(),
        layer=_mixer(name),
        core=None,
    )


def _of_mixer(name: str) -> Subject:
    """Makes the row of a mixer from the properties of its kind and of its core."""
    if mixers.MIXERS[name].is_attention:
        return _attention(name)
    if mixers.MIXERS[name].is_recurrent:
        return _recurrent(name)
    return _zero(name)


def _softmax_both_ways(params: Any, x: Array, y: Array, real: Array | None) -> Array:
    del params
    mask = None if real is None else real[:, None, None]
    return attention.dot_product_attention(x, x, y, mask=mask, implementation="flash")


def _linear_both_ways(params: Any, x: Array, y: Array, real: Array | None) -> Array:
    del params
    return linear.attention(x, x, y, token_mask=real)


def _linformer(params: Any, x: Array, y: Array, real: Array | None) -> Array:
    # For inputs shorter than the projections the paper uses their first columns.
    keys, values = (params[name][:, : x.shape[1]] for name in ("key", "value"))
    return lowrank.attention(x, x, y, keys, values, token_mask=real)


def _additive(params: Any, x: Array, y: Array, real: Array | None) -> Array:
    return additive.attention(x, x, y, params["score"], token_mask=real)


def _linformer_shapes(config: Config, length: int) -> Any:
    del config
    one = jax.ShapeDtypeStruct((cores.LANDMARKS, length), jnp.float32)
    return {"key": one, "value": one}


def _additive_shapes(config: Config, length: int) -> Any:
    del length
    heads = config.num_heads, config.head_width
    return {"score": jax.ShapeDtypeStruct(heads, jnp.float32)}


# The cores of recurrent mixers, and the properties that not all of them share.
_CORES: Mapping[str, Known] = types.MappingProxyType(
    {
        "linear": Known(
            functools.partial(cores.linear_core, is_causal=True),
            holds={"hull", "loop"},
            must_fail={"softmax"},
        ),
        "performer": Known(
            cores.performer_core, holds={"hull", "loop"}, must_fail={"softmax"}
        ),
        "retention": Known(
            cores.retention_core, holds={"loop"}, must_fail={"hull", "softmax"}
        ),
        "rwkv": Known(cores.rwkv_core, holds={"hull", "loop"}),
        "rwkv6": Known(cores.rwkv6_core, holds={"loop"}, must_fail={"hull", "softmax"}),
        "mamba": Known(cores.mamba_core, holds={"loop"}, must_fail={"hull"}),
        "gru": Known(cores.gru_core, holds={"loop"}),
    }
)

SUBJECTS: Mapping[str, Subject] = types.MappingProxyType(
    {
        **{name: _of_mixer(name) for name in mixers.MIXERS},
        "softmax, both ways": Subject(
            holds={"padding", "batch", "permutation", "hull", "softmax"},
            must_fail={"causal"},
            layer=_unprojected(_softmax_both_ways),
            core=functools.partial(cores.softmax_core, None),
        ),
        "linear, both ways": Subject(
            holds={"padding", "batch", "permutation", "hull", "loop"},
            must_fail={"causal", "softmax"},
            layer=_unprojected(_linear_both_ways),
            core=functools.partial(cores.linear_core, is_causal=False),
        ),
        "linformer": Subject(
            holds={"padding", "batch", "softmax"},
            must_fail={"causal", "permutation", "hull"},
            layer=_unprojected(_linformer, _linformer_shapes),
            core=cores.linformer_core,
        ),
        "additive": Subject(
            holds={"padding", "batch", "permutation", "hull", "loop"},
            must_fail={"causal", "softmax"},
            layer=_unprojected(_additive, _additive_shapes),
            core=cores.additive_core,
        ),
    }
)
