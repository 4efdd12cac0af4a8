"""Many runs of one model in one program: seeds and learning rates under vmap.

    θᵣ, oᵣ ← update(θᵣ, oᵣ; batch(keyᵣ, step), ηᵣ)      r = 1 … R

All runs share sizes, schedule and program; each has its own parameters, batches and
dropout, drawn from its seed, and its own learning rate. A run that is switched off
keeps its state. A run depends on its seed and its rate alone: the runs beside it change
it by no more than rounding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from train import config
from train.lm import loop, optimizer
from train.studies import batches

# (key of a run, step, *data) -> the batch of that step.
Draw = Callable[..., batches.Batch]
# (runs, switched on [R], number of steps, *data) -> (runs, nats per target [R]).
Steps = jax.stages.Wrapped


@flax.struct.dataclass
class Runs:
    """Runs side by side: the first axis R of every array is that of the runs.

    Attributes:
      state: training state of each run.
      rng: key of each run's batches and dropout.
      factor: each run's learning rate, as a multiple of the schedule's.
    """

    state: loop.State
    rng: Array
    factor: Float[Array, "R"]

    @property
    def params(self) -> optax.Params:
        """The parameters, with leaves [R ...]."""
        return self.state.params


def begin(
    model: nn.Module,
    seeds: Sequence[int],
    rates: Sequence[float],
    *,
    optimizer_config: config.OptimizerConfig,
    steps: int,
    context: int,
) -> Runs:
    """Draws the parameters of each run and starts its optimiser.

    Args:
      model: maps tokens [B T] to logits [B T V], with the option `deterministic`.
      seeds: R seeds, one of each run.
      rates: each run's learning rate after the warm-up. The final rate of the schedule
        is scaled by the same factor.
      optimizer_config: optimiser and schedule, for the learning rate `peak_lr`.
      steps: total number of training steps of a run, for the schedule.
      context: T, tokens of a row.

    Returns:
      The runs before their first step.

    Raises:
      ValueError: there are more or fewer rates than seeds.
    """
    if len(seeds) != len(rates):
        raise ValueError(f"{len(seeds)} seeds do not go with {len(rates)} rates")
    transformation = optimizer.make(optimizer_config, steps)

    # One by one: orthogonal initializers under vmap are a batch of QR decompositions,
    # whose threads may wait for each other for ever (jaxlib 0.10, CPU).
    @jax.jit
    def init(seeds: Array, factors: Array) -> Runs:
        return jax.lax.map(lambda run: init_run(*run), (seeds, factors))

    def init_run(seed: Array, factor: Array) -> Runs:
        # The splits 'validation' and 'test' have keys of their own.
        init_rng, rng = jax.random.split(batches.split_rng(seed, "train"))
        tokens = jnp.zeros((1, context), jnp.int32)
        params = model.init(init_rng, tokens, deterministic=True)["params"]
        zero = jnp.zeros((), jnp.int32)
        state = loop.State(zero, params, transformation.init(params), zero)
        return Runs(state, rng, factor)

    factors = np.asarray(rates, np.float32) / np.float32(optimizer_config.peak_lr)
    return init(np.asarray(seeds, np.uint32), factors)


def make_steps(
    model: nn.Module,
    draw: Draw,
    *,
    optimizer_config: config.OptimizerConfig,
    steps: int,
) -> Steps:
    """Makes one program that takes any number of training steps of all runs.

    Args:
      model: maps tokens [B T] to logits [B T V], with the option `deterministic`.
      draw: draws a batch; a pure function of a run's key, the step and `data`.
      optimizer_config: optimiser and schedule, for the learning rate `peak_lr`.
      steps: total number of training steps of a run, for the schedule.

    Returns:
      A jitted function (runs, on [R], num_steps, *data) -> (runs, losses [R]). `on` is
      True for the runs that are trained, `data` is passed on to `draw`, and a loss is
      the mean over these steps in nats per target. The runs are donated.
    """
    transformation = optimizer.make(optimizer_config, steps)

    def step(run: Runs, on: Array, data: Any) -> tuple[Runs, Array]:
        batch_rng, dropout_rng = jax.random.split(run.rng)
        state, nats, _ = loop.update(
            model,
            transformation,
            run.state,
            *draw(batch_rng, run.state.step, *data),
            rng=jax.random.fold_in(dropout_rng, run.state.step),
            factor=run.factor,
        )
        state = jax.tree.map(functools.partial(jnp.where, on), state, run.state)
        return Runs(state, run.rng, run.factor), nats

    def train(
        runs: Runs, on: Bool[Array, "R"], num_steps: Any, *data: Any
    ) -> tuple[Runs, Float[Array, "R"]]:
        def body(_: Array, carry: tuple[Runs, Array]) -> tuple[Runs, Array]:
            runs, sums = carry
            runs, nats = jax.vmap(step, in_axes=(0, 0, None))(runs, on, data)
            return runs, sums + nats

        runs, sums = jax.lax.fori_loop(
            0, num_steps, body, (runs, jnp.zeros(on.shape, jnp.float32))
        )
        return runs, sums / num_steps

    return jax.jit(train, donate_argnums=0)
