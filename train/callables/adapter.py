"""A stranger's callable, made into what `attention.properties.probes` examine.

    tokens int [B T] -> logits [B T V]
    x float32 [B T E] -> y [B T ...]

Whatever is wrong with it (another shape, hidden randomness, memory of earlier calls, an
exception that it raises) is a ValueError of one line that says what was expected and
what came. At lengths and batch sizes that nobody asked for it may refuse what it likes.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from attention.properties import calls, findings, movements, subjects
from train import foreign
from train.callables import frameworks, modes

# Rows of the two batches on which the shape of the output is checked.
_ROWS = (2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(subjects.Subject):
    """A subject, and what was learned about the callable on the way.

    Attributes:
      name: name of the callable, such as 'package.module:callable'.
      callable: the callable as it was imported.
      framework: 'JAX', 'NumPy' or 'PyTorch'.
      notes: lines for the reader of the verdict.
    """

    name: str
    callable: Callable[..., Any]
    framework: frameworks.Framework
    notes: tuple[str, ...]


def adapt(
    fn: Callable[..., Any],
    *,
    name: str,
    length: int,
    vocab_size: int | None,
    width: int | None,
    seed: int,
    token_edit_budget: int,
) -> Target:
    """Finds out how the callable is to be called, and that it can be examined.

    Args:
      fn: a callable of JAX, NumPy or PyTorch.
      name: its name, for the reader.
      length: number T of positions.
      vocab_size: number V of ids of a callable of tokens; None for vectors.
      width: width E of a callable of vectors; None for tokens.
      seed: seed of inputs, and of what training mode draws.
      token_edit_budget: about how many edits of tokens the probe 'edits' makes.

    Raises:
      ValueError: it raises at this length, returns something else than logits
        [B T V] or vectors [B T ...], or other numbers on equal input.
    """

    def example(rows: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        if vocab_size is not None:
            return rng.integers(vocab_size, size=(rows, length), dtype=np.int32)
        assert width is not None
        return rng.standard_normal((rows, length, width), np.float32)

    inputs, more = map(example, _ROWS)
    try:
        with foreign.guarded():
            evaluated = modes.evaluation(fn, seed=seed)
            framework, traceable = frameworks.detect(evaluated, inputs)
            convert = frameworks.converter(evaluated, framework)
            # Compiled anew by each, or hidden randomness would be a constant.
            evaluation, second = (
                frameworks.as_numpy(evaluated, convert, traceable=traceable)
                for _ in range(2)
            )
            outputs = evaluation(inputs)
            # A callable with a memory gives itself away after another input.
            evaluation(inputs[::-1].copy())
            again = second(inputs)
    except calls.Refused as error:
        raise ValueError(f"with {_words(inputs)} it {error}") from error
    _check_shape(inputs, outputs, vocab_size)
    notes = _check_determinism(outputs, again)
    # A batch of two steps of time, or of as many as there are features, would do.
    with contextlib.suppress(calls.Refused):
        _check_shape(more, evaluation(more), vocab_size)
    training, more_notes = _in_training(fn, convert, inputs, traceable, seed)
    gradient = None
    differentiable = traceable or framework == "PyTorch"
    floating = jnp.issubdtype(outputs.dtype, jnp.floating)
    if vocab_size is None and differentiable and floating:
        gradient = frameworks.gradient(evaluated, convert, framework, seed=seed)
    return Target(
        fn=evaluation,
        length=length,
        vocab_size=vocab_size,
        width=width,
        training=training,
        gradient=gradient,
        seed=seed,
        token_edit_budget=token_edit_budget,
        name=name,
        callable=fn,
        framework=framework,
        notes=(*notes, *more_notes),
    )


def _in_training(
    fn: Callable[..., Any],
    convert: frameworks.Convert,
    inputs: np.ndarray,
    traceable: bool,
    seed: int,
) -> tuple[frameworks.Call | None, list[str]]:
    """The callable in training mode, if it has one that repeats itself; notes."""
    trained = modes.training(fn, seed=seed)
    if trained is None:
        return None, []
    traceable = traceable and frameworks.is_traceable(trained, inputs)
    training = frameworks.as_numpy(trained, convert, traceable=traceable)
    if traceable:
        return training, []
    try:
        moved = movements.movement(training(inputs), training(inputs))
    except calls.Refused:  # which the probe will report
        # A keyword `key` may stand for the keys of attention.
        return (None if modes.only_a_key(fn) else training), []
    if moved.any():
        return None, ["training mode draws at random where no seed reaches: not probed"]
    return training, []


def _check_shape(
    inputs: np.ndarray, outputs: np.ndarray, vocab_size: int | None
) -> None:
    """Raises ValueError unless the outputs are [B T V] or [B T ...]."""
    batch, length = inputs.shape[:2]
    wanted = f"[{batch} {length} {vocab_size or '...'}]"
    fits = outputs.shape[:2] == (batch, length) and outputs.size
    hint = ""
    if outputs.shape[:2] == (length, batch):
        hint = ": time stands before the batch"
    elif outputs.shape[:1] == (length,):
        hint = ": the batch axis is missing"
    elif fits and vocab_size is not None:
        fits = outputs.ndim > 2 and outputs.shape[-1] == vocab_size
        hint = ": the axis of the vocabulary is missing"
        if outputs.ndim > 2:
            hint = f": is --vocab_size={outputs.shape[-1]} meant?"
    if not fits:
        raise ValueError(
            f"with {_words(inputs)} it returned {_shape(outputs)}, "
            f"expected {wanted}{hint}"
        )


def _check_determinism(outputs: np.ndarray, again: np.ndarray) -> list[str]:
    """A note if two calls differ by rounding; raises ValueError if by more."""
    if outputs.shape != again.shape:
        raise ValueError(
            "not deterministic on equal input: it returned "
            f"{_shape(outputs)}, then {_shape(again)}"
        )
    moved = movements.movement(outputs, again)
    if not moved.any():
        return []
    wide = np.abs(outputs.astype(np.float64))
    largest = np.max(wide, where=np.isfinite(wide), initial=0)
    if moved.max() <= findings.ROUNDING * largest:  # NaN is not
        return [f"two calls with equal input differ by {moved.max():.2g}"]
    row, position = np.argwhere(moved != 0)[0]
    raise ValueError(
        f"not deterministic on equal input: output {position} of row {row} differs "
        f"by {moved[row, position]:.3g} between two calls; does it drop out, or "
        "remember earlier calls?"
    )


def _words(inputs: np.ndarray) -> str:
    kind = "tokens" if inputs.ndim == 2 else "vectors"
    return f"{kind} {inputs.dtype} {_shape(inputs)}"


def _shape(array: np.ndarray) -> str:
    return f"[{' '.join(map(str, array.shape))}]"
