"""Linear attention in float64, one number at a time, with its derivatives.

A feature map is given as `f(x [H]) -> (φ [M], its Jacobian [M H])`, and in JAX.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract import subjects

B, T, N, K, H, D = 2, 7, 4, 2, 3, 5
# Two keys of padding in front, one behind; and one in the middle.
MASK = np.array([[False, False, True, True, True, True, False], [True] * 7])
MASK[1, 3] = False
NAMES = ("out", "dq", "dk", "dv")


def elu_plus_one(x):
    """Above zero x + 1, below exp(x)."""
    features = [value + 1 if value > 0 else math.exp(value) for value in x]
    slopes = [1.0 if value > 0 else math.exp(value) for value in x]
    return np.array(features), np.diag(slopes)


def affine(x):
    """The entries themselves, of either sign, and a constant."""
    return np.append(x, 4.0), np.vstack([np.eye(len(x)), np.zeros(len(x))])


def affine_in_jax(x):
    """The like."""
    return jnp.concatenate([x, jnp.full_like(x[..., :1], 4)], axis=-1)


def positive(projection, scale):
    """exp(w·x - |x|²/2) / √M of x times the root of the scale."""

    def features(x):
        y = math.sqrt(scale) * np.asarray(x)
        phi = np.array([math.exp(w @ y - y @ y / 2) for w in projection])
        phi /= math.sqrt(len(projection))
        return phi, math.sqrt(scale) * phi[:, None] * (projection - y)

    return features


def attention(query, key, value, feature_map, visible, output_gradient):
    """Outputs and gradients, by name.

    Args:
      query: [B T N H].
      key: [B S K H].
      value: [B S K D].
      feature_map: as above.
      visible: bool [B T S].
      output_gradient: [B T N D].
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    found = {"out": np.zeros(np.shape(output_gradient))}
    gradients = {"dq": query, "dk": key, "dv": value}
    found |= {name: np.zeros_like(x) for name, x in gradients.items()}
    for b, i, n in np.ndindex(query.shape[:3]):
        k = n // (query.shape[2] // key.shape[2])
        phi_q, slope_q = feature_map(query[b, i, n])
        seen = [j for j in range(key.shape[1]) if visible[b, i, j]]
        phi, slope = {}, {}
        for j in seen:
            phi[j], slope[j] = feature_map(key[b, j, k])
        weight = {j: float(phi_q @ phi[j]) for j in seen}
        total = sum(weight.values())
        if not seen:
            continue
        out = sum(weight[j] * value[b, j, k] for j in seen) / total
        found["out"][b, i, n] = out
        d_out = np.asarray(output_gradient[b, i, n], np.float64)
        for j in seen:
            d_weight = d_out @ (value[b, j, k] - out) / total
            found["dq"][b, i, n] += d_weight * slope_q.T @ phi[j]
            found["dk"][b, j, k] += d_weight * slope[j].T @ phi_q
            found["dv"][b, j, k] += weight[j] / total * d_out
    return found


def arrays(dtype="float32", seed=0, length=T):
    """Query, key, value, and the gradient of the output."""
    shapes = [(B, length, *x) for x in ((N, H), (K, H), (K, D), (N, D))]
    return subjects.normal(seed, *shapes, dtype=dtype)


def visible(is_causal, token_mask=None):
    """Bool [B T S]."""
    shown = np.ones((B, T, T), bool) if token_mask is None else token_mask[:, None]
    return np.broadcast_to(shown, (B, T, T)) & (
        np.tri(T, dtype=bool) if is_causal else True
    )


def assert_is(attend, feature_map, *, is_causal, dtype, tolerance):
    """`attend(q, k, v, is_causal, token_mask)` is the loop, padding or not."""
    *inputs, output_gradient = arrays(dtype)

    @jax.jit
    def both(output_gradient, token_mask, *inputs):
        def run(*inputs):
            return attend(*inputs, is_causal=is_causal, token_mask=token_mask)

        out, backward = jax.vjp(run, *inputs)
        return dict(zip(NAMES, (out, *backward(output_gradient)), strict=True))

    for token_mask in (np.ones_like(MASK), MASK):
        found = both(output_gradient, token_mask, *inputs)
        shown = visible(is_causal, token_mask)
        wanted = attention(*inputs, feature_map, shown, output_gradient)
        for name, x in found.items():
            assert x.dtype == dtype
            largest = np.max(np.abs(wanted[name]))
            np.testing.assert_allclose(
                x, wanted[name], rtol=0, atol=tolerance * largest, err_msg=name
            )
