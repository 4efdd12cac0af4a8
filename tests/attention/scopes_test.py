"""What a profile shows: the names under which operations stand in a program."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

import attention
from attention import (
    additive,
    convolution,
    dropout,
    linear,
    lowrank,
    mamba,
    positions,
    random_features,
    recurrence,
    retention,
    rwkv,
    rwkv6,
    score_mods,
    softmax,
)
from models import transformer
from tests.support import small

HEADS = jnp.ones((2, 4, 2, 6))
TOKENS = jnp.ones((2, 4, 6))
EXACT = attention.dot_product_attention
# (scope, function that makes it, arrays)
PRIMITIVES = (
    ("dot_product_attention", EXACT, (HEADS,) * 3),
    ("attention_weights", attention.attention_weights, (HEADS,) * 2),
    ("additive_attention", additive.attention, (*(HEADS,) * 3, HEADS[0, 0])),
    ("additive_weights", additive.weights, (HEADS, HEADS, HEADS[0, 0])),
    ("depthwise_convolution", convolution.depthwise, (TOKENS, TOKENS[0])),
    ("token_shift", convolution.shift, (TOKENS,)),
    (
        "dropout",
        functools.partial(dropout.apply, rate=0.5),
        (TOKENS[0], jax.random.key(0)),
    ),
    ("linear_attention", linear.attention, (HEADS,) * 3),
    ("lowrank_attention", lowrank.attention, (*(HEADS,) * 3, *(jnp.ones((3, 4)),) * 2)),
    (
        "selective_scan",
        mamba.selective_scan,
        (
            TOKENS,
            TOKENS,
            jnp.ones((6, 3)),
            TOKENS[..., :3],
            TOKENS[..., :3],
            TOKENS[0, 0],
        ),
    ),
    (
        "sinusoidal_positions",
        functools.partial(positions.sinusoidal, width=6),
        (jnp.arange(4),),
    ),
    ("rotary_positions", positions.rotary, (HEADS, jnp.arange(4))),
    (
        "relative_buckets",
        functools.partial(score_mods.relative_buckets, bidirectional=True),
        (jnp.arange(4),),
    ),
    (
        "random_projection",
        functools.partial(random_features.gaussian, num_features=3, width=4),
        (jax.random.key(0),),
    ),
    ("recurrence", recurrence.states, (TOKENS, TOKENS)),
    ("retention", retention.attention, (*(HEADS,) * 3, jnp.zeros(2))),
    ("rwkv_wkv", rwkv.wkv, (TOKENS, TOKENS, TOKENS[0, 0], TOKENS[0, 0])),
    ("rwkv6_wkv", rwkv6.wkv, (*(HEADS,) * 4, HEADS[0, 0])),
    ("masked_softmax", softmax.masked_softmax, (TOKENS,)),
    ("scores", functools.partial(softmax.scores, scale=1.0), (TOKENS[0],) * 2),
    (
        "modified_scores",
        functools.partial(softmax.modified, softcap=2.0),
        (TOKENS[0],),
    ),
    ("entropy", softmax.entropy, (TOKENS,)),
)


def scopes(fn, *arrays):
    """The names of all scopes, at any depth, in the program that is compiled."""
    text = jax.jit(fn).lower(*arrays).as_text(debug_info=True)
    return set(re.findall(r"[\w.]+", " ".join(re.findall(r'loc\("(.*?)"', text))))


@pytest.mark.parametrize(
    ("scope", "fn", "arrays"), PRIMITIVES, ids=[scope for scope, *_ in PRIMITIVES]
)
def test_operations_bear_the_name_of_their_primitive(scope, fn, arrays):
    assert scope in scopes(lambda *arrays: fn(*arrays), *arrays)


@pytest.mark.parametrize("implementation", ["reference", "flash", "xla"])
def test_forward_and_backward_pass_bear_the_implementation(implementation):
    def loss(*arrays):
        return jnp.sum(EXACT(*arrays, implementation=implementation))

    text = jax.jit(jax.grad(loss)).lower(*(HEADS,) * 3).as_text(debug_info=True)
    for pass_ in ("jvp", "transpose"):
        path = rf"{pass_}\(.*dot_product_attention\W+{implementation}\b"
        assert re.search(path, text), pass_


def test_a_language_model_shows_modules_and_primitives():
    model = transformer.CausalLM(small.CONFIG, vocab_size=7)
    tokens = jnp.zeros((1, 4), jnp.int32)
    init, apply = (
        functools.partial(f, deterministic=True) for f in (model.init, model.apply)
    )
    parameters = jax.eval_shape(init, jax.random.key(0), tokens)
    names = scopes(apply, parameters, tokens)
    assert {"CausalLM", "rotary_positions", "dot_product_attention"} <= names
    modules = {
        key.key
        for path, _ in jax.tree_util.tree_leaves_with_path(parameters["params"])
        for key in path[:-1]
    }
    assert len(modules) > 5
    assert modules <= names


def test_signatures_remain():
    """A scope wraps a function, and hides none of its arguments."""
    assert list(inspect.signature(linear.attention).parameters)[:3] == [
        "query",
        "key",
        "value",
    ]
    assert "score_mod" in inspect.signature(EXACT).parameters
