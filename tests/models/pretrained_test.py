"""Published checkpoints: PyTorch's logits, and what does not fit is named."""

import json
import pathlib

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy

from models import pretrained
from tests.support import files, recurrences

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "pretrained"
NAMES = list(pretrained.ARCHITECTURES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_pytorch(name):
    """In one pass, token by token, and after a prefill of some."""
    expected = files.arrays(GOLDEN / name / "expected.npz")
    tokens, wanted = np.int32(expected["input_ids"]), expected["logits"]
    module, params = pretrained.load(GOLDEN / name)
    found = jax.jit(module.apply)({"params": params}, tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-4)

    decoding, params = pretrained.load(GOLDEN / name, decode=True)
    run = recurrences.decoding(decoding, {"params": params})
    for first in (1, 5):
        cache, logits = run([tokens[:, :first]], None)
        np.testing.assert_allclose(logits, wanted[:, :first], atol=1e-4)
        for t in range(first, tokens.shape[1]):
            cache, logits = run([tokens[:, t : t + 1]], cache)
            np.testing.assert_allclose(logits[:, 0], wanted[:, t], atol=1e-4)


def changed(folder, name, *, config=(), tensors=lambda tensors: tensors):
    """A copy of a checkpoint with other settings and tensors."""
    given = json.loads((GOLDEN / name / "config.json").read_text())
    settings = {k: v for k, v in {**given, **dict(config)}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    weights = safetensors.numpy.load_file(GOLDEN / name / "model.safetensors")
    safetensors.numpy.save_file(tensors(weights), folder / "model.safetensors")
    return folder


def test_unknown_architectures_are_refused(tmp_path):
    changed(tmp_path, "rwkv", config={"model_type": "bloom"})
    with pytest.raises(ValueError, match="one of mamba, rwkv, got 'bloom'"):
        pretrained.load(tmp_path)


def test_settings_without_support_are_refused(tmp_path):
    changed(tmp_path, "mamba", config={"hidden_act": "gelu"})
    with pytest.raises(ValueError, match="hidden_act must be 'silu', got 'gelu'"):
        pretrained.load(tmp_path)


def test_a_missing_setting_is_named(tmp_path):
    changed(tmp_path, "mamba", config={"state_size": None})
    with pytest.raises(ValueError, match="config.json has no 'state_size'"):
        pretrained.load(tmp_path)


def test_missing_and_unused_tensors_are_named(tmp_path):
    def tensors(given):
        given["rwkv.blocks.1.attention.speed"] = given.pop(
            "rwkv.blocks.1.attention.time_decay"
        )
        return given

    changed(tmp_path, "rwkv", tensors=tensors)
    with pytest.raises(
        ValueError,
        match=r"missing tensors \['rwkv.blocks.1.attention.time_decay'\], "
        r"unused tensors \['rwkv.blocks.1.attention.speed'\]",
    ):
        pretrained.load(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    name = "backbone.layers.1.mixer.conv1d.weight"
    changed(
        tmp_path, "mamba", tensors=lambda given: {**given, name: given[name][..., :2]}
    )
    with pytest.raises(ValueError, match=r"conv1d.weight must become \[4, 48\], got"):
        pretrained.load(tmp_path)


def test_a_tied_output_layer_may_be_repeated_and_not_differ(tmp_path):
    def repeated(given, *, factor):
        copy = factor * given["backbone.embeddings.weight"]
        return {**given, "lm_head.weight": copy}

    changed(tmp_path, "mamba", tensors=lambda given: repeated(given, factor=1))
    _, found = pretrained.load(tmp_path)
    _, wanted = pretrained.load(GOLDEN / "mamba")
    chex.assert_trees_all_equal(found, wanted)
    changed(tmp_path, "mamba", tensors=lambda given: repeated(given, factor=2))
    with pytest.raises(ValueError, match=r"unused tensors \['lm_head.weight'\]"):
        pretrained.load(tmp_path)


def test_an_output_layer_of_its_own_is_read(tmp_path):
    changed(
        tmp_path,
        "mamba",
        config={"tie_word_embeddings": False},
        tensors=lambda given: {
            **given,
            "lm_head.weight": 2 * given["backbone.embeddings.weight"],
        },
    )
    expected = files.arrays(GOLDEN / "mamba" / "expected.npz")
    module, params = pretrained.load(tmp_path)
    found = module.apply({"params": params}, np.int32(expected["input_ids"]))
    np.testing.assert_allclose(found, 2 * expected["logits"], atol=2e-4)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        pretrained.load(tmp_path)
