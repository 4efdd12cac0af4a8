"""The training loop: many steps in one compiled program.

A step draws a batch, sums the gradients of its K micro-batches and updates:

    x, y = examples(batch(seed, step))
    g = ∑ₖ ∇θ nats(xₖ, yₖ) ÷ targets(y)
    θ, o ← update(g, θ, o) where loss and ‖g‖ are finite, else θ, o

The loss of each micro-batch is divided by the number of targets in the whole batch, so
that gradients add up correctly even if micro-batches have different numbers of targets.
The whole batch is drawn at once and then divided. K micro-batches of B sequences
therefore give the same update as one batch of K B sequences, except for rounding and
the dropout masks.

A step is a pure function of (seed, step, θ, o), so that a run that was interrupted and
continued equals an uninterrupted run, bit for bit.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from train import config
from train.lm import loss, optimizer
from train.text import data

# A compiled function (state, corpus, number of steps) -> (state, metrics).
TrainSteps = jax.stages.Wrapped


@flax.struct.dataclass
class State:
    """The state of a run, from which training continues.

    Attributes:
      step: number of batches consumed.
      params: parameters of the model.
      opt_state: state of the optimiser.
      skipped: number of steps whose loss or gradient was not finite. Such a step
        consumes a batch and changes nothing else, so the number of updates is
        step - skipped.
    """

    step: Int[Array, ""]
    params: optax.Params
    opt_state: optax.OptState
    skipped: Int[Array, ""]


@flax.struct.dataclass
class Metrics:
    """Metrics of a chunk of steps.

    Attributes:
      loss: nats per target, mean over the steps.
      gradient_norm: norm of the gradient before clipping, mean over the steps.
      learning_rate: learning rate of the last step.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]


def init_state(
    model: nn.Module,
    rng: Array,
    *,
    optimizer_config: config.OptimizerConfig,
    train_config: config.TrainConfig,
    context: int,
) -> State:
    """Initializes the parameters and the optimiser.

    Args:
      model: maps tokens [B T] to logits [B T V], with the option `deterministic`.
      rng: random key of the parameters.
      optimizer_config: settings of the optimiser and its learning-rate schedule.
      train_config: settings of training, of which the number of steps is used.
      context: T, the number of tokens that the model sees at once.

    Returns:
      The state before the first step.
    """
    transformation = optimizer.make(optimizer_config, train_config.steps)

    @jax.jit
    def init(rng: Array) -> State:
        tokens = jnp.zeros((1, context), jnp.int32)
        params = model.init(rng, tokens, deterministic=True)["params"]
        zero = jnp.zeros((), jnp.int32)
        return State(zero, params, transformation.init(params), zero)

    return init(rng)


def loss_and_gradients(
    model: nn.Module,
    params: optax.Params,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None = None,
    *,
    rng: Array,
    accumulation: int,
) -> tuple[Float[Array, ""], optax.Updates]:
    """Mean loss over the targets of a batch, and its gradient.

    Args:
      model: maps tokens [B T] to logits [B T V], with the option `deterministic`.
      params: parameters of the model.
      inputs: token ids that the model reads.
      targets: token ids that the model should predict.
      mask: True = the target counts, False = it does not; None: all targets count.
      rng: random key of this step's dropout, with which the index of each micro-batch
        is folded.
      accumulation: K, the number of micro-batches, each of B / K rows.

    Returns:
      Nats per target, and the gradient with respect to the parameters; both are 0 if no
      target counts.

    Raises:
      ValueError: if B is not a multiple of K.
    """
    batch_size = inputs.shape[0]
    if batch_size % accumulation:
        raise ValueError(
            f"a batch of {batch_size} sequences does not divide into "
            f"{accumulation} micro-batches"
        )
    count = targets.size if mask is None else jnp.maximum(jnp.sum(mask), 1)

    def share(
        params: optax.Params,
        index: Array,
        inputs: Array,
        targets: Array,
        mask: Array | None,
    ) -> Array:
        logits: Any = model.apply(
            {"params": params},
            inputs,
            deterministic=False,
            rngs={"dropout": jax.random.fold_in(rng, index)},
        )
        nats, _ = loss.cross_entropy(logits, targets, mask)
        return nats / count

    def add(sums: Any, micro_batch: Any) -> tuple[Any, None]:
        terms = jax.value_and_grad(share)(params, *micro_batch)
        return jax.tree.map(jnp.add, sums, terms), None

    rows = jax.tree.map(
        lambda x: x.reshape(accumulation, -1, *x.shape[1:]), (inputs, targets, mask)
    )
    zeros = jnp.zeros((), jnp.float32), optax.tree.zeros_like(params)
    sums, _ = jax.lax.scan(add, zeros, (jnp.arange(accumulation), *rows))
    return sums


def update(
    model: nn.Module,
    transformation: optax.GradientTransformation,
    state: State,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None = None,
    *,
    rng: Array,
    accumulation: int = 1,
    factor: float | Float[Array, ""] = 1.0,
) -> tuple[State, Float[Array, ""], Float[Array, ""]]:
    """One training step on a batch.

    Args:
      model: maps tokens [B T] to logits [B T V], with the option `deterministic`.
      transformation: the optimiser, which transforms gradients into updates.
      state: the state before the step.
      inputs: token ids that the model reads.
      targets: token ids that the model should predict.
      mask: True = the target counts, False = it does not; None: all targets count.
      rng: random key of this step's dropout.
      accumulation: K, the number of micro-batches, each of B / K rows.
      factor: multiplies all updates, and thereby the learning rate.

    Returns:
      The state after the step, nats per target, and the norm of the gradient.

    Raises:
      ValueError: if B is not a multiple of K.
    """
    nats, grads = loss_and_gradients(
        model,
        state.params,
        inputs,
        targets,
        mask,
        rng=rng,
        accumulation=accumulation,
    )
    # The optimiser's clipping computes the same norm; the compiler merges the two.
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(nats)
    updates, opt_state = transformation.update(grads, state.opt_state, state.params)
    updates = jax.tree.map(lambda u: factor * u, updates)
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    state = State(state.step + 1, params, opt_state, state.skipped + ~finite)
    return state, nats, norm


def make_train_steps(
    model: nn.Module,
    rng: Array,
    *,
    optimizer_config: config.OptimizerConfig,
    train_config: config.TrainConfig,
    context: int,
    examples: loss.Examples,
) -> TrainSteps:
    """Makes a compiled function that runs any number of training steps.

    Args:
      model: maps tokens [B T] to logits [B T V], with the option `deterministic`.
      rng: random key of the run's batches and dropout, with which the step is folded.
      optimizer_config: settings of the optimiser and its learning-rate schedule.
      train_config: the number of steps of the run, and the sequences and micro-batches
        of a step.
      context: T, the number of tokens that the model sees at once.
      examples: makes inputs and targets from tokens [B T+1], such as
        `loss.next_token`.

    Returns:
      A compiled function (state, corpus [M], num_steps) -> (state, metrics), which does
      not compile again for another num_steps. It donates the state that it takes, whose
      buffers cannot be used after the call.
    """
    transformation = optimizer.make(optimizer_config, train_config.steps)
    learning_rate = optimizer.schedule(optimizer_config, train_config.steps)
    batch_rng, dropout_rng = jax.random.split(rng)

    def train_step(state: State, corpus: Array) -> tuple[State, Metrics]:
        tokens = data.sample_batch(
            corpus,
            batch_rng,
            state.step,
            batch_size=train_config.batch_size * train_config.accumulation,
            context=context,
        )
        rate = learning_rate(state.step - state.skipped + 1)
        state, nats, norm = update(
            model,
            transformation,
            state,
            *examples(tokens),
            rng=jax.random.fold_in(dropout_rng, state.step),
            accumulation=train_config.accumulation,
        )
        return state, Metrics(nats, norm, rate)

    def train_steps(
        state: State, corpus: Int[Array, "M"], num_steps: int | Int[Array, ""]
    ) -> tuple[State, Metrics]:
        def body(_: Array, carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
            state, sums = carry
            state, metrics = train_step(state, corpus)
            return state, Metrics(
                sums.loss + metrics.loss,
                sums.gradient_norm + metrics.gradient_norm,
                metrics.learning_rate,
            )

        zero = jnp.zeros((), jnp.float32)
        state, sums = jax.lax.fori_loop(
            0, num_steps, body, (state, Metrics(zero, zero, zero))
        )
        return state, Metrics(
            sums.loss / num_steps, sums.gradient_norm / num_steps, sums.learning_rate
        )

    return jax.jit(train_steps, donate_argnums=0)


def keys(seed: int) -> tuple[Array, Array, Array]:
    """Splits a seed into the random keys for training, text samples and the audit."""
    train_rng, sample_rng, audit_rng = jax.random.split(jax.random.key(seed), 3)
    return train_rng, sample_rng, audit_rng


def begin(
    model: nn.Module, rng: Array, settings: config.Config, *, examples: loss.Examples
) -> tuple[State, TrainSteps]:
    """Makes the first state of a run and its training steps.

    Args:
      model: maps tokens [B T] to logits [B T V], with the option `deterministic`.
      rng: random key of the run, which is split for parameters and steps.
      settings: configuration of the run.
      examples: makes inputs and targets from tokens [B T+1], such as
        `loss.next_token`.

    Returns:
      The results of `init_state` and `make_train_steps`.
    """
    init_rng, steps_rng = jax.random.split(rng)
    state = init_state(
        model,
        init_rng,
        optimizer_config=settings.optimizer,
        train_config=settings.train,
        context=settings.model.context,
    )
    train_steps = make_train_steps(
        model,
        steps_rng,
        optimizer_config=settings.optimizer,
        train_config=settings.train,
        context=settings.model.context,
        examples=examples,
    )
    return state, train_steps
