"""Published checkpoints, as modules and parameters of this house.

A checkpoint is a folder with `config.json` and `model.safetensors`, as on the Hugging
Face hub. What is special to an architecture stands in a table: what its settings mean,
and which tensor belongs where. PyTorch keeps the matrix of a layer as [out in], flax as
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
class Place:
    """Where a tensor belongs, or one of every layer.

    Attributes:
      name: of the tensor in the checkpoint; {i} stands for the number of the layer.
      path: of the parameter, the like.
      change: of the array.
    """

    name: str
    path: str
    change: Callable[[Array], Array] = jnp.asarray


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How to read one `model_type`.

    Attributes:
      module: `module(config, decode=...)`, from what config.json says.
      places: of all tensors.
      output: name of the output layer's tensor, which checkpoints that tie it to the
        embedding may repeat.
      embedding: name of the embedding's.
    """

    module: Callable[..., nn.Module]
    places: tuple[Place, ...]
    output: str
    embedding: str


def load(path: str | pathlib.Path, *, decode: bool = False) -> tuple[nn.Module, Any]:
    """Reads a checkpoint.

    Args:
      path: a folder with `config.json` and `model.safetensors`.
      decode: whether the module keeps its state in the 'cache' collection.

    Returns:
      The module, and its parameters in float32, such that
      `module.apply({"params": parameters}, tokens)` gives logits.

    Raises:
      FileNotFoundError: if one of the two files is not there.
      ValueError: if the `model_type` or a setting is not supported or missing; if
        tensors are missing or find no use, all of them named; if one does not fit.
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
    places = _places(architecture, num_layers, shapes)
    if architecture.output not in places:
        _drop_copy(tensors, architecture)
    return module, _parameters(places, shapes, tensors)


def _drop_copy(tensors: dict[str, Array], architecture: Architecture) -> None:
    """Drops an output layer that says what the embedding says already."""
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


def _places(
    architecture: Architecture, num_layers: int, shapes: Mapping[str, Any]
) -> dict[str, Place]:
    """The tensors that the module asks for, by name."""
    places = [
        Place(place.name.format(i=i), place.path.format(i=i), place.change)
        for place in architecture.places
        for i in range(num_layers if "{i}" in place.path else 1)
    ]
    return {place.name: place for place in places if place.path in shapes}


def _parameters(
    places: Mapping[str, Place],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Array],
) -> Any:
    """The tree of parameters."""
    missing, unused = sorted(places.keys() - tensors), sorted(tensors.keys() - places)
    if missing or unused:
        raise ValueError(
            f"the checkpoint does not fit its config.json: missing tensors {missing}, "
            f"unused tensors {unused}"
        )
    parameters = {}
    for name, place in places.items():
        x = place.change(tensors[name]).astype(jnp.float32)
        if x.shape != shapes[place.path]:
            raise ValueError(
                f"{name} must become {list(shapes[place.path])}, got {list(x.shape)} "
                f"from {list(tensors[name].shape)}"
            )
        parameters[place.path] = x
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
    # `rescale_every` halves the stream now and then, for float16: nothing else changes.
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


def _of_convolution(x: Array) -> Array:
    """[E 1 W] to [W E]."""
    return x[:, 0].T


def _flat(x: Array) -> Array:
    """[1 1 E] to [E]."""
    return x.reshape(-1)


def _norm(name: str, path: str) -> tuple[Place, Place]:
    return (
        Place(f"{name}.weight", f"{path}/scale"),
        Place(f"{name}.bias", f"{path}/bias"),
    )


def _mamba_places() -> tuple[Place, ...]:
    layer, mixer = "backbone.layers.{i}", "backbone.layers.{i}.mixer"
    projections = ("in_proj", "x_proj", "dt_proj", "out_proj")
    return (
        Place("backbone.embeddings.weight", "token_embedding/embedding"),
        Place(f"{layer}.norm.weight", "norm_{i}/scale"),
        *(
            Place(f"{mixer}.{name}.weight", f"mixer_{{i}}/{name}/kernel", _transposed)
            for name in projections
        ),
        *(
            Place(f"{mixer}.{name}.bias", f"mixer_{{i}}/{name}/bias")
            for name in projections
        ),
        Place(f"{mixer}.conv1d.weight", "mixer_{i}/conv_kernel", _of_convolution),
        Place(f"{mixer}.conv1d.bias", "mixer_{i}/conv_bias"),
        Place(f"{mixer}.A_log", "mixer_{i}/A_log"),
        Place(f"{mixer}.D", "mixer_{i}/D"),
        Place("backbone.norm_f.weight", "final_norm/scale"),
        Place("lm_head.weight", "unembedding/embedding"),
    )


def _rwkv_places() -> tuple[Place, ...]:
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
        Place("rwkv.embeddings.weight", "token_embedding/embedding"),
        *_norm("rwkv.blocks.0.pre_ln", "first_norm"),
        *_norm(f"{block}.ln1", "time_norm_{i}"),
        *_norm(f"{block}.ln2", "channel_norm_{i}"),
        *_norm("rwkv.ln_out", "final_norm"),
        *(
            Place(f"{part}.{name}.weight", f"{ours}_{{i}}/{name}/kernel", _transposed)
            for part, ours, names in matrices
            for name in names
        ),
        *(
            Place(f"{part}.time_mix_{name}", f"{ours}_{{i}}/mix_{name}/weight", _flat)
            for part, ours, names in mixes
            for name in names
        ),
        Place(f"{time}.time_decay", "time_mixing_{i}/decay"),
        Place(f"{time}.time_first", "time_mixing_{i}/bonus"),
        Place("head.weight", "unembedding/embedding"),
    )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "mamba": Architecture(
            module=_mamba,
            places=_mamba_places(),
            output="lm_head.weight",
            embedding="backbone.embeddings.weight",
        ),
        "rwkv": Architecture(
            module=_rwkv,
            places=_rwkv_places(),
            output="head.weight",
            embedding="rwkv.embeddings.weight",
        ),
    }
)
