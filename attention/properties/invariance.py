"""Assertions that outputs stay what they are: under padding, permutations, streaming.

    properties.assert_padding_invariant(model, x, lengths)
    properties.assert_permutation_equivariant(layer, x)
    properties.assert_streaming_equals_full(layer, step, cache, x)

A function maps inputs [B T ...] (token ids, or vectors [B T E]) to outputs [B T ...];
it may be JAX's or NumPy's, and is called with arrays of the library of its inputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int, PRNGKeyArray, Shaped

from attention.properties import calls, equivalence, movements


def assert_padding_invariant(
    fn: Callable[[Any, Any], Any],
    inputs: Shaped[movements.AnyArray, "..."],
    lengths: Int[movements.AnyArray, "..."],
    *,
    vocab_size: int | None = None,
    rng: PRNGKeyArray | None = None,
    nan_safe: bool = False,
    atol: float = 1e-5,
) -> None:
    """Asserts that outputs within a row's length do not depend on what is beyond it.

    They keep their bits under any padding, and equal those of the row alone, cut to
    its length, within `atol`.

    Args:
      fn: maps inputs [B T ...] and lengths [B] to outputs [B T ...].
      inputs: token ids [B T], or floating point vectors [B T E].
      lengths: of the rows, int [B], from 1 to T.
      vocab_size: number V of ids, for tokens; None for vectors.
      rng: key of the padding; None stands for a fixed one.
      nan_safe: whether NaN and infinities are padding that must not matter either.
      atol: largest difference from the row alone.

    Raises:
      AssertionError: naming row, position and size of the first difference.
      ValueError: on inputs that are neither tokens nor vectors, tokens without
        `vocab_size`, lengths that are not such or leave nothing to pad, or if fn
        returns something else than one array [B T ...].
    """
    rows = calls.checked_inputs(inputs, vocab_size=vocab_size)
    lengths = np.asarray(lengths)
    in_range = (lengths > 0) & (lengths <= rows.shape[1])
    if lengths.shape != rows.shape[:1] or not in_range.all():
        raise ValueError(
            f"expected {len(rows)} lengths from 1 to {rows.shape[1]}, "
            f"got {lengths.tolist()}"
        )
    inside = np.arange(rows.shape[1]) < lengths[:, None]
    if inside.all():
        raise ValueError(f"expected a length below {rows.shape[1]}: nothing is padded")
    base = calls.checked_output(fn(inputs, lengths), rows)
    generator = np.random.default_rng(calls.numpy_seed(rng))
    fills: list[np.ndarray]
    if vocab_size is not None:
        fills = [generator.integers(vocab_size, size=rows.shape) for _ in range(2)]
    else:
        sizes = (0, 1, 1e3, np.nan, np.inf) if nan_safe else (0, 1, 1e3)
        fills = [c * np.abs(generator.standard_normal(rows.shape)) for c in sizes]
    beyond = ~inside.reshape(inside.shape + (1,) * (rows.ndim - 2))
    for fill in fills:
        padded = np.where(beyond, fill.astype(rows.dtype), rows)
        output = fn(calls.in_library_of(inputs, padded), lengths)
        outputs = calls.checked_output(output, rows)
        moved = np.where(inside, movements.movement(base, outputs), 0)
        for row, position in np.argwhere(moved != 0)[:1]:
            raise AssertionError(
                f"output {position} of row {row} sees the padding after its length "
                f"{lengths[row]}: it moved by {moved[row, position]:.3g}"
            )
    for row, length in enumerate(lengths.tolist()):
        cut = rows[row : row + 1, :length]
        output = fn(calls.in_library_of(inputs, cut), lengths[row : row + 1])
        alone = calls.checked_output(output, cut)[0]
        what = f"row {row} padded, against the row alone,"
        equivalence.assert_close(base[row, :length], alone, what, rtol=0.0, atol=atol)


def assert_permutation_equivariant(
    fn: movements.Function,
    inputs: Shaped[movements.AnyArray, "..."],
    *,
    rng: PRNGKeyArray | None = None,
    atol: float = 1e-5,
) -> None:
    """Asserts that permuted inputs give permuted outputs: f(x[:, p]) = f(x)[:, p].

    True of attention without mask and positions, of nothing causal.

    Args:
      fn: maps [B T ...] to [B T ...].
      inputs: token ids or vectors.
      rng: key of the permutation; None stands for a fixed one.
      atol: largest difference.

    Raises:
      AssertionError: naming the largest difference.
      ValueError: on fewer than 2 positions, or if fn returns something else than one
        array [B T ...].
    """
    calls.require_two_positions(inputs)
    generator, length = np.random.default_rng(calls.numpy_seed(rng)), inputs.shape[1]
    outputs = calls.checked_output(fn(inputs), inputs)
    for p in (generator.permutation(length), np.roll(np.arange(length), 1)):
        permuted = fn(calls.in_library_of(inputs, np.asarray(inputs)[:, p]))
        equivalence.assert_close(
            calls.checked_output(permuted, inputs),
            outputs[:, p],
            f"under the permutation {p.tolist()}",
            rtol=0.0,
            atol=atol,
        )


def assert_streaming_equals_full(
    fn: movements.Function,
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    inputs: Shaped[movements.AnyArray, "B T ..."],
    *,
    atol: float = 1e-5,
) -> None:
    """Asserts that `step`, fed in pieces, gives the outputs of `fn` on the whole.

    One position at a time, all at once, and in two uneven pieces either way round.

    Args:
      fn: maps [B T ...] to [B T ...].
      step: maps a state and the next inputs [B t ...] to (state, outputs [B t ...]).
      state: state before the first input; it is used several times.
      inputs: token ids or vectors.
      atol: largest difference.

    Raises:
      AssertionError: naming the pieces and the largest difference.
    """
    length = inputs.shape[1]
    third = max(length // 3, 1)
    splits = ([1] * length, [length], [third, length - third], [length - third, third])
    full = np.asarray(fn(inputs))
    for pieces in splits:
        now, start, outputs = state, 0, []
        for piece in filter(None, pieces):
            now, output = step(now, inputs[:, start : start + piece])
            start += piece
            outputs.append(np.asarray(output))
        equivalence.assert_close(
            np.concatenate(outputs, axis=1),
            full,
            f"in pieces of {pieces}",
            rtol=0.0,
            atol=atol,
        )
