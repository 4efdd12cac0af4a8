"""Loads published checkpoints into the modules of `models`.

A checkpoint is a folder in the format of the Hugging Face hub, with the files
`config.json` and `model.safetensors`. The table `ARCHITECTURES` has one entry for each
supported `model_type`: how to build the module from the settings, and which tensor
becomes which parameter. PyTorch stores the matrix of a layer as [out in], flax as
[in out].
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import safetensors.flax
from flax import linen as nn
from flax import traverse_util
from jaxtyping import Array

from models import mamba, rwkv

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Weight:
    """Which parameter a tensor of a checkpoint becomes, in one or in every layer.

    Attributes:
      name: name of the tensor in the checkpoint; {i} is the index of the layer.
      path: path of the parameter in the module; {i} is the index of the layer.
      convert: converts the tensor to the parameter's shape.
    """

    name: str
    path: str
    convert: Callable[[Array], Array] = jnp.asarray


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How to load the checkpoints of one `model_type`.

    Attributes:
      module: `module(config, decode=...)` builds the module from config.json.
      weights: the mapping from tensors to parameters.
      output: name of the output layer's tensor. A checkpoint whose output layer is tied
        to the embedding may contain it as a copy of the embedding.
      embedding: name of the embedding's tensor.
    """

    module: Callable[..., nn.Module]
    weights: tuple[Weight, ...]
    output: str
    embedding: str


def load(path: str | pathlib.Path, *, decode: bool = False) -> tuple[nn.Module, Any]:
    """Loads a checkpoint.

    Args:
      path: a folder with `config.json` and `model.safetensors`.
      decode: whether the module keeps its state in the 'cache' collection.

    Returns:
      The module, and its parameters in float32, such that
      `module.apply({"params": parameters}, tokens)` returns logits.

    Raises:
      FileNotFoundError: if one of the two files does not exist.
      ValueError: if the `model_type` or a setting is missing or not supported; if
        tensors are missing or unused, with the names of all of them; or if a tensor
        does not have the parameter's shape.
    """
    folder = pathlib.Path(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type must be one of {', '.join(ARCHITECTURES)}, got {model_type!r}"
        )
    architecture = ARCHITECTURES[model_type]
    try:
        module = architecture.module(config, decode=decode)
        num_layers = config["num_hidden_layers"]
    except KeyError as error:
        raise ValueError(f"config.json has no {error}") from None
    tensors = safetensors.flax.load_file(folder / "model.safetensors")
    shapes = _shapes(module)
    weights = _weights(architecture, num_layers, shapes)
    if architecture.output not in weights:
        _drop_copy(tensors, architecture)
    return module, _parameters(weights, shapes, tensors)


def _drop_copy(tensors: dict[str, Array], architecture: Architecture) -> None:
    """Drops the tensor of the output layer if it is a copy of the embedding."""
    copy = tensors.get(architecture.output)
    original = tensors.get(architecture.embedding)
    if copy is not None and original is not None and jnp.array_equal(copy, original):
        del tensors[architecture.output]


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by its path."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    variables = jax.eval_shape(module.init, jax.random.key(0), tokens)
    flat = traverse_util.flatten_dict(variables["params"], sep="/")
    return {path: x.shape for path, x in flat.items()}


def _weights(
    architecture: Architecture, num_layers: int, shapes: Mapping[str, Any]
) -> dict[str, Weight]:
    """The entries for the module's parameters, by name of the tensor."""
    weights = [
        Weight(weight.name.format(i=i), weight.path.format(i=i), weight.convert)
        for weight in architecture.weights
        for i in range(num_layers if "{i}" in weight.path else 1)
    ]
    return {weight.name: weight for weight in weights if weight.path in shapes}


def _parameters(
    weights: Mapping[str, Weight],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Array],
) -> Any:
    """Converts the tensors to the module's tree of parameters."""
    missing, unused = sorted(weights.keys() - tensors), sorted(tensors.keys() - weights)
    if missing or unused:
        raise ValueError(
            f"the checkpoint does not fit its config.json: missing tensors {missing}, "
            f"unused tensors {unused}"
        )
    parameters = {}
    for name, weight in weights.items():
        x = weight.convert(tensors[name]).astype(jnp.float32)
        if x.shape != shapes[weight.path]:
            raise ValueError(
                f"{name} must become {list(shapes[weight.path])}, got {list(x.shape)} "
                f"from {list(tensors[name].shape)}"
            )
        parameters[weight.path] = x
    return traverse_util.unflatten_dict(parameters, sep="/")


def _mamba(config: Config, *, decode: bool) -> mamba.MambaLM:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {activation!r}")
    rank = config["time_step_rank"]
    return mamba.MambaLM(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        state_size=config["state_size"],
        expand=config["expand"],
        conv_width=config["conv_kernel"],
        step_rank=None if rank == "auto" else rank,
        use_bias=config["use_bias"],
        use_conv_bias=config["use_conv_bias"],
        norm_epsilon=config["layer_norm_epsilon"],
        tie_embeddings=config.get("tie_word_embeddings", True),
        decode=decode,
    )


def _rwkv(config: Config, *, decode: bool) -> rwkv.RWKVLM:
    # The setting `rescale_every` halves the residual stream every few layers to keep
    # float16 from overflowing. It does not change the logits, and is ignored here.
    return rwkv.RWKVLM(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        channels=config["attention_hidden_size"],
        mlp_width=config["intermediate_size"],
        norm_epsilon=config["layer_norm_epsilon"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        decode=decode,
    )


def _transposed(x: Array) -> Array:
    return x.T


def _convolution(x: Array) -> Array:
    """Converts PyTorch's [E 1 W] to [W E]."""
    return x[:, 0].T


def _flat(x: Array) -> Array:
    """Converts [1 1 E] to [E]."""
    return x.reshape(-1)


def _norm(name: str, path: str) -> tuple[Weight, Weight]:
    return (
        Weight(f"{name}.weight", f"{path}/scale"),
        Weight(f"{name}.bias", f"{path}/bias"),
    )


def _mamba_weights() -> tuple[Weight, ...]:
    layer, mixer = "backbone.layers.{i}", "backbone.layers.{i}.mixer"
    projections = ("in_proj", "x_proj", "dt_proj", "out_proj")
    return (
        Weight("backbone.embeddings.weight", "token_embedding/embedding"),
        Weight(f"{layer}.norm.weight", "norm_{i}/scale"),
        *(
            Weight(f"{mixer}.{name}.weight", f"mixer_{{i}}/{name}/kernel", _transposed)
            for name in projections
        ),
        *(
            Weight(f"{mixer}.{name}.bias", f"mixer_{{i}}/{name}/bias")
            for name in projections
        ),
        Weight(f"{mixer}.conv1d.weight", "mixer_{i}/conv_kernel", _convolution),
        Weight(f"{mixer}.conv1d.bias", "mixer_{i}/conv_bias"),
        Weight(f"{mixer}.A_log", "mixer_{i}/A_log"),
        Weight(f"{mixer}.D", "mixer_{i}/D"),
        Weight("backbone.norm_f.weight", "final_norm/scale"),
        Weight("lm_head.weight", "unembedding/embedding"),
    )


def _rwkv_weights() -> tuple[Weight, ...]:
    block = "rwkv.blocks.{i}"
    time, channel = f"{block}.attention", f"{block}.feed_forward"
    matrices = (
        (time, "time_mixing", ("receptance", "key", "value", "output")),
        (channel, "channel_mixing", ("receptance", "key", "value")),
    )
    mixes = (
        (time, "time_mixing", ("receptance", "key", "value")),
        (channel, "channel_mixing", ("receptance", "key")),
    )
    return (
        Weight("rwkv.embeddings.weight", "token_embedding/embedding"),
        *_norm("rwkv.blocks.0.pre_ln", "first_norm"),
        *_norm(f"{block}.ln1", "time_norm_{i}"),
        *_norm(f"{block}.ln2", "channel_norm_{i}"),
        *_norm("rwkv.ln_out", "final_norm"),
        *(
            Weight(f"{part}.{name}.weight", f"{ours}_{{i}}/{name}/kernel", _transposed)
            for part, ours, names in matrices
            for name in names
        ),
        *(
            Weight(f"{part}.time_mix_{name}", f"{ours}_{{i}}/mix_{name}/weight", _flat)
            for part, ours, names in mixes
            for name in names
        ),
        Weight(f"{time}.time_decay", "time_mixing_{i}/decay"),
        Weight(f"{time}.time_first", "time_mixing_{i}/bonus"),
        Weight("head.weight", "unembedding/embedding"),
    )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "mamba": Architecture(
            module=_mamba,
            weights=_mamba_weights(),
            output="lm_head.weight",
            embedding="backbone.embeddings.weight",
        ),
        "rwkv": Architecture(
            module=_rwkv,
            weights=_rwkv_weights(),
            output="head.weight",
            embedding="rwkv.embeddings.weight",
        ),
    }
)
