"""attention.linear: the state of a sequence, and what continues from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import linear
from tests.support import linear_by_hand

B, T, N, K, H, D = 2, 7, 4, 2, 3, 5
FORMS = {"quadratic": None, "recurrent": None, "chunked": 3}
arrays = linear_by_hand.arrays


def ones(x):
    """One feature, the same everywhere."""
    return jnp.ones_like(x[..., :1])


@pytest.mark.parametrize(
    ("form", "cuts"),
    [
        ("quadratic", [[2]]),
        ("recurrent", [[2]]),
        ("chunked", [*([t] for t in range(1, T)), range(1, T)]),
    ],
)
def test_a_sequence_may_be_cut_anywhere(form, cuts):
    """Into two, and into single tokens; padding changes no state."""
    query, key, value, _ = arrays()
    token_mask = linear_by_hand.MASK
    options = {"form": form, "chunk": FORMS[form]}
    extend = jax.jit(functools.partial(linear.extend, **options))
    attend = functools.partial(linear.attention, is_causal=True, **options)
    whole = jax.jit(attend)(query, key, value, token_mask=token_mask)
    start = linear.empty(key, value)
    end = extend(start, query, key, value, token_mask=token_mask)[0]
    for cut in cuts:
        state, outputs = start, []
        for first, last in zip([0, *cut], [*cut, T], strict=True):
            part = (x[:, first:last] for x in (query, key, value))
            state, out = extend(state, *part, token_mask=token_mask[:, first:last])
            outputs.append(out)
        np.testing.assert_allclose(np.concatenate(outputs, 1), whole, atol=2e-6)
        for found, wanted in zip(state, end, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_step_is_a_token_of_one_head():
    query, key, value, _ = (x[0, :, 0] for x in arrays())
    state = jax.tree.map(
        lambda x: x[0, 0], linear.empty(key[None, :, None], value[None, :, None])
    )
    outputs = []
    for q, k, v in zip(query, key, value, strict=True):
        features = linear.elu_plus_one(q), linear.elu_plus_one(k)
        state, out = linear.step(state, *features, jnp.asarray(v))
        outputs.append(out)
    whole = linear.attention(
        *(x[None, :, None] for x in (query, key, value)), is_causal=True
    )
    np.testing.assert_allclose(np.stack(outputs), whole[0, :, 0], atol=1e-6)


def test_the_state_is_one_for_all_query_heads_of_a_group():
    query, key, value, _ = arrays()
    state, _ = linear.extend(linear.empty(key, value), query, key, value)
    assert state.values.shape == (B, K, H, D)
    assert state.total.shape == (B, K, H)
    narrow = linear.empty(jnp.bfloat16(key), jnp.bfloat16(value))
    assert {x.dtype for x in narrow} == {jnp.dtype("float32")}


def test_a_state_that_does_not_fit_is_refused():
    query, key, value, _ = arrays()
    state = linear.empty(key[:, :, :1], value[:, :, :1])
    with pytest.raises(ValueError, match="state must fit"):
        linear.extend(state, query, key, value)
    of_ones = linear.empty(key, value, feature_map=ones)
    with pytest.raises(ValueError, match="state must fit"):
        linear.extend(of_ones, query, key, value)
