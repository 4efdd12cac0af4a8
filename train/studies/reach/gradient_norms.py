"""How far back a derivative reaches through one layer that mixes positions.

    g(k) = ‖∂y_{T-1} / ∂x_{T-1-k}‖_F             k = 0 … T-1, y = mixer(x)

The layer is measured alone, on the inputs that it has in its model: the rest of the
model adds x_{T-1}, which contributes at k = 0 only, and maps each position separately
(norms, MLP), which multiplies g by a factor that does not depend on k. The derivative
of a recurrence is a product of k Jacobians (Bengio, Simard and Frasconi, Learning
long-term dependencies with gradient descent is difficult, 1994; Hochreiter et al.,
Gradient flow in recurrent nets, 2001); that of attention has one factor at any distance
(Vaswani et al., 2017, arXiv:1706.03762, section 4).

Two lines are then fitted to log g(k), one against k and one against log k:

    g(k) ≈ c exp(s k)       exponential, half-life log ½ / s
    g(k) ≈ c kᵖ             power law
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array, Float, Int

from models import config as model_config
from models import transformer

# The norms of a GRU fall below 2**-126, the least normal float32. The derivative is
# linear in its cotangent, which is therefore multiplied by 2**100 meanwhile.
_EXPONENT = 100
# Natural logarithm of the least norm that is distinguished from 0.
FLOOR = -(126 + _EXPONENT) * math.log(2)


class Line(NamedTuple):
    """A least-squares line, and the root mean square of its residuals."""

    slope: float
    intercept: float
    residual: float


class Lines(NamedTuple):
    """The lines of log g against k (exponential) and against log k (power law)."""

    exponential: Line
    power: Line


def log_norms(f: Callable[[Array], Array], x: Float[Array, "T E"]) -> Float[Array, "T"]:
    """Computes exact norms of the derivatives of one output by every input.

    Args:
      f: maps the inputs of all positions [T E] to an output [D].
      x: point at which the derivatives are taken.

    Returns:
      log ‖∂f / ∂x_{T-1-k}‖_F for k = 0 … T-1, that is from the last input to the first;
      -inf where the norm is 0 or its logarithm below `FLOOR`.
    """
    y, transpose = jax.vjp(f, x)
    cotangents = 2.0**_EXPONENT * jnp.eye(len(y), dtype=y.dtype)
    (jacobian,) = jax.vmap(transpose)(cotangents)
    rows = jnp.swapaxes(jacobian, 0, 1)[::-1].reshape(len(x), -1)
    rows = rows.astype(jnp.float32)
    # Squares of small numbers underflow: divide by the largest first.
    peak = jnp.max(jnp.abs(rows), axis=1)
    norms = jnp.linalg.norm(rows / jnp.where(peak > 0, peak, 1)[:, None], axis=1)
    return jnp.log(norms) + jnp.log(peak) - _EXPONENT * math.log(2)


@functools.partial(jax.jit, static_argnums=(0, 1))
def of_runs(
    config: model_config.CausalLMConfig,
    vocab_size: int,
    params: optax.Params,
    tokens: Int[Array, "B T"],
) -> Float[Array, "R T"]:
    """Computes log norms through the mixer of the last block, on rows of text.

    Args:
      config: configuration of the model.
      vocab_size: V.
      params: parameters of R runs, with leaves [R ...].
      tokens: rows of text; the mixer's inputs are the model's activations on them.

    Returns:
      For each run, log ‖∂y_{T-1} / ∂x_{T-1-k}‖_F for k = 0 … T-1, averaged over the
      rows: the logarithm of the geometric mean.
    """
    model = transformer.CausalLM(config, vocab_size)
    layer = config.num_layers - 1
    block = f"blocks_{layer}"
    mixer = config.mixer(layer).make(config, layer)

    def of_run(params: Any) -> Array:
        _, state = model.apply(
            {"params": params},
            tokens,
            deterministic=True,
            capture_intermediates=lambda module, _: isinstance(module, nn.RMSNorm),
            mutable=["intermediates"],
        )
        (inputs,) = state["intermediates"][block]["mixer_norm"]["__call__"]

        def last(x: Array) -> Array:
            variables = {"params": params[block]["mixer"]}
            y: Any = mixer.apply(variables, x[None], deterministic=True)
            return y[0, -1]

        return jnp.mean(jax.lax.map(lambda x: log_norms(last, x), inputs), axis=0)

    return jax.lax.map(of_run, params)


def fitted(norms: Float[np.ndarray, "T"], *, nearest: int) -> Lines:
    """Fits both lines to one run, by least squares over k = `nearest` … T-1.

    Args:
      norms: log norms for k = 0 … T-1; those that are not finite are left out.
      nearest: least k, at least 1.

    Raises:
      ValueError: there are fewer than three finite norms.
    """
    norms = np.asarray(norms, np.float64)
    distances = np.arange(nearest, len(norms))
    distances = distances[np.isfinite(norms[nearest:])]
    if len(distances) < 3:
        raise ValueError(
            f"a line needs three norms above the floor, got {len(distances)} at "
            f"distances from {nearest}"
        )
    y = norms[distances]
    return Lines(_line(distances, y), _line(np.log(distances), y))


def _line(x: np.ndarray, y: np.ndarray) -> Line:
    slope, intercept = np.polyfit(x, y, 1)
    residuals = y - (intercept + slope * x)
    return Line(float(slope), float(intercept), float(np.sqrt(np.mean(residuals**2))))
