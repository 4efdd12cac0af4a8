"""Attention on this device against float64: small cases, every implementation.

    w = softmax(q kᵀ / √H, over the visible keys);   o = w v;   dv = wᵀ do
    ds = w ∘ (do vᵀ - rowsum(w ∘ do vᵀ));   dq = ds k / √H;   dk = dsᵀ q / √H

The oracle is these lines in NumPy, on inputs rounded to the dtype and with the visible
pairs written out as arrays: it shares nothing with what it judges. Programs are
compiled side by side, since that is what takes the time.
"""

import concurrent.futures
import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import attention
from attention import dot_product, masks
from train import foreign
from train.bench import workload

Row = dict[str, Any]
# These support every argument; the other implementations may refuse some.
HONOUR_ALL = frozenset({"reference", "flash"})
RESULTS = ("out", "dq", "dk", "dv")


class Variant(NamedTuple):
    """Dtype and precision of a case, and its tolerances.

    Attributes:
      dtype: dtype of query, key and value.
      precision: value of jax_default_matmul_precision; '' leaves it unchanged.
      output: largest error of the output, as a share of the largest expected value.
      gradients: largest error of the gradients, as a share of the largest expected
        value.
    """

    dtype: str
    precision: str
    output: float
    gradients: float


# The tolerances of the output are those of case B074 in float32, of B030 in bfloat16.
# By default a GPU rounds the operands of float32 products to the 10 bits of TF32, and
# gradients pass through more products.
FLOAT32 = Variant("float32", "", 2e-3, 1e-2)
HIGHEST = Variant("float32", "highest", 1e-5, 1e-5)
BFLOAT16 = Variant("bfloat16", "", 2e-2, 2e-2)
FLOAT16 = Variant("float16", "", 5e-3, 1e-2)
VARIANTS = (FLOAT32, HIGHEST, BFLOAT16, FLOAT16)


class Case(NamedTuple):
    """A call of `attention.dot_product_attention`.

    Attributes:
      sizes: B, T = S, N, K and H = D.
      static: keyword arguments that are not arrays.
      arrays: keyword arguments that are arrays, or masks that hold arrays.
      visible: the mask as an array, for the oracle; True where a query attends.
    """

    sizes: tuple[int, int, int, int, int]
    static: Mapping[str, Any]
    arrays: Mapping[str, Any]
    visible: Bool[np.ndarray, "#B #N #T S"]

    def inputs(self, dtype: str) -> list[Array]:
        """Draws query, key, value and the output's cotangent: normal random numbers."""
        B, L, N, K, H = self.sizes
        rng = np.random.default_rng(0)
        return [
            jnp.asarray(rng.standard_normal((B, L, n, H), np.float32), dtype)
            for n in (N, K, K, N)
        ]


def cases(length: int, width: int) -> dict[str, Case]:
    """Makes every case, by name.

    Args:
      length: T = S of most cases.
      width: H = D of most cases.
    """
    i, j = np.ogrid[:length, :length]
    causal, near = (j <= i)[None, None], i - j <= length // 8
    sizes = (2, length, 4, 4, width)
    starts = [length // 5, length // 2], [length // 3, length - 1]
    ids = np.array([np.searchsorted(x, i[:, 0], side="right") for x in starts])
    segments = masks.segments(ids.astype(np.int32)) & masks.causal()
    same = (ids[:, :, None] == ids[:, None])[:, None]
    keys, queries = np.array([[5 * length // 8, length], [length, length // 2]])
    seen = (j < keys[:, None, None]) & (i < queries[:, None, None])
    padding = np.random.default_rng(2).random((4, 1, 1, 32)) < 0.7
    flag = {"is_causal": True}
    window = {"local_window_size": (length // 8, 0)}
    lengths = {"key_value_seq_lengths": keys, "query_seq_lengths": queries}
    return {
        "B030": Case((4, 32, 4, 4, 16), {}, {"mask": padding}, padding),
        "B074": Case(sizes, {}, {}, np.ones((1, 1, 1, length), bool)),
        "causal": Case(sizes, flag, {}, causal),
        "window": Case(sizes, window, {}, causal & near),
        "segments": Case(sizes, {}, {"mask": segments}, causal & same),
        "lengths": Case(sizes, {}, lengths, seen[:, None]),
        "grouped": Case((2, length, 4, 2, width), flag, {}, causal),
    }


CASES = tuple(cases(8, 8))


def oracle(
    arrays: Sequence[Any], visible: Bool[np.ndarray, "#B #N #T S"]
) -> list[Float[np.ndarray, "B L _ H"]]:
    """Computes output and gradients of query, key and value in float64.

    Args:
      arrays: query, key, value and the output's cotangent.
      visible: the mask, True where a query attends.

    Returns:
      o, dq, dk and dv.
    """
    q, k, v, do = (np.asarray(x).astype(np.float64) for x in arrays)
    B, S, K, H = k.shape
    k, v = (np.repeat(x, q.shape[2] // K, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H)
    w = np.where(visible, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = w.sum(axis=-1, keepdims=True)
    w /= np.where(total == 0, 1, total)
    dw = np.einsum("btnh,bsnh->bnts", do, v)
    ds = w * (dw - np.sum(w * dw, axis=-1, keepdims=True)) / math.sqrt(H)
    of_keys = (
        np.einsum("bnts,btnh->bsnh", ds, q),
        np.einsum("bnts,btnh->bsnh", w, do),
    )
    return [
        np.einsum("bnts,bsnh->btnh", w, v),
        np.einsum("bnts,bsnh->btnh", ds, k),
        *(x.reshape(B, S, K, -1, H).sum(axis=3) for x in of_keys),
    ]


def check(
    variants_of: Mapping[str, Sequence[Variant]], *, length: int, width: int
) -> Iterator[Row]:
    """Checks every implementation in the cases.

    Args:
      variants_of: for each name of `CASES` that is checked, its variants.
      length: T = S of most cases.
      width: H = D of most cases.

    Yields:
      A row for each case, variant and implementation. `chosen` is whether None selects
      this implementation there. The `verdict` is 'right', 'wrong', 'refused' or
      'failed', which means that it refused an argument that it must support; all but
      the first have a `reason`.
    """
    table = cases(length, width)
    jobs = [
        (implementation, name, table[name], variant)
        for name, variants in variants_of.items()
        for variant in variants
        for implementation in attention.IMPLEMENTATIONS
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(_check, *zip(*jobs, strict=True))


def _check(implementation: str, name: str, case: Case, variant: Variant) -> Row:
    inputs = case.inputs(variant.dtype)
    choice = dot_product.explain(*inputs[:3], **case.static, **case.arrays)
    chosen = choice.startswith(f"{implementation}:")
    row = {
        "implementation": implementation,
        "chosen": chosen,
        "case": name,
        **dict(zip("BTNKH", case.sizes, strict=True)),
        "dtype": variant.dtype,
        "precision": variant.precision,
    }
    try:
        results = _run(implementation, case, variant.precision, inputs)
    # Compilers and drivers: anything may go wrong.
    except Exception as error:
        may_not = chosen or implementation in HONOUR_ALL
        verdict = "failed" if may_not else "refused"
        return row | {"verdict": verdict, "reason": foreign.blame(error)}
    return row | _judge(results, oracle(inputs, case.visible), variant)


def _run(
    implementation: str, case: Case, precision: str, inputs: Sequence[Array]
) -> Sequence[np.ndarray]:
    """Computes output and gradients by one program."""

    def both(arrays: Mapping[str, Any], *inputs: Array) -> Any:
        kernel = functools.partial(
            attention.dot_product_attention,
            implementation=implementation,
            **case.static,
            **arrays,
        )
        return workload.pair(kernel, backward=True)(*inputs)

    # The setting holds for this thread.
    with (
        jax.default_matmul_precision(precision)
        if precision
        else contextlib.nullcontext()
    ):
        outputs = jax.jit(both)(case.arrays, *inputs)
    return [np.asarray(x) for x in outputs]


def _judge(
    results: Sequence[np.ndarray], expected: Sequence[np.ndarray], variant: Variant
) -> Row:
    """Returns errors and tolerances of each result, and the verdict on all of them."""
    tolerances = dict.fromkeys(RESULTS, variant.gradients) | {"out": variant.output}
    errors, reasons = {}, []
    for name, x, y in zip(RESULTS, results, expected, strict=True):
        if (x.shape, x.dtype) != (y.shape, jnp.dtype(variant.dtype)):
            reasons.append(f"{name} is {x.dtype}{list(x.shape)}, not {list(y.shape)}")
            continue
        error = float(np.max(np.abs(x.astype(np.float64) - y)) / np.max(np.abs(y)))
        errors[name] = error if math.isfinite(error) else None
        if not error <= tolerances[name]:  # NaN is not
            reasons.append(f"{name} is off by {error:.1e} of the largest value")
    return {
        "errors": errors,
        "tolerances": tolerances,
        "verdict": "wrong" if reasons else "right",
        "reason": "; ".join(reasons),
    }
