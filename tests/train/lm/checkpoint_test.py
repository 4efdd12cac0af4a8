"""Checkpoints: exact round trip, completeness, the few that are kept."""

import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from train.lm import checkpoint


def _state(step):
    """A tree of many kinds of leaves and nodes, as training has them."""
    params = {"kernel": jnp.full((2, 3), step, jnp.float32), "bias": jnp.ones(3)}
    transformation = optax.adamw(0.1, mask={"kernel": True, "bias": False})
    return {
        "step": jnp.int32(step),
        "params": params,
        "opt_state": transformation.init(params),
        "narrow": jnp.arange(4, dtype=jnp.bfloat16) / 3,
        "special": jnp.array([jnp.nan, -jnp.inf, -0.0]),
    }


def _names(directory):
    return {path.name for path in directory.iterdir()}


def test_round_trip_is_exact(tmp_path):
    """Case B124: values bit for bit, dtypes and tree; a description of it will do."""
    directory = tmp_path / "runs" / "checkpoints"
    state = _state(7)
    checkpoint.save(directory, 7, state)
    for like in (state, jax.eval_shape(lambda: _state(7))):
        restored = checkpoint.restore(directory, 7, like)
        chex.assert_trees_all_equal_structs(restored, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)
        for got, expected in zip(
            jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
        ):
            assert isinstance(got, jax.Array)
            # Bytes: NaN equals NaN, and -0.0 is not 0.0.
            assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


def test_a_saved_step_is_replaced_and_an_earlier_one_is_saved(tmp_path):
    for step, value in ((10, 1), (10, 2), (9, 3)):
        checkpoint.save(tmp_path, step, _state(value))
    assert _names(tmp_path) == {"9", "10"}
    assert checkpoint.restore(tmp_path, 10, _state(0))["step"] == 2
    assert checkpoint.restore(tmp_path, 9, _state(0))["step"] == 3


def test_a_checkpoint_without_a_folder_for_the_tree_is_read(tmp_path):
    """As orbax's `Checkpointer` writes one."""
    ocp.Checkpointer(ocp.StandardCheckpointHandler()).save(
        tmp_path / "5", args=ocp.args.StandardSave(_state(5))
    )
    assert checkpoint.latest_step(tmp_path) == 5
    restored = checkpoint.restore(tmp_path, 5, _state(0))
    chex.assert_trees_all_equal(restored, _state(5))
    checkpoint.save(tmp_path, 6, _state(6))
    assert _names(tmp_path) == {"5", "6"}


def test_the_latest_few_are_kept_in_the_order_of_their_steps(tmp_path):
    assert checkpoint.latest_step(tmp_path / "missing") is None
    assert checkpoint.latest_step(tmp_path) is None
    (tmp_path / "notes.txt").write_text("not ours")
    for step in (8, 9, 10):
        checkpoint.save(tmp_path, step, _state(step))
        assert checkpoint.latest_step(tmp_path) == step
    assert _names(tmp_path) == {"9", "10", "notes.txt"}
    restored = checkpoint.restore(tmp_path, 9, _state(0))
    assert restored["step"] == 9
    assert (restored["params"]["kernel"] == 9).all()


def test_a_partial_checkpoint_is_never_chosen(tmp_path, caplog):
    """Case B118: resumes from 10 with a warning, and 20 can be saved again."""
    checkpoint.save(tmp_path, 10, _state(10))
    shutil.copytree(tmp_path / "10", tmp_path / "20")
    (tmp_path / "20" / checkpoint.MARKER).unlink()
    (tmp_path / "30").mkdir()
    (tmp_path / "40.orbax-checkpoint-tmp").mkdir()
    caplog.clear()
    assert checkpoint.latest_step(tmp_path) == 10
    warned = {record.args[0].name for record in caplog.records}
    assert warned == {"20", "30", "40.orbax-checkpoint-tmp"}

    checkpoint.save(tmp_path, 20, _state(20))
    assert _names(tmp_path) == {"10", "20"}
    assert checkpoint.latest_step(tmp_path) == 20
    assert checkpoint.restore(tmp_path, 20, _state(0))["step"] == 20


def test_a_save_that_fails_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    """Case B118: broken off before the rename that completes it."""
    checkpoint.save(tmp_path, 10, _state(10))

    def fail(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointHandler, "async_save", fail)
        with pytest.raises(OSError, match="disk full"):
            checkpoint.save(tmp_path, 20, _state(20))
    assert checkpoint.latest_step(tmp_path) == 10
    checkpoint.save(tmp_path, 20, _state(20))
    assert _names(tmp_path) == {"10", "20"}


def test_is_quiet(tmp_path, capfd, caplog):
    checkpoint.save(tmp_path, 1, _state(1))
    assert checkpoint.latest_step(tmp_path) == 1
    checkpoint.restore(tmp_path, 1, _state(0))
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_another_structure_raises(tmp_path):
    checkpoint.save(tmp_path, 1, {"kernel": jnp.ones(2), "bias": jnp.ones(2)})
    with pytest.raises(ValueError, match="bias"):
        checkpoint.restore(tmp_path, 1, {"kernel": jnp.ones(2)})
