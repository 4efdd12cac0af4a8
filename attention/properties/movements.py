"""How far the outputs of a function over positions move when an input is edited.

    Δⱼ yᵢ = f(…, x'ⱼ, …)ᵢ - f(…, xⱼ, …)ᵢ        and        ∂yᵢ / ∂xⱼ

`changes` compares outputs before and after an edit, bit for bit; `jacobian_norms` has
the derivatives, by reverse mode. A derivative sees a dependence however small; an edit
sees one without derivative (a token, a rounding, a comparison).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

# A function of one array, of JAX or of NumPy.
Function = Callable[[Any], Any]
AnyArray = Array | np.ndarray

# Size of a change that has none: 0.0 became -0.0.
_SIGN_OF_ZERO = np.finfo(np.float64).smallest_subnormal


class Changes(NamedTuple):
    """How outputs [B T ...] changed, position by position, over all features.

    Attributes:
      numbers: the largest change of a number into another number; exactly 0 where no
        bit of a number changed.
      nonfinite: whether a number became NaN or infinite, or the reverse.
    """

    numbers: Float[np.ndarray, "B T"]
    nonfinite: Bool[np.ndarray, "B T"]


def changes(
    base: Shaped[np.ndarray, "B T ..."], edited: Shaped[np.ndarray, "B T ..."]
) -> Changes:
    """Compares outputs bit for bit; NaN in both has not changed.

    0.0 against -0.0 has changed, by the smallest positive number. Where the dtypes
    differ, numbers are compared.
    """
    shape = (*base.shape[:2], math.prod(base.shape[2:]))
    if base.dtype != edited.dtype:
        base, edited = (x.astype(np.float64) for x in (base, edited))
    base, edited = (np.ascontiguousarray(x).reshape(shape) for x in (base, edited))
    bits = f"u{base.dtype.itemsize}"
    same = base.view(bits) == edited.view(bits)
    numbers, nonfinite = np.zeros(shape[:2]), np.zeros(shape[:2], bool)
    # Few positions have changed, as a rule: only those are looked at closely.
    changed = ~same.all(axis=-1)
    same = same[changed]
    base, edited = (x[changed].astype(np.float64) for x in (base, edited))
    same |= np.isnan(base) & np.isnan(edited)
    finite = np.isfinite(base) & np.isfinite(edited)
    with np.errstate(invalid="ignore"):
        sizes = np.maximum(np.abs(edited - base), _SIGN_OF_ZERO)
    numbers[changed] = np.max(sizes, axis=-1, where=finite & ~same, initial=0.0)
    nonfinite[changed] = (~finite & ~same).any(axis=-1)
    return Changes(numbers, nonfinite)


def movement(
    base: Shaped[np.ndarray, "B T ..."], edited: Shaped[np.ndarray, "B T ..."]
) -> Float[np.ndarray, "B T"]:
    """Largest change over all axes after the first two; NaN where it has no size.

    So `movement != 0` says what has moved; a change to or from NaN or an infinity has
    no size.
    """
    numbers, nonfinite = changes(base, edited)
    return np.where(nonfinite, np.nan, numbers)


def jacobian_norms(
    fn: Function, inputs: Float[AnyArray, "*B T E"], *, rng: PRNGKeyArray
) -> Float[np.ndarray, "T_out T_in"]:
    """Computes the size of the derivative of output i by input j.

    One backward pass per output position with a random normal cotangent c over the
    features (and the batch): a column of cᵀ ∂yᵢ/∂xⱼ is exactly zero where the
    derivative is, and zero elsewhere with probability 0. The whole Jacobian is
    never formed; the passes run one after another in one compiled program.

    The size is the largest absolute entry, not the Euclidean norm, since squares of
    small derivatives underflow to zero.

    Args:
      fn: maps [T E] to [T_out ...], or [B T E] to [B T_out ...].
      inputs: floating point [T E] or [B T E].
      rng: key of the cotangents.

    Returns:
      Float [T_out T_in], the largest over the batch (across rows too). An input with
      a derivative that is not finite may give NaN in its whole column, since the
      backward pass multiplies it by the zeros of the other outputs.

    Raises:
      ValueError: on inputs that are not floating point [T E] or [B T E].
    """
    inputs = jnp.asarray(inputs)
    floating = jnp.issubdtype(inputs.dtype, jnp.floating)
    if inputs.ndim not in (2, 3) or not floating:
        raise ValueError(
            "expected floating point inputs [T E] or [B T E], "
            f"got {inputs.dtype} {list(inputs.shape)}"
        )
    time = inputs.ndim - 2

    outputs = jax.eval_shape(fn, inputs)
    noise = jax.random.normal(rng, outputs.shape, outputs.dtype)

    @jax.jit
    def norms(inputs: Array, noise: Array) -> Array:
        _, pullback = jax.vjp(fn, inputs)
        positions = jax.lax.broadcasted_iota(jnp.int32, noise.shape, time)
        features = tuple(axis for axis in range(inputs.ndim) if axis != time)

        def row(target: Array) -> Array:
            (gradient,) = pullback(jnp.where(positions == target, noise, 0))
            return jnp.max(jnp.abs(gradient), axis=features)

        return jax.lax.map(row, jnp.arange(noise.shape[time]))

    return np.asarray(norms(inputs, noise))
