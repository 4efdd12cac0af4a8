"""The smallest model and its training, for the tests of what trains."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from train import config
from train.lm import driver, loop, loss

V = 8
CONTEXT = 4
OPTIMIZER = config.OptimizerConfig(
    peak_lr=0.1,
    min_lr=0.0,
    warmup_steps=2,
    b1=0.9,
    b2=0.95,
    weight_decay=0.01,
    clip_norm=0.1,
)
# The programs are compiled for 100 steps. Most tests make 6 of them.
HUNDRED = config.TrainConfig(
    steps=100, batch_size=4, accumulation=1, log_every=50, checkpoint_every=100
)
SIX = dataclasses.replace(HUNDRED, steps=6, log_every=3, checkpoint_every=3)
TRACES: list[tuple[int, ...]] = []


class Bigram(nn.Module):
    """The smallest model: each token predicts the next one; NaN if it sees token 7."""

    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        x = nn.Embed(V, 6)(tokens)
        x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
        poison = jnp.where(jnp.any(tokens == 7), jnp.nan, 1.0)
        return nn.Dense(V)(x) * poison


def counted_next_token(tokens):
    TRACES.append(tokens.shape)
    return loss.next_token(tokens)


@functools.cache
def train_steps(
    *,
    dropout_rate=0.0,
    batch_size=4,
    accumulation=1,
    examples=counted_next_token,
    seed=0,
):
    return loop.make_train_steps(
        Bigram(dropout_rate),
        jax.random.key(seed),
        optimizer_config=OPTIMIZER,
        train_config=dataclasses.replace(
            HUNDRED, batch_size=batch_size, accumulation=accumulation
        ),
        context=CONTEXT,
        examples=examples,
    )


@functools.cache
def initial_state():
    return loop.init_state(
        Bigram(),
        jax.random.key(0),
        optimizer_config=OPTIMIZER,
        train_config=HUNDRED,
        context=CONTEXT,
    )


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def start():
    """A copy, which may be donated; on a device, as a restored state is.

    Parameters do not depend on the rate of dropout, so every program starts from these.
    """
    return jax.device_put(copy(initial_state()), jax.devices()[0])


def random_corpus():
    return jnp.asarray(np.random.default_rng(0).integers(0, 7, 100), jnp.int32)


def fit(train_steps, state, *, train_config=SIX, corpus=None, log=None, save=None):
    """Runs `driver.fit`; returns the state, the records and the steps saved."""
    records: list[dict[str, float]] = []
    saved: list[int] = []
    state = driver.fit(
        train_steps,
        state,
        random_corpus() if corpus is None else corpus,
        train_config=train_config,
        context=CONTEXT,
        log=log or records.append,
        save=save or (lambda state: saved.append(int(state.step))),
    )
    return state, records, saved
