"""What the claims about flash attention measure: ratios, bytes and seconds.

float32, 8 heads of 64 unless said otherwise. Ratios are of medians measured in turns;
each side is compared with the reference before it is timed. Documents, lengths and all
other data are the same in every run.
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
# Around the sizes of blocks and vectors, and between them.
SHORT = (1, 2, 3, 8, 17, 32, 63, 64, 65, 96, 128, 200, 256, 300, 384, 511, 512)
DOCUMENTS = 12


class Skipped(Exception):
    """A claim that cannot be tested here."""


class Wrong(Exception):
    """A result that differs from the reference."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How the claims are measured.

    Attributes:
      divisor: of every length; 1 where the claims are judged.
      rounds: measurements of each side, at most.
      seconds: after which a comparison ends, once each was measured three times.
    """

    divisor: int
    rounds: int
    seconds: float

    def length(self, full: int) -> int:
        """A length or the size of a block."""
        return max(full // self.divisor, 1)

    def medians(self, *runs: Callable[[], Any]) -> list[float]:
        """Seconds of each, measured in turns."""
        seconds = stopwatch.interleaved(
            {str(i): run for i, run in enumerate(runs)},
            stopwatch.turns(self.rounds, seconds=self.seconds),
        )
        return [float(np.median(x)) for x in seconds.values()]

    def ratio(self, run: Callable[[], Any], other: Callable[[], Any]) -> float:
        """How long `run` takes, as a share of `other`."""
        ours, theirs = self.medians(run, other)
        return ours / theirs


def _flash(
    work: workload.Work,
    arrays: list[jax.Array],
    visible: masks.Mask | None,
) -> workload.Runner:
    """Ours, compiled and found right."""
    kernel = functools.partial(attention.dot_product_attention, implementation=OURS)
    runner = workload.jax_runners(kernel, arrays, mask=visible)["jit"]
    _check(runner, workload.expected(arrays, visible), work.dtype)
    return runner


def _check(runner: workload.Runner, expected: workload.Expected, dtype: str) -> None:
    found = implementations.check(runner, expected, dtype)
    if found["verdict"] != "measured":
        raise Wrong(found["reason"])


def against(name: str, mode: str, is_causal: bool, scale: Scale) -> list[float]:
    """Forward and forward+backward at T = 4096 against another implementation."""
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
    """Flash under a mask against flash that sees all, or all the past."""
    work = workload.Work(length=scale.length(length), is_causal=is_causal)
    arrays = work.arrays()
    ours = _flash(work, arrays, mask(scale, work.length))
    full = _flash(work, arrays, work.visible)
    return [scale.ratio(ours.run, full.run)]


def window(scale: Scale, length: int) -> masks.Mask:
    """The last 256 keys."""
    del length
    return masks.sliding_window(scale.length(256))


def documents(scale: Scale, length: int) -> masks.Mask:
    """Documents of uneven lengths."""
    del scale
    rng = np.random.default_rng(0)
    starts = 1 + np.sort(rng.choice(length - 1, DOCUMENTS - 1, replace=False))
    ids = np.searchsorted(starts, np.arange(length), side="right")
    return masks.segments(jnp.asarray(ids, jnp.int32)) & masks.causal()


def bigbird(scale: Scale, length: int) -> masks.Mask:
    """Five blocks: three around the query, the first, and one at random."""
    block = scale.length(128)
    return masks.bigbird(block, 3, 1, 1, 0, length=length)


def rows_of_lengths(scale: Scale) -> list[float]:
    """Rows of several lengths in one call, against calls of one row each."""
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
    """The worst of `SHORT`: implementation=None against the better of two."""
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
        ours, *others = patient.medians(*runs)
        ratios.append(ours / min(others))
    return [max(ratios)]


def memory_doubles(scale: Scale) -> list[float]:
    """The larger factor by which temporary memory grows from T to 2T to 4T."""
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
    """Gigabytes of a process that does this work."""
    peak, error = memory.in_child(
        dataclasses.replace(work, length=scale.length(work.length)),
        window=None if window is None else scale.length(window),
        implementation=OURS,
    )
    if not error <= workload.tolerance(work.dtype):
        raise Wrong(f"off by {error:.1e} of the largest value")
    return [peak / 1e9]


def compile_seconds(scale: Scale) -> list[float]:
    """Seconds to trace and compile forward+backward, under the slowest mask."""
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
    """A mask of every constructor, for sequences of this length.

    Args:
      length: T = S.
      size: of windows, chunks, prefixes and documents; blocks are an eighth of it.
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
