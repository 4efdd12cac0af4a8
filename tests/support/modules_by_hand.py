"""The modules of `models` in float64 NumPy, around the loop of support/oracle.py."""

import numpy as np

from tests.support import oracle


def rotate(x, positions):
    """Pairs (i, i + H/2) of [B T N H] as complex numbers, turned by e^{iθ}."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def alibi(slopes, query_positions, key_positions):
    """A score modifier of the oracle."""

    def score_mod(score, i, j, b, n):
        return score - slopes[n] * abs(query_positions[i] - key_positions[j]), 1.0

    return score_mod


def multi_head(parameters, x, memory=None, *, visible, encoding, places, scale):
    """Project, attend in the loop, project back; [B T E] and the weights [B N T S].

    `places` are the positions of queries and of keys. The slopes of ALiBi are those
    of Press et al. for 4 heads.
    """
    memory = x if memory is None else memory
    at, key_at = places
    query, key, value = (
        np.einsum("bte,enh->btnh", inputs, parameters[name]["kernel"])
        + parameters[name].get("bias", 0)
        for name, inputs in (("query", x), ("key", memory), ("value", memory))
    )
    score_mod = None
    if encoding == "rotary":
        query, key = rotate(query, at), rotate(key, key_at)
    if encoding == "alibi":
        slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
        score_mod = alibi(slopes, at, key_at)
    found = oracle.attention(
        query, key, value, visible=visible, scale=scale, score_mod=score_mod
    )
    y = np.einsum("btnh,nhe->bte", found["out"], parameters["out"]["kernel"])
    return y + parameters["out"].get("bias", 0), found["weights"]


def rms_norm(parameters, x):
    """x over its root mean square, times one learned factor per feature."""
    return (
        x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * parameters["scale"]
    )


def mlp(parameters, x):
    """W₂ gelu(W₁ x), with the tanh form of gelu."""
    h = x @ parameters["up"]["kernel"] + parameters["up"].get("bias", 0)
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return h @ parameters["down"]["kernel"] + parameters["down"].get("bias", 0)


def block(parameters, x, **options):
    """One pre-norm layer, and its attention weights."""
    h = rms_norm(parameters["mixer_norm"], x)
    h, weights = multi_head(parameters["mixer"], h, **options)
    x = x + h
    return x + mlp(parameters["mlp"], rms_norm(parameters["mlp_norm"], x)), weights


def causal_lm(parameters, x, **options):
    """A language model of one block after its embeddings, which it also ends with."""
    x, weights = block(parameters["blocks_0"], x, **options)
    x = rms_norm(parameters["final_norm"], x)
    return x @ parameters["token_embedding"]["embedding"].T, weights
