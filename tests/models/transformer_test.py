"""The language model: padding, positions, dropout, dtypes, ids out of range."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import properties
from models import layers, mixers, positional, transformer
from tests.support import small

V, T = 11, small.CONFIG.context
SMALL = small.CONFIG
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, T)), jnp.int32)


def make(**changes):
    """A model, and parameters by NumPy: to compile an initialiser takes longer."""
    model = transformer.CausalLM(dataclasses.replace(SMALL, **changes), V)
    shapes = jax.eval_shape(
        functools.partial(model.init, deterministic=True), jax.random.key(0), TOKENS
    )
    rng = np.random.default_rng(1)
    return model, jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes
    )


@functools.partial(jax.jit, static_argnums=0)
def logits(model, variables, tokens, token_mask=None):
    return model.apply(variables, tokens, deterministic=True, token_mask=token_mask)


@pytest.mark.parametrize(
    ("positions", "mixer"),
    [
        *((name, "softmax") for name in positional.SCHEMES),
        *(("none", name) for name in mixers.MIXERS if name != "softmax"),
    ],
)
def test_left_padding_changes_nothing(positions, mixer):
    """The 5 real tokens of a prompt have the same logits behind 0, 1 and 3 pads.

    Cases B046 and B047: alone, and in one batch.
    """
    model, variables = make(positions=positions, mixers=mixer)
    prompt = TOKENS[:1, :5]
    wanted = logits(model, variables, prompt)
    pads = (0, 1, 3)
    rows = [np.pad(prompt, ((0, 0), (n, 3 - n)), constant_values=7) for n in pads]
    real = [(np.arange(8) >= n) & (np.arange(8) < n + 5) for n in pads]
    together = logits(model, variables, np.concatenate(rows), token_mask=np.stack(real))
    for n, row in zip(pads, together, strict=True):
        np.testing.assert_allclose(row[n : n + 5], wanted[0], atol=1e-5)
    alone = logits(model, variables, rows[2], token_mask=real[2][None])
    np.testing.assert_allclose(alone[:, 3:], wanted, atol=1e-5)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_right_padding_changes_nothing(dtype, atol):
    """A prompt alone and padded to twice its length (case B048)."""
    model, variables = make(dtype=dtype)
    prompt = TOKENS[:, :6]
    wanted = np.asarray(logits(model, variables, prompt))
    padded = np.asarray(
        logits(model, variables, jnp.pad(prompt, ((0, 0), (0, 6))))[:, :6]
    )
    np.testing.assert_allclose(padded, wanted, atol=atol)
    best = np.sort(wanted, -1)
    clear = best[..., -1] - best[..., -2] > 0.1
    np.testing.assert_array_equal(padded.argmax(-1)[clear], wanted.argmax(-1)[clear])


def test_positions_tell_orders_apart():
    """Two tokens swapped before the last one: seen with positions, else by order only.

    Without positions a causal model of one layer cannot tell the order of the past.
    """
    swapped = TOKENS[:1].at[0, 0].set(TOKENS[0, 1]).at[0, 1].set(TOKENS[0, 0])
    assert TOKENS[0, 0] != TOKENS[0, 1]
    for positions in positional.SCHEMES:
        model, variables = make(positions=positions, num_layers=1)
        here = logits(model, variables, TOKENS[:1])[0, -1]
        there = logits(model, variables, swapped)[0, -1]
        same = np.allclose(here, there, atol=1e-5)
        assert same == (positions == "none"), positions


def test_dropout_masks_differ_between_layers_and_keys():
    """Same rng, same numbers; the layers' masks differ pairwise (case B054)."""
    model, variables = make(dropout_rate=0.5, num_layers=3)

    @jax.jit
    def dropped(rng):
        _, sown = model.apply(
            variables,
            TOKENS,
            deterministic=False,
            rngs={"dropout": rng},
            capture_intermediates=lambda module, _: "Dropout" in type(module).__name__,
            mutable=["intermediates"],
        )
        blocks = sown["intermediates"]
        return [
            blocks[f"blocks_{i}"]["mixer_dropout"]["__call__"][0] == 0 for i in range(3)
        ]

    first, again, other = map(dropped, map(jax.random.key, (0, 0, 1)))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    for i in range(3):
        assert np.any(first[i] != other[i])
        assert np.any(first[i] != first[(i + 1) % 3])
        assert 0.3 < first[i].mean() < 0.7


def test_without_dropout_no_rng_is_needed():
    """Evaluation twice is bitwise equal, and equal to a model without (case B049)."""
    dropping, variables = make(dropout_rate=0.5)
    plain, _ = make()
    wanted = logits(plain, variables, TOKENS)
    for _ in range(2):
        np.testing.assert_array_equal(logits(dropping, variables, TOKENS), wanted)


@pytest.mark.parametrize("bad", [V, -1, 2**31 - 1])
def test_ids_out_of_range_are_nan_never_another_row(bad):
    """In a compiled program nothing can raise: its row becomes NaN (case B127).

    Earlier tokens of the row too: a weight of 0 times NaN is NaN.
    """
    model, variables = make()
    found = logits(model, variables, TOKENS.at[0, 4].set(bad))
    assert np.isnan(found[0, 4:]).all()
    assert np.isfinite(found[1]).all()


def test_computation_in_bfloat16_keeps_float32_parameters():
    model, variables = make(dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    out = jax.eval_shape(lambda v: logits(model, v, TOKENS), variables)
    assert out.dtype == jnp.float32
    embedded = model.apply(variables, TOKENS, method=transformer.CausalLM.embed)
    assert embedded.dtype == jnp.bfloat16


@pytest.mark.parametrize("mixer", mixers.MIXERS)
def test_the_declared_mask_is_the_one_in_force(mixer):
    """Edits of token 5 reach what the mask of one layer shows, in a model of one."""
    model, variables = make(mixers=mixer, num_layers=1)
    declared = np.asarray(model.masks()[0].materialize(T, T)[0, 0])
    edited = TOKENS.at[:, 5].set((TOKENS[:, 5] + 1) % V)
    moved = np.any(
        np.asarray(logits(model, variables, TOKENS))
        != np.asarray(logits(model, variables, edited)),
        axis=(0, 2),
    )
    np.testing.assert_array_equal(moved, declared[:, 5])


def test_convolutions_widen_what_a_window_sees():
    """Two layers of 2 + 1 tokens back; 'zero' mixes nothing, convolved or not."""
    model, variables = make(
        mixers="window,zero,window",
        num_layers=3,
        convolution=3,
        window=2,
        positions="none",
    )
    itself = declared = np.eye(T, dtype=bool)
    for mask in model.masks():
        declared = (np.asarray(mask.materialize(T, T)[0, 0]) | itself) @ declared
    distance = np.arange(T)[:, None] - np.arange(T)
    np.testing.assert_array_equal(declared, (distance >= 0) & (distance <= 6))
    found = properties.dependency_matrix(
        functools.partial(
            model.apply,
            variables,
            deterministic=True,
            method=transformer.CausalLM.from_embeddings,
        ),
        np.random.default_rng(2).normal(size=(2, T, SMALL.width)).astype(np.float32),
    )
    np.testing.assert_array_equal(found, declared)


def test_a_convolution_skips_padding():
    model, variables = make(convolution=4)
    real = np.arange(8) >= 3
    prompt = TOKENS[:, :5]
    padded = np.pad(prompt, ((0, 0), (3, 0)), constant_values=7)
    found = logits(model, variables, padded, token_mask=np.stack([real, real]))
    wanted = logits(model, variables, prompt)
    np.testing.assert_allclose(found[:, 3:], wanted, atol=1e-5)


def test_a_convolution_begins_as_little_and_continues_from_its_state():
    module = layers.ShortConvolution(3, decode=True)
    x = np.random.default_rng(3).normal(size=(2, 6, 400)).astype(np.float32)
    variables = module.init(jax.random.key(0), x)
    kernel = np.asarray(variables["params"]["kernel"])
    # The present token passes through, beside noise of 1 / sqrt(3).
    np.testing.assert_allclose(kernel.mean(axis=1), [0, 0, 1], atol=0.1)
    np.testing.assert_allclose(kernel.std(axis=1), 3**-0.5, atol=0.1)
    line = np.concatenate([np.zeros((2, 2, 400)), x], axis=1)
    wanted = sum(kernel[w] * line[:, w : w + 6] for w in range(3))
    pieces = []
    for piece in np.split(x, [1, 4], axis=1):
        y, cache = module.apply(variables, piece, mutable=["cache"])
        variables = variables | cache
        pieces.append(y)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), wanted, atol=1e-5)


def test_grouped_heads_and_untied_embeddings_have_their_parameters():
    _, variables = make(num_kv_heads=1, tie_embeddings=False, use_bias=False)
    params = variables["params"]
    assert params["blocks_0"]["mixer"]["key"]["kernel"].shape == (16, 1, 8)
    assert params["unembedding"]["embedding"].shape == (V, 16)
    assert not any(
        "bias" in jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    )


def test_scale_and_its_default():
    """scale=None means 1/sqrt(H): H = 8 here (case B140)."""
    model, variables = make()
    explicit, _ = make(scale=8**-0.5)
    other, _ = make(scale=0.5)
    wanted = logits(model, variables, TOKENS)
    np.testing.assert_allclose(logits(explicit, variables, TOKENS), wanted, atol=1e-5)
    assert np.max(np.abs(logits(other, variables, TOKENS) - wanted)) > 1e-3


@pytest.mark.parametrize("implementation", ["reference", "flash"])
def test_a_scale_of_zero_attends_uniformly(implementation):
    """Token t weighs all t + 1 tokens up to it alike, in every layer and head."""
    model, variables = make(scale=0.0, implementation=implementation)
    sow = functools.partial(
        model.apply, deterministic=True, sow_weights=True, mutable=["intermediates"]
    )
    _, sown = jax.jit(sow)(variables, TOKENS)
    uniform = np.tri(T) / np.arange(1, T + 1)[:, None]
    maps = jax.tree.leaves(sown)
    assert len(maps) == SMALL.num_layers
    for weights in maps:
        np.testing.assert_allclose(
            weights, np.broadcast_to(uniform, weights.shape), atol=1e-6
        )
    dense, _ = make(scale=0.0, implementation="reference")
    np.testing.assert_allclose(
        logits(model, variables, TOKENS), logits(dense, variables, TOKENS), atol=1e-5
    )


def test_more_tokens_than_learned_positions():
    model, variables = make(positions="learned")
    with pytest.raises(ValueError, match=f"13 tokens.*context={T}"):
        logits(model, variables, jnp.pad(TOKENS, ((0, 0), (0, 1))))
