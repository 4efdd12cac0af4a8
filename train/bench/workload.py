"""A piece of work for any implementation, and the check of its result.

    o = softmax(q kᵀ / √H, over the visible keys) v;   dq, dk, dv given do

Nothing is timed before `Expected.error` has compared it with the reference. At lengths
too large for the dense form a sample of query rows is compared: a cotangent that is 0
in all other rows makes dk and dv sums over the sample alone, so that these gradients
are checked in full.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import attention
from attention import masks, numerics
from train.report import compilation

# Largest error, as a share of the largest expected value.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Tolerance of float32 on accelerators, whose products have fewer bits by default.
ACCELERATOR_TOLERANCE = 2e-2
# Largest number of rows that are checked, and of numbers in their score matrices.
ROWS, SCORES = 256, 2**25

Kernel = Callable[..., Any]
Outputs = Sequence[Float[Any, "B L N H"]]


class WrongShape(ValueError):
    """The shapes of the outputs differ from those of the reference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Shapes and dtype of a call, with T = S and D = H.

    Attributes:
      length: T.
      dtype: dtype of query, key and value.
      batch_size: B.
      num_heads: N.
      num_kv_heads: K.
      width: H.
      is_causal: whether query i attends to keys j <= i only.
      backward: whether the gradients of query, key and value are computed too.
    """

    length: int
    dtype: str = "float32"
    batch_size: int = 1
    num_heads: int = 8
    num_kv_heads: int = 8
    width: int = 64
    is_causal: bool = True
    backward: bool = False

    @property
    def direction(self) -> str:
        """'forward' or 'forward+backward'."""
        return "forward+backward" if self.backward else "forward"

    @property
    def visible(self) -> masks.Mask | None:
        """The mask; None if every query attends to all keys."""
        return masks.causal() if self.is_causal else None

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products over the visible pairs.

        There are two products forward and five backward, with the scores computed
        again. All implementations are credited with this number, also those that
        compute hidden pairs or keep the scores.
        """
        keys = (self.length + 1) / 2 if self.is_causal else self.length
        pairs = self.batch_size * self.num_heads * self.length * keys
        return pairs * 2 * self.width * (7 if self.backward else 2)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of query, key, value and, if needed, the cotangent."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        heads += [self.num_heads] * self.backward
        return [
            jax.ShapeDtypeStruct(
                (self.batch_size, self.length, n, self.width), jnp.dtype(self.dtype)
            )
            for n in heads
        ]

    def arrays(self) -> list[Array]:
        """Draws normal random numbers of these shapes, the same in every run."""
        rng = np.random.default_rng(0)
        return [
            jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)
            for x in self.shapes()
        ]


class Runner(NamedTuple):
    """An implementation bound to one piece of work.

    Attributes:
      run: does the work, and returns when it is done.
      outputs: does the work with a cotangent or None; returns o and, with a cotangent,
        dq, dk and dv.
      compile_seconds: time to trace and compile; None if nothing was compiled.
      temporary_bytes: peak memory of the compiled program beside its arguments and
        results; None if unknown.
      traces: returns how often the function has been traced so far, or None.
    """

    run: Callable[[], Any]
    outputs: Callable[[Array | None], Outputs]
    compile_seconds: float | None = None
    temporary_bytes: int | None = None
    traces: Callable[[], int | None] = lambda: None


def jax_runners(
    kernel: Kernel, arrays: Sequence[Array], *, mask: masks.Mask | None = None
) -> dict[str, Runner]:
    """Makes the runners 'jit' and 'eager' of `kernel(query, key, value)`.

    Args:
      kernel: a function that jax can trace.
      arrays: query, key, value and, for gradients, the output's cotangent.
      mask: passed to the kernel as `mask=` unless it is None; its arrays are arguments
        of the compiled program, not constants in it.
    """
    count = 0

    def function(mask: masks.Mask | None, *arrays: Array) -> Any:
        bound = kernel if mask is None else functools.partial(kernel, mask=mask)
        return pair(bound, backward=len(arrays) > 3)(*arrays)

    def counted(mask: masks.Mask | None, *arrays: Array) -> Any:
        nonlocal count
        count += 1
        return function(mask, *arrays)

    compiled = jax.jit(counted)
    seconds, temporary = compilation.cost(compiled, [mask, *arrays])

    def runner(function: Kernel) -> Runner:
        def outputs(cotangent: Array | None) -> Outputs:
            rest = [] if cotangent is None else [cotangent]
            results: Outputs = function(mask, *arrays[:3], *rest)
            return results

        return Runner(
            lambda: jax.block_until_ready(function(mask, *arrays)),
            outputs,
            temporary_bytes=temporary,
        )

    jitted = runner(compiled)._replace(compile_seconds=seconds, traces=lambda: count)
    return {"jit": jitted, "eager": runner(function)}


def pair(kernel: Kernel, *, backward: bool) -> Kernel:
    """Makes (q, k, v) -> (o,) or, with `backward`, (q, k, v, do) -> (o, dq, dk, dv)."""

    def forward(query: Array, key: Array, value: Array) -> Any:
        return (kernel(query, key, value),)

    def both(query: Array, key: Array, value: Array, cotangent: Array) -> Any:
        output, pullback = jax.vjp(kernel, query, key, value)
        return output, *pullback(cotangent)

    return both if backward else forward


class Expected(NamedTuple):
    """The results of the reference for a sample of query rows.

    Attributes:
      rows: positions of the sample, the same in every batch row and head.
      outputs: o in these rows; with gradients also dq of all rows, dk and dv.
      cotangent: the output's cotangent, which is 0 outside of these rows; None without
        gradients.
    """

    rows: Int[np.ndarray, "R"]
    outputs: list[np.ndarray]
    cotangent: Array | None

    def error(self, runner: Runner) -> float:
        """Computes the largest error as a share of the largest expected value.

        Args:
          runner: the implementation that is checked.

        Returns:
          The error; NaN if an output is not finite.

        Raises:
          WrongShape: the outputs cannot be compared.
        """
        output, *gradients = runner.outputs(self.cotangent)
        if not np.isfinite(_numpy(output.sum())):
            return float("nan")
        results = [output[:, self.rows], *gradients]
        if [x.shape for x in results] != [x.shape for x in self.outputs]:
            raise WrongShape(
                f"expected outputs {[x.shape for x in self.outputs]} in "
                f"{len(self.rows)} rows, got {[tuple(x.shape) for x in results]}"
            )
        shares = [
            np.max(np.abs(_numpy(x) - y)) / max(np.max(np.abs(y)), 1e-30)
            for x, y in zip(results, self.outputs, strict=True)
        ]
        return float(np.max(shares))


def expected(arrays: Sequence[Array], visible: masks.Mask | None) -> Expected:
    """Computes the expected results with the reference, in float32 at least.

    Args:
      arrays: query, key, value and, for gradients, the output's cotangent.
      visible: the mask; None if every query attends to all keys.
    """
    query, key, value, *cotangents = arrays
    rows = sampled_rows(query.shape, key.shape[1])
    keys = np.arange(key.shape[1], dtype=np.int32)
    kernel = functools.partial(
        attention.dot_product_attention,
        mask=None if visible is None else visible.at(rows, keys),
        implementation="reference",
        precision="highest",
    )
    reference = jax.jit(pair(kernel, backward=bool(cotangents)))
    wide = [x.astype(numerics.accumulation_dtype(x.dtype)) for x in arrays]
    wide[0] = wide[0][:, rows]
    wide[3:] = [x[:, rows] for x in wide[3:]]
    outputs = list(map(_numpy, reference(*wide)))
    if not cotangents:
        return Expected(rows, outputs, None)
    gradient = np.zeros(query.shape, outputs[1].dtype)
    gradient[:, rows] = outputs[1]
    outputs[1] = gradient
    (cotangent,) = cotangents
    sparse = jnp.zeros_like(cotangent).at[:, rows].set(cotangent[:, rows])
    return Expected(rows, outputs, sparse)


def sampled_rows(shape: tuple[int, ...], keys: int) -> Int[np.ndarray, "R"]:
    """Samples query positions: all, or the first, the last and evenly spread ones.

    Args:
      shape: [B T N H] of the query.
      keys: S, number of keys.
    """
    batch_size, length, num_heads, _ = shape
    affordable = SCORES // max(batch_size * num_heads * keys, 1)
    count = min(length, ROWS, max(affordable, 2))
    edges = np.linspace(0, length, count + 1).astype(int)
    rows = np.random.default_rng(1).integers(edges[:-1], edges[1:])
    if count > 1:
        rows[[0, -1]] = 0, length - 1
    return rows.astype(np.int32)


def tolerance(dtype: str) -> float:
    """Returns the error up to which a result counts as right on this platform."""
    if dtype == "float32" and jax.default_backend() != "cpu":
        return ACCELERATOR_TOLERANCE
    return TOLERANCE[dtype]


def memory_limit() -> int:
    """Returns the bytes for temporary arrays: the device's, or half of the host's."""
    statistics = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _numpy(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype == np.float64 else array.astype(np.float32)
