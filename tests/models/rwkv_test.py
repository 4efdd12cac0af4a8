"""RWKV's modules: what a mixer must be, and the papers' equations by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import rwkv, rwkv6
from tests.support import recurrences

B, T, E = 2, 5, 6
(X,) = recurrences.normal(7, (B, T, E))

MODULES = {
    "time mixing": rwkv.TimeMixing(channels=4, layer=1, num_layers=3),
    "channel mixing": rwkv.ChannelMixing(channels=7),
    "version 6": rwkv6.TimeMixing(num_heads=2, mix_rank=3, decay_rank=2),
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_is_a_mixer(module):
    recurrences.assert_is_a_mixer(module, X)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_computes_in_its_dtype(module):
    module = module.clone(dtype=jnp.bfloat16)
    given = recurrences.variables(module, X)
    found = module.apply(given, jnp.bfloat16(X))
    assert found.dtype == jnp.bfloat16
    wanted = module.clone(dtype=jnp.float32).apply(given, X)
    recurrences.assert_close(found, wanted, 0.05)


@pytest.mark.x64
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_float64_stays_float64(module):
    recurrences.assert_float64_stays(module, X)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def before(x):
    return np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])


def test_version_6_is_the_papers_loop():
    """Section 4.2, one sequence, a token and a head at a time."""
    num_heads, size = 2, E // 2
    module = MODULES["version 6"]
    given = recurrences.variables(module, X)
    p = jax.tree.map(np.float64, given["params"])
    found = module.apply(given, X)
    for row in range(B):
        x, last = np.float64(X[row]), before(np.float64(X[row]))

        def lora(name, x):
            down, up = p[name]["down"]["kernel"], p[name]["up"]
            return up["bias"] + np.tanh(x @ down) @ up["kernel"]

        def ddlerp(name, x=x, last=last, lora=lora):
            first = x + (last - x) * p["mix"]
            return x + (last - x) * lora(f"mix_{name}", first)

        r, k, v, g = (
            ddlerp(name) @ p[name]["kernel"]
            for name in ("receptance", "key", "value", "gate")
        )
        decay = np.exp(-np.exp(lora("decay", ddlerp("decay"))))
        read = np.zeros((T, E))
        for n in range(num_heads):
            own = slice(n * size, (n + 1) * size)
            state, u = np.zeros((size, size)), np.diag(p["bonus"][own])
            for t in range(T):
                kv = np.outer(k[t, own], v[t, own])
                y = r[t, own] @ (u @ kv + state)
                state = np.diag(decay[t, own]) @ state + kv
                y = (y - y.mean()) / np.sqrt(y.var() + 64e-5)
                read[t, own] = y * p["norm"]["scale"][n] + p["norm"]["bias"][n]
        wanted = (g * sigmoid(g) * read) @ p["output"]["kernel"]
        recurrences.assert_close(found[row], wanted, 1e-5)


def test_channel_mixing_is_the_papers_equation():
    given = recurrences.variables(MODULES["channel mixing"], X)
    p = jax.tree.map(np.float64, given["params"])
    found = MODULES["channel mixing"].apply(given, X)
    for row in range(B):
        x, last = np.float64(X[row]), before(np.float64(X[row]))
        k, r = (
            (p[f"mix_{name}"]["weight"] * x + (1 - p[f"mix_{name}"]["weight"]) * last)
            @ p[name]["kernel"]
            for name in ("key", "receptance")
        )
        wanted = sigmoid(r) * (np.maximum(k, 0) ** 2 @ p["value"]["kernel"])
        recurrences.assert_close(found[row], wanted, 1e-5)


def test_initial_values_are_those_of_the_authors():
    """The second of three layers: ratios 1/2 and 2/3 in their code."""
    module = rwkv.TimeMixing(layer=1, num_layers=3)
    p = module.init(jax.random.key(0), X)["params"]
    i = np.arange(E)
    np.testing.assert_allclose(p["decay"], -5 + 8 * (i / 5) ** 1.35, rtol=1e-5)
    np.testing.assert_allclose(
        p["bonus"], np.log(0.3) + np.tile([0, 0.5, -0.5], 2), rtol=1e-5
    )
    share = (i / E) ** (2 / 3)
    np.testing.assert_allclose(p["mix_key"]["weight"], share, rtol=1e-5)
    np.testing.assert_allclose(p["mix_value"]["weight"], share + 0.15, rtol=1e-5)
    np.testing.assert_allclose(
        p["mix_receptance"]["weight"], (i / E) ** (1 / 3), rtol=1e-5
    )


def test_initial_values_of_version_6():
    module = rwkv6.TimeMixing(num_heads=2, layer=1, num_layers=3)
    p = module.init(jax.random.key(0), X)["params"]
    i = np.arange(E)
    np.testing.assert_allclose(
        p["decay"]["up"]["bias"], -6 + 5 * (i / 5) ** 1.35, rtol=1e-5
    )
    np.testing.assert_allclose(
        p["bonus"], (1 - i / 5) / 2 + np.tile([0, 0.1, -0.1], 2), atol=1e-6
    )
    share = 1 - (i / E) ** (2 / 3)
    np.testing.assert_allclose(p["mix"], share, atol=1e-6)
    np.testing.assert_allclose(p["mix_value"]["up"]["bias"], share - 0.15, atol=1e-6)
    assert not p["mix_value"]["down"]["kernel"].any()
    assert 0 < np.abs(p["mix_value"]["up"]["kernel"]).max() <= 0.01


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="multiple of num_heads, .*num_heads=4"):
        rwkv6.TimeMixing(num_heads=4).init(jax.random.key(0), X)


def test_language_model():
    module = rwkv.RWKVLM(vocab_size=7, width=E, num_layers=2, tie_embeddings=True)
    tokens = np.int32([[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]])
    given = recurrences.variables(module, tokens)
    assert "unembedding" not in given["params"]
    run = recurrences.decoding(module, given)
    whole = module.apply(given, tokens)
    assert whole.shape == (2, 5, 7) and whole.dtype == jnp.float32
    _, padded = run([np.int32([[9, 9, *tokens[0]]])], None, np.arange(7)[None] >= 2)
    recurrences.assert_close(padded[0, 2:], whole[0], 1e-5)
    narrow = module.clone(dtype=jnp.bfloat16).apply(given, tokens)
    recurrences.assert_close(narrow, whole, 0.05)
