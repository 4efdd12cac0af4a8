"""The gated recurrent unit (GRU), the kind of layer that attention replaced.

    rₜ = σ(W_r xₜ + U_r hₜ₋₁)                    reset gate
    zₜ = σ(W_z xₜ + U_z hₜ₋₁)                    update gate
    h̃ₜ = tanh(W xₜ + U (rₜ ⊙ hₜ₋₁))              candidate
    hₜ = zₜ ⊙ hₜ₋₁ + (1 - zₜ) ⊙ h̃ₜ               state

Cho et al., 2014, arXiv:1406.1078, equations 5 to 8. The paper leaves out biases; here
they are added to the products with W_r, W_z and W. The steps cannot be computed in
parallel, since each one multiplies the state by U inside a tanh. `flax.linen.GRUCell`
and PyTorch compute another candidate, tanh(W xₜ + rₜ ⊙ (U hₜ₋₁)).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float

from attention import numerics
from models import layers

Initializer = nn.initializers.Initializer


class Kernels(NamedTuple):
    """The recurrent matrices, which multiply the state.

    Attributes:
      reset: U_r.
      update: U_z.
      candidate: U.
    """

    reset: Float[Array, "M M"]
    update: Float[Array, "M M"]
    candidate: Float[Array, "M M"]


def step(
    kernels: Kernels, state: Float[Array, "M"], inputs: Float[Array, "3 M"]
) -> Float[Array, "M"]:
    """One step of one sequence, from hₜ₋₁ to hₜ = zₜ ⊙ hₜ₋₁ + (1 - zₜ) ⊙ h̃ₜ.

    Args:
      kernels: U_r, U_z and U.
      state: hₜ₋₁.
      inputs: W_r xₜ, W_z xₜ and W xₜ.

    Returns:
      hₜ.

    Reference: Cho et al., 2014, arXiv:1406.1078, equations 5 to 8.
    """
    reset = jax.nn.sigmoid(inputs[0] + state @ kernels.reset)
    update = jax.nn.sigmoid(inputs[1] + state @ kernels.update)
    candidate = jnp.tanh(inputs[2] + (reset * state) @ kernels.candidate)
    return update * state + (1 - update) * candidate


def scan(
    kernels: Kernels,
    inputs: Float[Array, "T 3 M"],
    state: Float[Array, "M"],
    token_mask: Bool[Array, "T"] | None = None,
    *,
    reverse: bool = False,
) -> tuple[Float[Array, "T M"], Float[Array, "M"]]:
    """All steps of one sequence, one after another.

    Args:
      kernels: U_r, U_z and U.
      inputs: W_r xₜ, W_z xₜ and W xₜ at every position.
      state: the state before the first step.
      token_mask: False marks padding, which leaves the state unchanged; None: there is
        none.
      reverse: whether to run from the last position to the first.

    Returns:
      The state after the step at every position, and the state after the last step.

    Reference: Cho et al., 2014, arXiv:1406.1078, equations 5 to 8.
    """

    def one(state: Array, token: tuple[Array, Array | None]) -> tuple[Array, Array]:
        inputs, real = token
        following = step(kernels, state, inputs)
        if real is not None:
            following = jnp.where(real, following, state)
        return following, following

    last, states = lax.scan(one, state, (inputs, token_mask), reverse=reverse)
    return states, last


class GRU(nn.Module):
    """A gated recurrent unit over a batch of sequences.

    Attributes:
      state_size: M, the width of the state.
      use_bias: whether the products with W_r, W_z and W have biases.
      kernel_init: initializer of W_r, W_z and W.
      recurrent_kernel_init: initializer of U_r, U_z and U.
      dtype: dtype of the products W x and of the returned states; None: inferred from
        inputs and parameters. The recurrence is computed in float32, or in float64.
      reverse: whether to run from the last position to the first.
    """

    state_size: int
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.lecun_normal()
    recurrent_kernel_init: Initializer = nn.initializers.orthogonal()
    dtype: Any = None
    reverse: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T E"],
        state: Float[Array, "B M"] | None = None,
        *,
        token_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B M"]]:
        """Runs the GRU over every sequence of the batch.

        Args:
          x: inputs.
          state: the state to continue from; None: 0.
          token_mask: False marks padding, which changes no state, even if it holds NaN;
            None: there is none.

        Returns:
          The state after the step at every position, in `dtype`; and the state after
          the last step, in float32 (float64 for float64).

        Raises:
          ValueError: if shapes do not fit.
        """
        if x.ndim != 3:
            raise ValueError(f"x must be [B T E], got shape {x.shape}")
        batch, M = x.shape[0], self.state_size
        if token_mask is not None:
            if token_mask.shape != x.shape[:2]:
                raise ValueError(
                    f"token_mask must be [B T] = {list(x.shape[:2])}, "
                    f"got {list(token_mask.shape)}"
                )
            x = jnp.where(token_mask[..., None], x, 0)
        inputs = layers.Projection(
            features=(3, M),
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            dtype=self.dtype,
            name="input",
        )(x)
        dtype = numerics.accumulation_dtype(inputs.dtype)
        kernels = Kernels(
            *(
                self.param(
                    f"{name}_kernel", self.recurrent_kernel_init, (M, M), jnp.float32
                ).astype(dtype)
                for name in Kernels._fields
            )
        )
        if state is None:
            # A loop's state must have the sharding type of the inputs.
            state = jnp.zeros_like(inputs, dtype, shape=(batch, M))
        if state.shape != (batch, M):
            raise ValueError(
                f"state must be [B M] = {[batch, M]}, got {list(state.shape)}"
            )

        def one_sequence(
            inputs: Array, state: Array, token_mask: Array | None
        ) -> tuple[Array, Array]:
            return scan(kernels, inputs, state, token_mask, reverse=self.reverse)

        states, last = jax.vmap(one_sequence)(
            inputs.astype(dtype), state.astype(dtype), token_mask
        )
        return states.astype(inputs.dtype), last


class GRUMixer(layers.Mixer):
    """A mixer that runs a GRU over the tokens: output = W_o hₜ.

    Attributes:
      state_size: M, the width of the state; None: the width E of the input.
      use_bias: whether the GRU's input products and the output projection have biases.
      recurrent_kernel_init: initializer of U_r, U_z and U.
    """

    state_size: int | None = None
    use_bias: bool = True
    recurrent_kernel_init: Initializer = nn.initializers.orthogonal()

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Runs the GRU over the tokens, and projects its states to width E."""
        M = self.state_size or x.shape[-1]
        dtype = numerics.accumulation_dtype(jnp.dtype(self.dtype or x.dtype))
        state, keep = layers.carried(
            self, "state", lambda: jnp.zeros((x.shape[0], M), dtype)
        )
        states, last = GRU(
            state_size=M,
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            recurrent_kernel_init=self.recurrent_kernel_init,
            dtype=self.dtype,
            name="gru",
        )(x, state, token_mask=token_mask)
        keep(last)
        return self.project_back("out", states, x.shape[-1], use_bias=self.use_bias)
