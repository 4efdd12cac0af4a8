"""Configs: what is refused, and that the config files hold every value."""

import dataclasses
import json
from typing import Annotated

import pytest
from ml_collections import config_dict

from configs import shakespeare_char, tiny_lm
from train import config

MODEL, OPTIMIZER, TRAIN = "config.model: ", "config.optimizer: ", "config.train: "


def changed(**values):
    """The default config under changes such as `model__width=3`."""
    settings = tiny_lm.get_config()
    with settings.ignore_type():
        settings.update_from_flattened_dict(
            {name.replace("__", "."): value for name, value in values.items()}
        )
    return config.from_config_dict(settings, config.Config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model__num_heads": 3}, MODEL + "width must be a multiple of num_heads, got"),
        ({"model__num_kv_heads": 3}, MODEL + "num_heads must be a multiple of num_kv"),
        ({"model__num_heads": 128}, MODEL + "rotary positions need an even head width"),
        ({"model__num_heads": 0}, MODEL + "num_heads must be at least 1, got 0"),
        ({"model__window": 0}, MODEL + "window must be at least 1, got 0"),
        ({"model__num_kv_heads": 0}, MODEL + "num_kv_heads must be at least 1 or none"),
        ({"model__convolution": 0}, MODEL + "convolution must be at least 1 or none"),
        ({"model__scale": float("nan")}, MODEL + "scale must be at least 0 or none, "),
        ({"model__scale": float("inf")}, MODEL + "scale must be at least 0 or none, "),
        ({"model__dropout_rate": 1.0}, MODEL + r"dropout_rate must be in \[0, 1\), "),
        ({"model__positions": "x"}, "one of learned, sinusoidal, rotary, alibi, none"),
        ({"model__dtype": "int8"}, "one of float32, bfloat16, got 'int8'"),
        ({"model__implementation": "x"}, "one of auto, reference, .*, got 'x'"),
        ({"data__tokenizer": "words"}, "one of bytes, chars, got 'words'"),
        ({"optimizer__peak_lr": 1e-5}, OPTIMIZER + "min_lr must be at most peak_lr"),
        ({"optimizer__clip_norm": -1.0}, OPTIMIZER + "clip_norm must be positive or"),
        ({"optimizer__clip_norm": 0}, OPTIMIZER + "clip_norm must be positive or none"),
        ({"data__path": ""}, "config.data: path must be a file or none, got ''"),
        ({"optimizer__b1": 1.0}, OPTIMIZER + r"b1 must be in \[0, 1\), got 1.0"),
        ({"train__steps": -5}, TRAIN + "steps must be at least 1, got -5"),
        ({"train__accumulation": 0}, TRAIN + "accumulation must be at least 1, got 0"),
        ({"audit__steps": 0}, "config.audit: steps must be at least 1, got 0"),
        ({"seed": -1}, r"config: seed must be in \[0, 2\*\*32\), got -1"),
        ({"train__steps": 1.5}, "config.train.steps must be of type int, got 1.5 of"),
        ({"train__steps": True}, "config.train.steps must be of type int, got True of"),
        ({"train__steps": None}, "config.train.steps must be of type int, got None of"),
        ({"model__use_bias": 0}, "config.model.use_bias must be of type bool, got 0"),
        ({"data__path": 3}, "config.data.path must be of type str or none, got 3 of"),
        ({"train__stps": 3}, "config.train.stps is unknown; known: steps, batch_size,"),
        ({"audit": 3}, "config.audit must hold steps, .*, got 3"),
    ],
    ids=str,
)
def test_refused(values, message):
    with pytest.raises(ValueError, match=message) as refusal:
        changed(**values)
    assert "\n" not in str(refusal.value)


def test_sinusoidal_positions_need_an_even_width():
    odd = {"model__positions": "sinusoidal", "model__num_heads": 1, "model__width": 9}
    with pytest.raises(ValueError, match="sinusoidal positions need an even width"):
        changed(**odd)


def test_missing_fields_are_named():
    settings = tiny_lm.get_config()
    del settings.train.steps
    with pytest.raises(ValueError, match="config.train.steps is missing"):
        config.from_config_dict(settings, config.Config)


def test_an_int_is_a_float_where_one_belongs():
    rate = changed(optimizer__peak_lr=1).optimizer.peak_lr
    assert rate == 1.0
    assert type(rate) is float


def test_dataclasses_hold_no_default():
    for field in config.fields(config.Config):
        parent = config.Config
        *parents, name = field.path.split(".")
        for step in parents:
            parent = parent.__annotations__[step]
        (leaf,) = (leaf for leaf in dataclasses.fields(parent) if leaf.name == name)
        assert leaf.default is leaf.default_factory is dataclasses.MISSING
        assert field.type in (int, float, bool, str)
        assert field.help


def test_fields_are_the_leaves_in_order():
    @dataclasses.dataclass(frozen=True)
    class Inner:
        rate: Annotated[float | None, "how fast"]

    @dataclasses.dataclass(frozen=True)
    class Outer:
        name: Annotated[str, "of it"]
        inner: Inner

    assert list(config.fields(Outer)) == [
        ("name", str, False, "of it"),
        ("inner.rate", float, True, "how fast"),
    ]
    values = config_dict.ConfigDict({"name": "a", "inner": {"rate": 2}})
    assert config.from_config_dict(values, Outer) == Outer("a", Inner(2.0))
    values.inner = {"rate": None}
    assert config.from_config_dict(values, Outer) == Outer("a", Inner(None))
    values.name = None
    with pytest.raises(ValueError, match="config.name must be of type str, got None"):
        config.from_config_dict(values, Outer)


@pytest.mark.parametrize("scale", [None, 0.0, 0.1])
def test_json_round_trip(scale):
    settings = changed(model__scale=scale, seed=7)
    assert settings.model.scale == scale
    text = config.to_json(settings)
    assert f'"scale": {"null" if scale is None else scale}' in text
    assert (
        config.from_dict(json.loads(config.to_json(settings)), config.Config)
        == settings
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seed": 0', '"seed": "0"', "config.seed must be of type int, got '0'"),
        ('"scale": null', '"scale": true', "model.scale must be of type float or none"),
        ('"scale": null', '"scale": NaN', "config.model: scale must be at least 0 or"),
        ('"seed": 0', '"seed": null', "config.seed must be of type int, got None"),
        ("{", "", "Extra data"),
    ],
)
def test_edited_json_is_refused(old, new, message):
    text = config.to_json(changed()).replace(old, new, 1)
    with pytest.raises(ValueError, match=message):
        config.from_dict(json.loads(text), config.Config)


def test_shakespeare_char_is_the_default_model_by_characters():
    default, shakespeare = (
        config.from_config_dict(module.get_config(), config.Config)
        for module in (tiny_lm, shakespeare_char)
    )
    assert shakespeare == dataclasses.replace(
        default,
        data=dataclasses.replace(default.data, tokenizer="chars"),
        train=dataclasses.replace(default.train, steps=2000),
    )
