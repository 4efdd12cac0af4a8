"""dot_product.blockwise: one head in blocks, its derivatives, biases and dropout.

Every feature runs in tests/contract/contract_test.py.
"""

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from attention import score_mods
from tests.contract import subjects
from tests.support import in_blocks, mask_rules, oracle

B, N, K, H, D = in_blocks.B, in_blocks.N, in_blocks.K, in_blocks.H, in_blocks.D
attend, arrays, both = in_blocks.attend, in_blocks.arrays, in_blocks.both

SIZES = [(1, 1), (2, 3), (3, 2), (5, 7), (4, 16), (11, 4)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("T", "S"), [(5, 7), (11, 4)])
def test_blocks_of_any_size_give_the_loop(sizes, T, S):
    """Ragged ends, one query or key a block, blocks that are larger than the array."""
    *inputs, output_gradient = arrays(T, S)
    run = functools.partial(attend, sizes=sizes, is_causal=True)
    found = jax.jit(functools.partial(both, run))(inputs, output_gradient)
    shown = np.broadcast_to(np.tri(T, S, dtype=bool), (B, N, T, S))
    wanted = oracle.attention(*inputs, visible=shown, output_gradient=output_gradient)
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=2e-6, err_msg=name)


@st.composite
def expressions(draw, depth=2):
    kind = draw(st.sampled_from(["leaf", "&", "|", "~"])) if depth else "leaf"
    if kind == "leaf":
        make, _ = mask_rules.LEAVES[draw(mask_rules.LEAF_NAMES)]
        return make(draw(st.sampled_from([0, 1, -2])))
    left = draw(expressions(depth=depth - 1))
    if kind == "~":
        return ~left
    right = draw(expressions(depth=depth - 1))
    return left & right if kind == "&" else left | right


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(expressions(), st.sampled_from([(2, 2), (3, 4)]), st.integers(0, 99))
def test_random_masks_and_data_give_the_loop(mask, sizes, seed):
    """Outputs, and gradients by the values, with mask arrays by row and by head."""
    b, n, T, S = mask_rules.B, mask_rules.N, mask_rules.T, mask_rules.S
    shapes = (b, T, n, H), (b, S, n, H), (b, S, n, D), (b, T, n, D)
    *inputs, output_gradient = subjects.normal(seed, *shapes)
    run = functools.partial(attend, sizes=sizes, mask=mask)
    found = jax.jit(functools.partial(both, run))(inputs, output_gradient)
    shown = np.broadcast_to(
        mask.materialize(T, S, batch_size=b, num_heads=n), (b, n, T, S)
    )
    wanted = oracle.attention(*inputs, visible=shown, output_gradient=output_gradient)
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=3e-6, err_msg=name)


def test_hessian_vector_products_are_those_of_the_reference():
    *inputs, _ = arrays(7, 7)
    slopes = np.float32([0.1, 0.2, 0.3, 0.4])

    def product(implementation):
        def loss(query, slopes):
            out, lse = attend(
                query,
                *inputs[1:],
                sizes=(3, 2),
                implementation=implementation,
                is_causal=True,
                softcap=2.0,
                sinks=slopes,
                score_mod=score_mods.alibi(slopes, np.arange(7), np.arange(7)),
                return_residual=True,
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

        def jvp(query, slopes):
            tangents = jnp.ones_like(query), jnp.cos(slopes)
            return jax.jvp(jax.grad(loss, argnums=(0, 1)), (query, slopes), tangents)

        return jax.jit(jvp)(inputs[0], slopes)

    chex.assert_trees_all_close(product("flash"), product("reference"), atol=2e-5)


def test_derivatives_that_have_no_rule_say_so():
    *inputs, _ = arrays(4, 4)
    run = functools.partial(attend, sizes=(2, 2), is_causal=True)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(run, tuple(inputs), tuple(inputs))

    def gradient(query):
        return jax.grad(lambda query: jnp.sum(run(query, *inputs[1:]) ** 2))(query)

    with pytest.raises(ValueError, match="[Rr]everse-mode"):
        jax.jit(jax.grad(lambda query: jnp.sum(gradient(query) ** 2)))(inputs[0])


@pytest.mark.parametrize("shape", [(1, N, 6, 6), (B, 1, 1, 6), (1, 1, 6, 1), (6, 6)])
def test_a_bias_has_a_gradient_of_its_own_shape(shape):
    """case B079: summed over what it is broadcast along; blocks are ragged."""
    *inputs, output_gradient = arrays(6, 6)
    (bias,) = subjects.normal(4, shape)

    def gradient(implementation):
        def loss(bias):
            out = attend(*inputs, bias, sizes=(4, 5), implementation=implementation)
            return jnp.sum(out * output_gradient)

        return jax.jit(jax.grad(loss))(bias)

    found = gradient("flash")
    assert found.shape == shape
    np.testing.assert_allclose(found, gradient("reference"), atol=1e-5)


@pytest.mark.parametrize("reads", [True, False], ids=["scores", "positions"])
@pytest.mark.parametrize("mapped", [0, 1, 2], ids=["query", "key", "value"])
def test_what_vmap_shares_counts_once(mapped, reads):
    """Outputs that do not depend on what is mapped, and all gradients of the rest."""
    *inputs, output_gradient = arrays(5, 5)
    inputs[mapped] = np.stack([inputs[mapped], -inputs[mapped], 2 * inputs[mapped]])
    slopes = np.float32([0.1, -0.2, 0.3, 0.4])

    def loss(inputs, slopes, name):
        def score_mod(score, q_index, kv_index, *, batch, head):
            added = slopes[head] * kv_index.astype(score.dtype)
            return score + added if reads else jnp.zeros_like(score) + added

        def one(x):
            out, log_normalizer = attend(
                *inputs[:mapped],
                x,
                *inputs[mapped + 1 :],
                sizes=(3, 2),
                implementation=name,
                score_mod=score_mod,
                return_residual=True,
            )
            return jnp.sum(out * output_gradient) + jnp.sum(jnp.sin(log_normalizer))

        return jnp.sum(jax.vmap(one)(inputs[mapped]))

    found, wanted = (
        jax.jit(jax.grad(functools.partial(loss, name=name), argnums=(0, 1)))(
            inputs, slopes
        )
        for name in ("flash", "reference")
    )
    chex.assert_trees_all_close(found, wanted, atol=2e-5)


@pytest.mark.parametrize("broadcast_dropout", [False, True])
def test_dropout_does_not_depend_on_blocks(broadcast_dropout):
    """The very weights that the reference drops, whatever the blocks."""
    query, key, _, _ = arrays(6, 6)
    eye = np.broadcast_to(np.eye(6, dtype=np.float32)[None, :, None], (B, 6, K, 6))
    kept = [
        np.asarray(
            attend(
                query,
                key,
                eye,
                sizes=sizes,
                implementation=implementation,
                dropout_rate=0.5,
                dropout_rng=jax.random.key(1),
                broadcast_dropout=broadcast_dropout,
            )
        )
        != 0
        for implementation, sizes in (
            ("reference", None),
            ("flash", (6, 6)),
            ("flash", (4, 5)),
            ("flash", (1, 2)),
        )
    ]
    assert 0.3 < kept[0].mean() < 0.7
    for other in kept[1:]:
        np.testing.assert_array_equal(other, kept[0])


def test_huge_scores_have_their_gradients():
    """m and l apart: two equal keys share the weight, at any size of the scores."""
    query, key = np.full((1, 1, 1, 1), 1e4, np.float32), np.full((1, 4, 1, 1), 1e4)
    value = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)

    def out(value):
        return attend(query, np.float32(key), value, sizes=(1, 2))[0, 0, 0, 0]

    np.testing.assert_allclose(jax.grad(out)(value).ravel(), 0.25)
