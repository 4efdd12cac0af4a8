"""The multi-head module: flax's parameters and outputs, and what goes beyond."""

import dataclasses
import inspect

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks
from models import multihead
from tests.support import modules_by_hand

B, T, S, E, N = 2, 5, 7, 12, 4
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(B, T, E)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(B, S, E)), jnp.float32)
INITIALIZERS = {
    "kernel_init": nn.initializers.normal(0.5),
    "bias_init": nn.initializers.normal(0.5),
    "out_kernel_init": nn.initializers.normal(0.4),
    "out_bias_init": nn.initializers.normal(0.3),
}


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
    chex.assert_trees_all_equal(our_variables, variables)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_memory_of_another_width():
    """case B067: weights are [B N T S]; keys and values may be wider than queries."""
    module = multihead.MultiHeadAttention(
        num_heads=N, num_kv_heads=2, qkv_features=16, **INITIALIZERS
    )
    memory = jnp.asarray(RNG.normal(size=(B, S, 24)), jnp.float32)
    variables = module.init(jax.random.key(0), X, memory)
    params = jax.tree.map(np.float64, variables["params"])
    assert params["query"]["kernel"].shape == (E, N, 4)
    assert params["key"]["kernel"].shape == (24, 2, 4)
    assert params["out"]["kernel"].shape == (N, 4, E)
    found, sown = module.apply(
        variables, X, memory, sow_weights=True, mutable=["intermediates"]
    )
    wanted, weights = modules_by_hand.multi_head(
        params,
        *map(np.float64, (X, memory)),
        visible=np.ones((B, N, T, S), bool),
        encoding="none",
        places=(np.arange(T), np.arange(S)),
        scale=None,
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    (sown_weights,) = sown["intermediates"]["attention_weights"]
    np.testing.assert_allclose(sown_weights, weights, atol=1e-6)


@pytest.mark.parametrize("encoding", ["rotary", "alibi"])
def test_keys_have_positions_of_their_own(encoding):
    """Moving the keys alone changes what the formula says, [*B T] and [T] alike."""
    module = multihead.MultiHeadAttention(
        num_heads=N, qkv_features=16, position_encoding=encoding, **INITIALIZERS
    )
    variables = module.init(jax.random.key(0), X)
    places = np.arange(T), 2 * np.arange(T) - 3
    wanted, _ = modules_by_hand.multi_head(
        jax.tree.map(np.float64, variables["params"]),
        np.float64(X),
        visible=np.ones((B, N, T, T), bool),
        encoding=encoding,
        places=places,
        scale=None,
    )
    of_rows = [np.broadcast_to(p, (B, T)) for p in places]
    for query_positions, key_positions in (places, of_rows):
        found = module.apply(
            variables, X, query_positions=query_positions, key_positions=key_positions
        )
        np.testing.assert_allclose(found, wanted, atol=1e-5)


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
        ({"num_heads": 5}, "width must be a multiple of num_heads.*num_heads=5"),
        (
            {"num_heads": 4, "num_kv_heads": 3},
            "multiple of num_kv_heads.*num_kv_heads=3",
        ),
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


@pytest.mark.parametrize("encoding", ["none", "alibi"])
def test_the_weights_that_are_sown_are_those_in_force(encoding):
    """Values and output projections that are identities read the weights out."""
    T = 4
    module = multihead.MultiHeadAttention(
        num_heads=1, use_bias=False, scale=0.3, position_encoding=encoding
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, T, T)), jnp.float32)
    params = {
        name: {"kernel": jnp.eye(T).reshape(shape)}
        for name, shape in (
            *((name, (T, 1, T)) for name in ("query", "key", "value")),
            ("out", (1, T, T)),
        )
    }
    eye = jnp.eye(T)[None]
    out, sown = module.apply(
        {"params": params}, x, x, eye,
        mask=masks.causal(), sow_weights=True, mutable=["intermediates"],
    )  # fmt: skip
    (weights,) = sown["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights[0, 0], out[0], atol=1e-6)
    assert np.all(np.triu(weights[0, 0], 1) == 0)
