"""Many runs of one model in one program: seeds and learning rates under vmap.

    θᵣ, oᵣ ← update(θᵣ, oᵣ; batch(keyᵣ, step), ηᵣ)      r = 1 … R

All runs share sizes, schedule and program; each has its own parameters, batches and
dropout, drawn from its seed, and its own learning rate. A run that is switched off
keeps its state. What a run does depends on its seed and its rate only, not on which
others stand beside it, but for rounding.
"""

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
from train.studies import tasks

# (key of a run, step, *data) to its batch of that step.
Draw = Callable[..., tasks.Batch]
# (runs, switched on [R], number of steps, *data) to (runs, nats per target [R]).
Steps = jax.stages.Wrapped


@flax.struct.dataclass
class Runs:
    """Runs side by side: every array has the axis R of the runs first.

    Attributes:
      state: of each run.
      rng: key of each run's batches and dropout.
      factor: each run's learning rate, as a multiple of the schedule's.
    """

    state: loop.State
    rng: Array
    factor: Float[Array, "R"]

    @property
    def params(self) -> optax.Params:
        """Parameters, [R ...]."""
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
      seeds: of each run, R of them.
      rates: each run's learning rate after the warm-up; the minimum is scaled alike.
      optimizer_config: as for `optimizer.make`, of the rate `peak_lr`.
      steps: N, of each run in all.
      context: T.

    Returns:
      The runs before their first step.

    Raises:
      ValueError: not one rate for each seed.
    """
    if len(seeds) != len(rates):
        raise ValueError(f"{len(seeds)} seeds do not go with {len(rates)} rates")
    transformation = optimizer.make(optimizer_config, steps)

    # One by one: orthogonal initializers under vmap are a batch of QR decompositions,
    # whose threads may wait for each other for ever (jaxlib 0.10, CPU).
    @jax.jit
    def init(seeds: Array, factors: Array) -> Runs:
        return jax.lax.map(lambda own: one(*own), (seeds, factors))

    def one(seed: Array, factor: Array) -> Runs:
        # A fold of the key: validation and test rows are drawn from its other folds.
        init_rng, rng = jax.random.split(tasks.split_rng(seed, "train"))
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
    """Compiles the training step of all runs, any number of times in a row.

    Args:
      model: as for `begin`.
      draw: a pure function of a run's key and the step.
      optimizer_config: as for `begin`.
      steps: N, as for `begin`.

    Returns:
      A compiled function (runs, on [R], num_steps, *data) -> (runs, losses [R]): the
      mean over these steps, in nats per target. `data` is what `draw` is given besides
      key and step. Other values do not compile again; the runs are donated.
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
        state = jax.tree.map(lambda new, old: jnp.where(on, new, old), state, run.state)
        return Runs(state, run.rng, run.factor), nats

    def many(
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

    return jax.jit(many, donate_argnums=0)
