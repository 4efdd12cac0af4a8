"""Tasks: what a row looks like, one right answer by a plain solver, splits apart."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.lm import loss
from train.studies import batches, tasks

ROWS = 64
TASKS = {
    "induction": tasks.Induction(num_symbols=9, length=12),
    "copy": tasks.Copy(num_symbols=5, num_copied=6),
    "brackets": tasks.Brackets(num_kinds=3, max_depth=4, num_pairs=10),
    "recall": tasks.Recall(num_keys=11, num_values=7, num_pairs=4, num_slots=6),
}


@functools.partial(jax.jit, static_argnames=("task", "batch_size"))
def draw(task, rng, step, *, batch_size=ROWS):
    return batches.draw(task, rng, step, batch_size=batch_size)


@functools.cache
def batch(name, step=0, split="train"):
    drawn = draw(TASKS[name], batches.split_rng(0, split), step)
    return batches.Batch(*map(np.asarray, drawn))


def rows(name):
    """All T + 1 tokens of each row, and the mask of its targets."""
    inputs, targets, mask = batch(name)
    tokens = np.concatenate([inputs, targets[:, -1:]], axis=1)
    return [(row.tolist(), counts) for row, counts in zip(tokens, mask, strict=True)]


# Solvers: the answer to the last of the tokens, from them alone.


def induction(tokens):
    *earlier, last = tokens
    return tokens[len(earlier) - earlier[::-1].index(last)]


def copy(tokens):
    bar = tokens.index(5)
    return tokens[len(tokens) - bar - 1]


def brackets(tokens):
    stack = []
    for token in tokens:
        if token < 3:
            stack.append(token)
        else:
            assert stack.pop() == token - 3
    assert len(stack) <= 4
    return stack[-1] + 3


def recall(tokens):
    return dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))[tokens[-1]]


SOLVERS = {
    "induction": induction,
    "copy": copy,
    "brackets": brackets,
    "recall": recall,
}


@pytest.mark.parametrize("name", TASKS)
def test_a_solver_that_sees_the_past_is_always_right(name):
    inputs, targets, mask = batch(name)
    answers = np.full(targets.shape, -1)
    for b, t in np.argwhere(mask):
        answers[b, t] = SOLVERS[name](inputs[b, : t + 1].tolist())
    np.testing.assert_array_equal(answers[mask], targets[mask])
    vocab_size = TASKS[name].vocab_size
    logits = np.where(answers[..., None] == np.arange(vocab_size), 100.0, 0.0)
    right, count = jax.jit(batches.hits)(np.float32(logits), targets, mask)
    assert right == count == mask.sum()
    nats, counted = jax.jit(loss.cross_entropy)(np.float32(logits), targets, mask)
    assert counted == count and nats < 1e-6


@pytest.mark.parametrize("name", TASKS)
def test_batches_have_the_form_of_text(name):
    """int32 ids below V, each target the next input, rows with something to answer."""
    task, (inputs, targets, mask) = TASKS[name], batch(name)
    assert inputs.shape == targets.shape == mask.shape == (ROWS, task.length)
    assert inputs.dtype == targets.dtype == np.int32 and mask.dtype == bool
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert set(np.unique(inputs)) <= set(range(task.vocab_size))
    assert max(inputs.max(), targets.max()) == task.vocab_size - 1
    assert mask.any(axis=1).all()


@pytest.mark.parametrize("name", TASKS)
def test_no_constant_answer_is_often_right(name):
    """The most frequent answer is no better than chance allows."""
    task, (_, targets, mask) = TASKS[name], batch(name)
    answers = targets[mask]
    different = {"induction": 9, "copy": 5, "brackets": 3, "recall": 7}[name]
    counts = np.bincount(answers, minlength=task.vocab_size)
    assert np.count_nonzero(counts) == different
    share = counts.max() / answers.size
    assert share < 1 / different + 4 * np.sqrt(1 / different / answers.size)


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_function_of_seed_and_step(name):
    task, rng = TASKS[name], batches.split_rng(0, "train")
    again = batches.draw(task, rng, 0, batch_size=3)
    first_rows = jax.tree.map(lambda x: x[:3], batch(name))
    chex.assert_trees_all_equal(again, first_rows)
    seen = [batch(name), batch(name, 1), batch(name, split="validation")]
    seen += [batch(name, split="test"), draw(task, batches.split_rng(1, "train"), 0)]
    seen = [{tuple(row) for row in np.asarray(x.inputs).tolist()} for x in seen]
    for i, some in enumerate(seen):
        assert len(some) > 0.9 * ROWS
        assert all(len(some & other) < 0.1 * ROWS for other in seen[:i])


def test_seeds_in_one_program():
    """What each seed draws alone, `vmap` draws for all."""
    task = TASKS["recall"]
    rngs = jnp.stack([batches.split_rng(seed, "train") for seed in range(3)])
    together = jax.vmap(lambda rng: draw(task, rng, 5))(rngs)
    for seed in range(3):
        alone = draw(task, rngs[seed], 5)
        of_seed = jax.tree.map(lambda x, seed=seed: x[seed], together)
        chex.assert_trees_all_equal(of_seed, alone)


def test_induction_asks_for_any_place():
    """Only the last token asks; it occurred once before, anywhere but just before."""
    places = set()
    for tokens, mask in rows("induction"):
        *earlier, asked, _ = tokens
        assert earlier.count(asked) == 1
        places.add(earlier.index(asked))
        np.testing.assert_array_equal(np.flatnonzero(mask), [11])
    assert places == set(range(10))


def test_copy_repeats_what_stands_before_the_bar():
    for tokens, mask in rows("copy"):
        assert tokens[6] == 5 and tokens[:6] == tokens[7:]
        np.testing.assert_array_equal(np.flatnonzero(mask), range(6, 12))


def test_brackets_are_balanced_and_all_closers_count():
    """Every depth up to the greatest is reached, and no other."""
    depths = set()
    for tokens, mask in rows("brackets"):
        changes = np.where(np.array(tokens) < 3, 1, -1)
        depth = np.cumsum(changes)
        assert depth[-1] == 0 and depth.min() == 0
        depths |= set(depth.tolist())
        np.testing.assert_array_equal(mask, changes[1:] < 0)
    assert depths == set(range(5))
    # Where both may follow, either does: short words and long ones.
    opens = [np.array(tokens) < 3 for tokens, _ in rows("brackets")]
    assert 0.4 < np.mean([row[1] for row in opens]) < 0.6


def test_recall_asks_each_key_once_in_any_slot():
    used = np.zeros(6, int)
    orders, first = set(), set()
    for tokens, mask in rows("recall"):
        pairs, slots = np.reshape(tokens, (-1, 2))[:4], np.reshape(tokens, (-1, 2))[4:]
        asked = slots[:, 0] < 11
        assert len(set(pairs[:, 0].tolist())) == 4
        assert sorted(pairs.tolist()) == sorted(slots[asked].tolist())
        np.testing.assert_array_equal(slots[~asked], np.full((2, 2), 18))
        np.testing.assert_array_equal(
            np.flatnonzero(mask), 8 + 2 * np.flatnonzero(asked)
        )
        used += asked
        first.add(int(pairs[0, 0]))
        orders.add(tuple(pairs[:, 0].tolist().index(key) for key in slots[asked, 0]))
    assert used.min() > ROWS / 3 and first == set(range(11))
    assert len(orders) > 12


def test_neither_ties_nor_nan_are_hits():
    targets, mask = np.array([[0, 1, 1, 1]]), np.array([[True, True, True, False]])
    logits = np.array([[[0.0, 0.0], [1.0, 2.0], [0.0, np.nan], [0.0, 1.0]]])
    right, count = jax.jit(batches.hits)(np.float32(logits), targets, mask)
    assert (right, count) == (1, 3)
    chex.assert_type([right, count], jnp.int32)


def test_the_table_holds_all_tasks():
    assert {name: type(task) for name, task in TASKS.items()} == dict(tasks.TASKS)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("induction", (1, 12), "num_symbols must be at least 2"),
        ("induction", (9, 2), "length must be at least 3"),
        ("copy", (0, 6), "num_symbols must be at least 1"),
        ("brackets", (3, 0, 10), "max_depth must be at least 1"),
        ("recall", (3, 7, 4, 6), "num_keys must be at least 4, got 3"),
        ("recall", (11, 7, 4, 3), "num_slots must be at least 4, got 3"),
    ],
)
def test_values_out_of_range(name, values, words):
    with pytest.raises(ValueError, match=words):
        tasks.TASKS[name](*values)


def test_unknown_split():
    with pytest.raises(ValueError, match="train, validation, test, got 'valid'"):
        batches.split_rng(0, "valid")
