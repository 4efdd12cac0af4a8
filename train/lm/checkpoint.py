"""Checkpoints of a run: one folder for each saved step, the latest few kept.

    workdir/checkpoints/20/   written by orbax under another name, then renamed

`orbax.checkpoint.CheckpointManager` writes, renames and removes. It takes every folder
whose name is a number for a checkpoint, also one that a broken copy or a full disk left
behind; so a folder counts here only if it holds the marker that a finished save leaves.
"""

import pathlib
import shutil
from typing import TypeVar

import jax
import orbax.checkpoint as ocp
from absl import logging

KEPT = 2
MARKER = "_CHECKPOINT_METADATA"
ITEM = "default"

Tree = TypeVar("Tree")


def save(directory: pathlib.Path, step: int, state: Tree) -> None:
    """Writes a checkpoint, and removes all but the latest few.

    Args:
      directory: the folder of the run's checkpoints; made if it is missing.
      step: names the checkpoint. A checkpoint of that step is replaced.
      state: tree of arrays.
    """
    for path in _incomplete(directory):
        shutil.rmtree(path)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEPT, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(
        directory.absolute(),
        item_handlers=ocp.StandardCheckpointHandler(),
        options=options,
    ) as manager:
        if step in manager.all_steps():
            manager.delete(step)
        # A manager skips a step that is not later than its last one, unless forced.
        manager.save(step, args=ocp.args.StandardSave(state), force=True)


def latest_step(directory: pathlib.Path) -> int | None:
    """The step of the newest complete checkpoint, None if there is none.

    Args:
      directory: the folder of the run's checkpoints; it may be missing.

    Returns:
      The step. An incomplete checkpoint is passed over with a warning.
    """
    for path in _incomplete(directory):
        logging.warning("%s is not a complete checkpoint: passed over", path)
    complete = filter(_is_complete, directory.glob("[0-9]*"))
    return max((int(path.name) for path in complete), default=None)


def restore(directory: pathlib.Path, step: int, like: Tree) -> Tree:
    """Reads a checkpoint.

    Args:
      directory: the folder of the run's checkpoints.
      step: a step that `latest_step` returned.
      like: tree of arrays, or of their shapes and dtypes from `jax.eval_shape`.

    Returns:
      The tree that was saved, with the structure and the dtypes of `like`.

    Raises:
      ValueError: the checkpoint has another structure or other shapes.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like
    )
    path = directory.absolute() / str(step)
    # The manager's folder for the tree; checkpoints written without it lack one.
    item = path / ITEM
    return ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(
        item if item.is_dir() else path, args=ocp.args.StandardRestore(abstract)
    )


def _incomplete(directory: pathlib.Path) -> list[pathlib.Path]:
    """The folders that an interrupted save or copy left behind."""
    paths = directory.glob("[0-9]*")
    return [path for path in paths if path.is_dir() and not _is_complete(path)]


def _is_complete(path: pathlib.Path) -> bool:
    return path.name.isdecimal() and (path / MARKER).is_file()
