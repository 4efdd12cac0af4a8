"""How far back a derivative reaches through one layer that mixes positions.

    g(k) = ‖∂y_{T-1} / ∂x_{T-1-k}‖_F             k = 0 … T-1, y = mixer(x)

The layer is measured by itself, on the inputs that it has in its model. Around it, the
model only adds x_{T-1}, which stands at k = 0 alone, and maps each position by itself
(norms, MLP), which multiplies g by what does not depend on k; so the layer is where
distance is paid for. A recurrence pays once per step, a product of k Jacobians
(Bengio, Simard and Frasconi, Learning long-term dependencies with gradient descent is
difficult, 1994; Hochreiter et al., Gradient flow in recurrent nets, 2001), attention
once (Vaswani et al., 2017, arXiv:1706.03762, section 4).

log g(k) is then fitted with two lines, against k and against log k:

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
from models import mixers, transformer

# Float32 ends at 2**-126, and the norms of a GRU do not: the derivative, which is
# linear in its cotangent, is taken of the output times this factor.
_EXPONENT = 100
# Natural log of the least norm that can be told from 0.
FLOOR = -(126 + _EXPONENT) * math.log(2)


class Line(NamedTuple):
    """A least-squares line, and the root mean square of what it leaves."""

    slope: float
    intercept: float
    residual: float


class Lines(NamedTuple):
    """log g against k, and against log k."""

    exponential: Line
    power: Line


def log_norms(f: Callable[[Array], Array], x: Float[Array, "T E"]) -> Float[Array, "T"]:
    """Exact norms of the derivatives of one output by every input.

    Args:
      f: from the inputs of all positions to an output [D].
      x: where the derivatives are taken.

    Returns:
      log ‖∂f / ∂x_{T-1-k}‖_F for k = 0 … T-1: from the last input to the first; -inf
      for 0 and for what lies below `FLOOR`.
    """
    y, transpose = jax.vjp(f, x)
    cotangents = 2.0**_EXPONENT * jnp.eye(len(y), dtype=y.dtype)
    (jacobian,) = jax.vmap(transpose)(cotangents)
    rows = jnp.swapaxes(jacobian, 0, 1)[::-1].reshape(len(x), -1)
    rows = rows.astype(jnp.float32)
    # Squares would vanish long before the numbers do.
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
    """Log norms through the mixer of the last block, on rows of text.

    Args:
      config: of the model.
      vocab_size: V.
      params: of R runs, [R ...].
      tokens: rows; the model's own activations on them are the mixer's inputs.

    Returns:
      As in `log_norms`, the mean over the rows: logs of geometric means.
    """
    model = transformer.CausalLM(config, vocab_size)
    layer = config.num_layers - 1
    block = f"blocks_{layer}"
    mixer = mixers.make(config, layer)

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
            own = {"params": params[block]["mixer"]}
            y: Any = mixer.apply(own, x[None], deterministic=True)
            return y[0, -1]

        return jnp.mean(jax.lax.map(lambda x: log_norms(last, x), inputs), axis=0)

    return jax.lax.map(of_run, params)


def fitted(norms: Float[np.ndarray, "T"], *, nearest: int) -> Lines:
    """Both lines of one run, by least squares over k = `nearest` … T-1.

    Args:
      norms: logs, as from `log_norms`; what is not finite is left out.
      nearest: least k, 1 or more.

    Raises:
      ValueError: fewer than three finite norms.
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
    left = y - (intercept + slope * x)
    return Line(float(slope), float(intercept), float(np.sqrt(np.mean(left**2))))
