"""Checkpoints of a run: one directory for each saved step, the latest few kept.

    workdir/checkpoints/20/   written by orbax under another name, then renamed

A name that is a number therefore belongs to a complete checkpoint, unless something
else than a save made it: so the marker that orbax leaves is asked for as well.
"""

import pathlib
import shutil
from typing import TypeVar

import jax
import orbax.checkpoint as ocp
from absl import logging

KEPT = 2
MARKER = "_CHECKPOINT_METADATA"

Tree = TypeVar("Tree")


def save(directory: pathlib.Path, step: int, state: Tree) -> None:
    """Writes a checkpoint, and removes those that are no longer needed.

    Args:
      directory: where the checkpoints of the run lie; made if it is missing.
      step: names the checkpoint. What stands under that name is replaced.
      state: tree of arrays.
    """
    directory = directory.absolute()
    _checkpointer().save(
        directory / str(step), args=ocp.args.StandardSave(state), force=True
    )
    complete, others = _contents(directory)
    for path in others + complete[:-KEPT]:
        shutil.rmtree(path)


def latest_step(directory: pathlib.Path) -> int | None:
    """The step of the newest complete checkpoint, None if there is none.

    Args:
      directory: where the checkpoints of the run lie, or would lie.

    Returns:
      The step. What is not complete is passed over with a warning.
    """
    complete, others = _contents(directory)
    for path in others:
        logging.warning("%s is not a complete checkpoint: passed over", path)
    return int(complete[-1].name) if complete else None


def restore(directory: pathlib.Path, step: int, like: Tree) -> Tree:
    """Reads a checkpoint.

    Args:
      directory: where the checkpoints of the run lie.
      step: which one, as `latest_step` says.
      like: tree of arrays, or of their shapes and dtypes as `jax.eval_shape` gives it.

    Returns:
      The tree that was saved, with the structure and the dtypes of `like`.

    Raises:
      ValueError: the checkpoint has another structure or other shapes.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like
    )
    return _checkpointer().restore(
        directory.absolute() / str(step), args=ocp.args.StandardRestore(abstract)
    )


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _contents(
    directory: pathlib.Path,
) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Complete checkpoints in the order of their steps, and what a save broke off."""
    complete, others = [], []
    for path in directory.glob("[0-9]*"):
        if path.name.isdecimal() and (path / MARKER).is_file():
            complete.append(path)
        elif path.is_dir():
            others.append(path)
    return sorted(complete, key=lambda path: int(path.name)), others
