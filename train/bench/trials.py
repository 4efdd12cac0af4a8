"""The measurements behind the claims about flash attention: ratios, bytes, seconds.

float32, 8 heads of 64 unless stated otherwise. Ratios are those of medians measured in
turns; each side is compared with the reference before it is timed. Documents, lengths
and all other data are the same in every run.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention
from attention import masks
from train.bench import implementations, memory, peers, workload
from train.report import compilation, stopwatch

OURS = "flash"
# Lengths near the sizes of blocks and vectors, and between them.
SHORT = (1, 2, 3, 8, 17, 32, 63, 64, 65, 96, 128, 200, 256, 300, 384, 511, 512)
DOCUMENTS = 12


class Skipped(Exception):
    """The claim cannot be tested here."""


class Wrong(Exception):
    """The result differs from the reference."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How the claims are measured.

    Attributes:
      divisor: divides every length; 1 where the claims are judged.
      rounds: largest number of measurements of each side.
      seconds: time after which a comparison ends, once each was measured three times.
    """

    divisor: int
    rounds: int
    seconds: float

    def length(self, full: int) -> int:
        """Divides a length, or the size of a block."""
        return max(full // self.divisor, 1)

    def medians(self, *runs: Callable[[], Any]) -> list[float]:
        """Measures functions in turns, and returns the median seconds of each."""
        seconds = stopwatch.interleaved(
            {str(i): run for i, run in enumerate(runs)},
            stopwatch.turns(self.rounds, seconds=self.seconds),
        )
        return [float(np.median(x)) for x in seconds.values()]

    def ratio(self, run: Callable[[], Any], other: Callable[[], Any]) -> float:
        """Measures two functions in turns; the time of `run` over that of `other`."""
        ours, theirs = self.medians(run, other)
        return ours / theirs


def _flash(
    work: workload.Work,
    arrays: list[jax.Array],
    visible: masks.Mask | None,
) -> workload.Runner:
    """Compiles flash, and compares it with the reference."""
    kernel = functools.partial(attention.dot_product_attention, implementation=OURS)
    runner = workload.jax_runners(kernel, arrays, mask=visible)["jit"]
    _check(runner, workload.expected(arrays, visible), work.dtype)
    return runner


def _check(runner: workload.Runner, expected: workload.Expected, dtype: str) -> None:
    checked = implementations.check(runner, expected, dtype)
    if checked["verdict"] != "measured":
        raise Wrong(checked["reason"])


def against(name: str, mode: str, is_causal: bool, scale: Scale) -> list[float]:
    """Times flash against another implementation at T = 4096.

    Args:
      name: key of `peers.CONTENDERS`.
      mode: 'jit' or 'eager', of the other implementation.
      is_causal: whether query i attends to keys j <= i only.
      scale: lengths, rounds and time of the measurements.

    Returns:
      The ratios of forward and of forward+backward.
    """
    contender = peers.CONTENDERS[name]
    if reason := contender.missing():
        raise Skipped(reason)
    ratios = []
    for backward in (False, True):
        work = workload.Work(
            length=scale.length(4096), is_causal=is_causal, backward=backward
        )
        arrays = work.arrays()
        theirs = contender.runners(work, arrays)[mode]
        _check(theirs, workload.expected(arrays, work.visible), work.dtype)
        ours = _flash(work, arrays, work.visible)
        ratios.append(scale.ratio(ours.run, theirs.run))
    return ratios


def against_full(
    length: int,
    mask: Callable[[Scale, int], masks.Mask],
    is_causal: bool,
    scale: Scale,
) -> list[float]:
    """Times flash under a sparse mask against full or full causal flash, forward.

    Args:
      length: T = S.
      mask: makes the sparse mask for the scale and a length.
      is_causal: whether the full one is causal.
      scale: lengths, rounds and time of the measurements.

    Returns:
      The ratio.
    """
    work = workload.Work(length=scale.length(length), is_causal=is_causal)
    arrays = work.arrays()
    ours = _flash(work, arrays, mask(scale, work.length))
    full = _flash(work, arrays, work.visible)
    return [scale.ratio(ours.run, full.run)]


def window(scale: Scale, length: int) -> masks.Mask:
    """Makes the mask of the last 256 keys."""
    del length
    return masks.sliding_window(scale.length(256))


def documents(scale: Scale, length: int) -> masks.Mask:
    """Makes the causal mask of packed documents of uneven lengths."""
    del scale
    rng = np.random.default_rng(0)
    starts = 1 + np.sort(rng.choice(length - 1, DOCUMENTS - 1, replace=False))
    ids = np.searchsorted(starts, np.arange(length), side="right")
    return masks.segments(jnp.asarray(ids, jnp.int32)) & masks.causal()


def bigbird(scale: Scale, length: int) -> masks.Mask:
    """Makes bigbird's mask: three blocks around the query, the first, a random one."""
    block = scale.length(128)
    return masks.bigbird(block, 3, 1, 1, 0, length=length)


def rows_of_lengths(scale: Scale) -> list[float]:
    """Times rows of several lengths in one call, against one call for each row."""
    lengths = [scale.length(length) for length in (512, 1024, 2048, 4096)]
    work = workload.Work(length=lengths[-1], batch_size=len(lengths), is_causal=False)
    arrays = work.arrays()
    together = _flash(
        work, arrays, masks.lengths(jnp.asarray(lengths), jnp.asarray(lengths))
    )
    alone = [
        _flash(work, [x[i : i + 1, :length] for x in arrays], None)
        for i, length in enumerate(lengths)
    ]
    return [scale.ratio(together.run, lambda: [runner.run() for runner in alone])]


def short(scale: Scale) -> list[float]:
    """Times implementation=None against the better of two, at the lengths `SHORT`.

    Returns:
      The largest ratio.
    """
    ratios = []
    for length in SHORT[:: scale.divisor]:
        work = workload.Work(length=length)
        arrays = work.arrays()
        expected = workload.expected(arrays, work.visible)
        runs = []
        for name in ("auto", "jax.nn.xla", OURS):
            runner = peers.CONTENDERS[name].runners(work, arrays)["jit"]
            _check(runner, expected, work.dtype)
            runs.append(runner.run)
        # Short calls are noisy, and cheap to repeat.
        patient = dataclasses.replace(scale, rounds=5 * scale.rounds)
        automatic, *named = patient.medians(*runs)
        ratios.append(automatic / min(named))
    return [max(ratios)]


def memory_doubles(scale: Scale) -> list[float]:
    """Measures temporary memory at T, 2T and 4T; returns the larger growth factor."""
    kernel = functools.partial(
        attention.dot_product_attention, is_causal=True, implementation=OURS
    )
    bytes_ = []
    for length in (8192, 16384, 32768):
        work = workload.Work(length=scale.length(length), backward=True)
        program = jax.jit(workload.pair(kernel, backward=True))
        temporary = compilation.cost(program, work.shapes()).temporary_bytes
        if temporary is None:
            raise Skipped("the compiler does not tell")
        bytes_.append(temporary)
    return [max(after / before for before, after in itertools.pairwise(bytes_))]


def peak(window: int | None, work: workload.Work, scale: Scale) -> list[float]:
    """Measures the peak memory, in gigabytes, of a process that does this work.

    Args:
      window: number of keys that a query sees, counting its own position; None for the
        mask of `work`.
      work: shapes, dtype and direction of the call.
      scale: divides the lengths.
    """
    peak, error = memory.in_child(
        dataclasses.replace(work, length=scale.length(work.length)),
        window=None if window is None else scale.length(window),
        implementation=OURS,
    )
    if not error <= workload.tolerance(work.dtype):
        raise Wrong(f"off by {error:.1e} of the largest value")
    return [peak / 1e9]


def compile_seconds(scale: Scale) -> list[float]:
    """Measures the seconds to trace and compile under the slowest built-in mask."""
    work = workload.Work(length=scale.length(65536), backward=True)
    seconds = []
    for mask in built_in(work.length, scale.length(1024)):
        kernel = functools.partial(
            attention.dot_product_attention, mask=mask, implementation=OURS
        )
        jax.clear_caches()
        program = jax.jit(workload.pair(kernel, backward=True))
        seconds.append(compilation.cost(program, work.shapes()).seconds)
    return [max(seconds)]


def built_in(length: int, size: int) -> list[masks.Mask | None]:
    """Makes a mask of every constructor.

    Args:
      length: T = S.
      size: size of windows, chunks, prefixes and documents; blocks are an eighth of it.
    """
    ids = jnp.arange(length, dtype=jnp.int32) // size
    return [
        None,
        masks.causal(),
        masks.window(size, size),
        masks.sliding_window(size),
        masks.prefix(size),
        masks.chunked(size),
        masks.segments(ids),
        masks.segments(ids) & masks.causal(),
        masks.lengths(length - 1),
        masks.dense(jnp.arange(length)[None] < length - 1),
        masks.longformer(size, (0, length // 2)),
        masks.longformer(size, (0, length // 2), causal=True),
        masks.bigbird(max(size // 8, 1), 3, 1, 1, 0, length=length),
        masks.bigbird(max(size // 8, 1), 3, 1, 1, 0, causal=True),
        masks.where(lambda i, j, *, batch, head: (i - j) % 2 == 0),
    ]
