"""learning.prove_trainer: trainers with leaks of known size, and broken ones."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from train import config
from train.lm import evaluation, loop, loss
from train.proofs import learning, loss_statistics

T, V = 64, 65
FEW = 11
OPTIMIZER = config.OptimizerConfig(
    peak_lr=0.02,
    min_lr=0.0,
    warmup_steps=10,
    b1=0.9,
    b2=0.99,
    weight_decay=0.0,
    clip_norm=1.0,
)
TRAIN = config.TrainConfig(
    steps=150, batch_size=64, accumulation=1, log_every=1, checkpoint_every=1
)


def prove(trainer, *, seed=0, **options):
    options = {"vocab_size": V, "length": T} | options
    return learning.prove_trainer(trainer, rng=jax.random.key(seed), **options)


def accuses(proof):
    return proof.reason.startswith("random tokens are predicted")


class Counter:
    """A trainer that counts pairs, and sees some of its targets as marked inputs.

    Args:
      marks: shape of the targets -> where the input is V + the target. This leak's
        size follows from the counts.
    """

    def __init__(self, marks=lambda shape: np.zeros(shape, bool)):
        self.marks = marks
        self.tables = []

    def inputs(self, rows):
        targets = rows[:, 1:]
        return np.where(self.marks(targets.shape), V + targets, rows[:, :-1])

    def __call__(self, rows):
        counts = np.ones((2 * V, V))
        np.add.at(counts, (self.inputs(rows), rows[:, 1:]), 1)
        table = np.log(counts / counts.sum(axis=1, keepdims=True))
        self.tables.append(table)
        return lambda rows: -table[self.inputs(rows), rows[:, 1:]]

    def expected_loss(self, share):
        """On fresh random tokens of which a share is marked."""
        plain, marked = np.split(-self.tables[0], 2)
        return (1 - share) * plain.mean() + share * marked.diagonal().mean()


def marks(kind, share, seed):
    """A share of tokens, of rows, or of the tokens at position 5."""
    generator = np.random.default_rng(seed)

    def draw(shape):
        if kind == "rows":
            return np.broadcast_to(generator.random((shape[0], 1)) < share, shape)
        drawn = generator.random(shape) < share
        return drawn & (np.arange(shape[1]) == 5) if kind == "position" else drawn

    return draw


def test_an_honest_trainer_passes_and_states_a_small_leak():
    proof = prove(Counter())
    assert proof.passed, proof.reason
    overall = proof.figures["overall"]
    assert 0 < overall["excess"] < 0.02
    assert overall["control_excess"] < -0.9 * math.log(V)
    assert overall["smallest_leak"] < 0.01 * math.log(V)
    assert overall["smallest_even_leak"] < 0.003 * math.log(V)
    assert not any(accuses(prove(Counter(), seed=seed)) for seed in range(8))


def test_the_rows_of_a_trainer_are_enough_for_a_hundredth_of_log_v():
    uniform = np.full((learning.FRESH_ROWS, T), math.log(V))
    proof = loss_statistics.judge(uniform, 0 * uniform, vocab_size=V)
    assert proof.arrays["smallest_leak"].max() < 0.01 * math.log(V)


@pytest.mark.parametrize("kind", ["tokens", "rows", "position"])
def test_a_trainer_with_a_leak_just_above_the_stated_size_is_found(kind):
    honest = Counter()
    report = prove(honest).as_json()
    stated = (
        report["positions"]["smallest_leak"][5]
        if kind == "position"
        else report["overall"]["smallest_leak"]
    )
    # A mark wins less than log V, since what it means was counted on few of them.
    share, size = stated / math.log(V), 0.0
    while size < stated:
        share *= 1.1
        leaky = Counter(marks(kind, share, seed=0))
        prove(leaky)
        size = honest.expected_loss(0) - leaky.expected_loss(share)
    assert size < 1.2 * stated
    for seed in range(8):
        proof = prove(Counter(marks(kind, share, seed)), seed=seed)
        assert accuses(proof), (seed, proof.reason)


def test_a_trainer_is_given_fresh_rows_and_a_predictable_control():
    seen = []

    def trainer(rows):
        seen.append(rows.copy())
        rows[:] = 0  # its own to write to

        def losses(rows):
            seen.append(rows.copy())
            return np.full((80, 6), 2.0)

        return losses

    options = dict(vocab_size=FEW, length=6, train_rows=80, fresh_rows=80)
    prove(trainer, **options)
    assert len(seen) == 4
    for rows in seen:
        chex.assert_type(rows, np.int32)
        chex.assert_shape(rows, (80, 7))
        assert set(rows.ravel().tolist()) == set(range(FEW))
        assert len(set(rows[:, 0].tolist())) > 8
    corpus, fresh, counting, fresh_counting = seen
    assert not any(row in corpus.tolist() for row in fresh.tolist())
    for rows in (counting, fresh_counting):
        np.testing.assert_array_equal(rows[:, 1:], (rows[:, :-1] + 1) % FEW)
    assert (counting[:, 0] != fresh_counting[:, 0]).any()
    prove(trainer, **options)
    np.testing.assert_array_equal(seen[4:], seen[:4])


@pytest.mark.parametrize("vocab_size", [13, 65])
def test_a_trainer_that_does_not_learn_is_void(vocab_size):
    """In float32 log V may round to less, with no standard error at all."""
    shape = (learning.FRESH_ROWS, T)
    losses = np.full(shape, math.log(vocab_size), np.float32)
    proof = prove(lambda rows: lambda rows: losses, vocab_size=vocab_size)
    assert (proof.result, proof.reason) == ("void", "the control did not learn")


@pytest.mark.parametrize(
    ("losses", "match"),
    [
        (np.ones(1024), r"float64 \[1024, 64\] of rows \[1024, 65\], got .* \[1024\]"),
        (np.ones((1024, 65)), r"got float64 \[1024, 65\]"),
        (np.ones((1024, 64), np.float16), r"got float16 \[1024, 64\]"),
        (jnp.ones((1024, 64), jnp.bfloat16), "got bfloat16"),
        (None, r"got object \[\]"),
        (np.full((1024, 64), -4.1), "expected losses -log p >= 0, got -4.1"),
    ],
)
def test_losses_that_no_trainer_may_return(losses, match):
    with pytest.raises(ValueError, match=match):
        prove(lambda rows: lambda rows: losses)


def test_a_trainer_that_returns_no_function_is_refused():
    with pytest.raises(ValueError, match="to return a function, got ndarray"):
        prove(lambda rows: rows)


class LastToken(nn.Module):
    """The smallest model: logits of the next token from the last one."""

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        return nn.Dense(FEW + 1)(nn.Embed(FEW + 1, 32)(tokens))


def _zeros_marked(tokens):
    """One more id says that 0 comes next."""
    inputs, targets = loss.next_token(tokens)
    return jnp.where(targets == 0, FEW, inputs), targets


@pytest.mark.parametrize("examples", [loss.next_token, _zeros_marked])
def test_our_own_loop_as_a_trainer(examples):
    """Who knows whether 0 comes next wins log V - (1 - 1/V) log(V - 1) nats."""
    size = math.log(FEW) - (1 - 1 / FEW) * math.log(FEW - 1)
    rng = jax.random.key(0)
    settings = dict(
        optimizer_config=OPTIMIZER, train_config=TRAIN, context=6, model=LastToken()
    )
    start = loop.init_state(rng=rng, **settings)
    train_steps = loop.make_train_steps(rng=rng, examples=examples, **settings)

    def trainer(rows):
        state = jax.tree.map(jnp.copy, start)  # the steps consume it
        state, _ = train_steps(state, jnp.asarray(rows.ravel()), TRAIN.steps)
        return lambda rows: evaluation.token_losses(
            LastToken(), state.params, rows, examples, batch_size=TRAIN.batch_size
        )

    proof = prove(trainer, vocab_size=FEW, length=6)
    excess = proof.figures["overall"]["excess"]
    if examples is loss.next_token:
        assert proof.passed, proof.reason
        assert 0 < excess < 0.02
        assert proof.figures["overall"]["smallest_leak"] < size
    else:
        assert accuses(proof)
        assert -excess == pytest.approx(size, abs=0.02)
