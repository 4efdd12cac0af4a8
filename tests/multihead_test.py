"""The multi-head module: flax's parameters and outputs, and what goes beyond."""

import dataclasses
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks, positions
from models import multihead
from tests import oracle

B, T, S, E, N = 2, 5, 7, 12, 4
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(B, T, E)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(B, S, E)), jnp.float32)
INITIALIZERS = {
    "kernel_init": nn.initializers.normal(0.5),
    "bias_init": nn.initializers.normal(0.5),
}


def project(params, name, x):
    kernel, bias = np.float64(params[name]["kernel"]), np.float64(params[name]["bias"])
    return np.einsum("bte,enh->btnh", np.float64(x), kernel) + bias


def project_back(params, heads):
    kernel, bias = (
        np.float64(params["out"]["kernel"]),
        np.float64(params["out"]["bias"]),
    )
    return np.einsum("btnh,nhe->bte", heads, kernel) + bias


def module_by_hand(params, x, y, **options):
    """Project, attend in the float64 loop, project back."""
    query, key, value = (
        project(params, name, inputs)
        for name, inputs in (("query", x), ("key", y), ("value", y))
    )
    out = oracle.attention(query, key, value, **options)["out"]
    return project_back(params, out)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("normalize_qk", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_flax_parameters_give_flax_outputs(use_bias, normalize_qk, cross):
    """The same key initialises both alike; each takes the other's parameters."""
    options = dict(
        num_heads=N,
        qkv_features=16,
        out_features=6,
        use_bias=use_bias,
        normalize_qk=normalize_qk,
        **INITIALIZERS,
    )
    inputs = (X, Y, Y) if cross else (X,)
    mask = nn.make_causal_mask(jnp.ones((B, T))) if not cross else None
    theirs = nn.MultiHeadDotProductAttention(**options)
    ours = multihead.MultiHeadAttention(**options)
    wanted, variables = theirs.init_with_output(jax.random.key(0), *inputs, mask=mask)
    found, our_variables = ours.init_with_output(
        jax.random.key(0), *inputs, mask=None if cross else masks.causal()
    )
    jax.tree.map(np.testing.assert_array_equal, our_variables, variables)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads_by_hand(num_kv_heads):
    """Cross-attention with T ≠ S: output [B T E], weights [B N T S] (case B067)."""
    module = multihead.MultiHeadAttention(
        num_heads=N, num_kv_heads=num_kv_heads, **INITIALIZERS
    )
    variables = module.init(jax.random.key(0), X, Y)
    params = variables["params"]
    assert params["query"]["kernel"].shape == (E, N, E // N)
    assert params["key"]["kernel"].shape == (E, num_kv_heads, E // N)
    assert params["out"]["kernel"].shape == (N, E // N, E)
    found, sown = module.apply(
        variables, X, Y, sow_weights=True, mutable=["intermediates"]
    )
    np.testing.assert_allclose(found, module_by_hand(params, X, Y), atol=1e-5)
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.shape == (B, N, T, S)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_memory_of_another_width():
    """Keys and values may be wider than queries (case B067)."""
    module = multihead.MultiHeadAttention(num_heads=N, qkv_features=16)
    memory = jnp.ones((B, S, 24))
    output, _ = module.init_with_output(jax.random.key(0), X, memory)
    assert output.shape == X.shape


def test_rotary_turns_queries_and_keys_by_their_positions():
    """With equal position offsets nothing changes; moving the keys alone does."""
    module = multihead.MultiHeadAttention(
        num_heads=2, position_encoding="rotary", **INITIALIZERS
    )
    variables = module.init(jax.random.key(0), X)
    plain = module.apply(variables, X)
    steps = jnp.broadcast_to(jnp.arange(T), (B, T))
    np.testing.assert_allclose(
        module.apply(variables, X, query_positions=steps + 11), plain, atol=1e-5
    )
    moved = module.apply(variables, X, query_positions=steps, key_positions=steps + 11)
    assert np.max(np.abs(moved - plain)) > 1e-2
    params = variables["params"]
    query, key, value = (
        jnp.asarray(project(params, name, X), jnp.float32)
        for name in ("query", "key", "value")
    )
    out = oracle.attention(
        positions.rotary(query, jnp.arange(T)),
        positions.rotary(key, jnp.arange(T)),
        value,
    )["out"]
    np.testing.assert_allclose(plain, project_back(params, out), atol=1e-5)


def test_alibi_lowers_scores_by_distance():
    module = multihead.MultiHeadAttention(
        num_heads=N, position_encoding="alibi", **INITIALIZERS
    )
    variables = module.init(jax.random.key(0), X)
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]  # Press et al., for 4 heads
    steps = np.arange(T)
    distance = np.abs(steps[:, None] - steps[None])
    bias = -np.asarray(slopes)[None, :, None, None] * distance
    wanted = module_by_hand(
        variables["params"], X, X, bias=np.broadcast_to(bias, (B, N, T, T))
    )
    np.testing.assert_allclose(module.apply(variables, X), wanted, atol=1e-5)


def test_dropout_follows_flax_conventions():
    """Call or attribute, not both; no rng is needed without dropout (case B052)."""
    dropping = multihead.MultiHeadAttention(num_heads=N, dropout_rate=0.5)
    plain = multihead.MultiHeadAttention(num_heads=N)
    variables = plain.init(jax.random.key(0), X)
    wanted = plain.apply(variables, X)
    np.testing.assert_array_equal(
        dropping.apply(variables, X, deterministic=True), wanted
    )
    silent = dropping.clone(deterministic=True)
    np.testing.assert_array_equal(silent.apply(variables, X), wanted)
    with pytest.raises(ValueError, match="deterministic"):
        silent.apply(variables, X, deterministic=False)
    with pytest.raises(ValueError, match="deterministic"):
        dropping.apply(variables, X)
    noisy = dropping.clone(deterministic=False)
    rngs = {"dropout": jax.random.key(1)}
    first = noisy.apply(variables, X, rngs=rngs)
    np.testing.assert_array_equal(noisy.apply(variables, X, rngs=rngs), first)
    assert np.any(first != wanted)
    explicit = noisy.apply(variables, X, dropout_rng=jax.random.key(2))
    np.testing.assert_array_equal(
        noisy.apply(variables, X, rngs=rngs, dropout_rng=jax.random.key(2)), explicit
    )


def test_broadcast_dropout_shares_the_mask():
    """Rows of the batch that are equal stay equal only if the mask is shared."""
    same = jnp.broadcast_to(X[:1], X.shape)
    for shared in (True, False):
        module = multihead.MultiHeadAttention(
            num_heads=N, dropout_rate=0.5, deterministic=False, broadcast_dropout=shared
        )
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        out, _ = module.init_with_output(rngs, same)
        assert np.array_equal(out[0], out[1]) == shared


@pytest.mark.parametrize("force", [True, False])
def test_dtype_of_computation_of_parameters_and_of_what_is_sown(force):
    module = multihead.MultiHeadAttention(
        num_heads=N, dtype=jnp.bfloat16, force_fp32_for_softmax=force
    )
    variables = module.init(jax.random.key(0), X)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    out, sown = module.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    assert out.dtype == jnp.bfloat16
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.dtype == (jnp.float32 if force else jnp.bfloat16)


def test_signatures_are_supersets_of_flax_and_jax():
    """What jax.nn and flax take, ours take, by the same names, kinds and defaults."""
    ours = inspect.signature(attention.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default
    hooks = {"attention_fn", "decode", "parent", "name"}
    flax_fields = {
        field.name: field.default
        for field in dataclasses.fields(nn.MultiHeadDotProductAttention)
        if field.name not in hooks
        and not field.name.endswith(("_dot_general", "_dot_general_cls", "_einsum_cls"))
    }
    our_fields = {
        field.name: field.default
        for field in dataclasses.fields(multihead.MultiHeadAttention)
    }
    for name, default in flax_fields.items():
        assert name in our_fields
        # Two initialisers are two functions: that they agree is tested above.
        assert callable(default) or our_fields[name] == default, name
    call = inspect.signature(multihead.MultiHeadAttention.__call__).parameters
    flax_call = inspect.signature(nn.MultiHeadDotProductAttention.__call__).parameters
    assert list(call)[: len(flax_call)] == list(flax_call)


def test_alibi_with_two_batch_dimensions():
    module = multihead.MultiHeadAttention(num_heads=N, position_encoding="alibi")
    variables = module.init(jax.random.key(0), X)
    steps = jnp.stack([jnp.arange(T), jnp.arange(T) * 2])
    wanted = module.apply(variables, X, query_positions=steps)
    found = module.apply(variables, X[None], query_positions=steps[None])
    np.testing.assert_allclose(found[0], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 5}, "do not divide into num_heads=5"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3 does not divide"),
        ({"num_heads": 4, "position_encoding": "rotary"}, "even"),
        ({"num_heads": 4, "position_encoding": "t5"}, "position_encoding must be"),
    ],
)
def test_errors_name_what_does_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        multihead.MultiHeadAttention(**options).init(jax.random.key(0), X)


def test_inputs_of_keys_and_values():
    """None stands for what comes before it; values without keys are refused."""
    module = multihead.MultiHeadAttention(num_heads=N)
    variables = module.init(jax.random.key(0), X)
    np.testing.assert_array_equal(
        module.apply(variables, X, Y), module.apply(variables, X, Y, Y)
    )
    with pytest.raises(ValueError, match="`inputs_k` cannot be None"):
        module.apply(variables, X, inputs_v=Y)
    with pytest.warns(DeprecationWarning, match="inputs_kv"):
        both = module.apply(variables, X, inputs_kv=Y)
    np.testing.assert_array_equal(both, module.apply(variables, X, Y))
    with pytest.raises(ValueError, match="`inputs_kv` must be None"):
        module.apply(variables, X, Y, inputs_kv=Y)
