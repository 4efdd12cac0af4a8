"""The gated recurrent unit: a state that each step keeps in part and renews in part.

    rₜ = σ(W_r xₜ + U_r hₜ₋₁)                    how much of the past the candidate sees
    zₜ = σ(W_z xₜ + U_z hₜ₋₁)                    how much of the past stays
    h̃ₜ = tanh(W xₜ + U (rₜ ⊙ hₜ₋₁))
    hₜ = zₜ ⊙ hₜ₋₁ + (1 - zₜ) ⊙ h̃ₜ

Cho et al., 2014, arXiv:1406.1078, equations 5 to 8; its biases, left out there, belong
to W. What attention replaced: U stands between any two steps inside a tanh, so that no
form of it takes steps together. `flax.linen.GRUCell` and PyTorch compute another
candidate, tanh(W xₜ + rₜ ⊙ (U hₜ₋₁)).
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
    """U_r, U_z and U: what the state is multiplied with."""

    reset: Float[Array, "M M"]
    update: Float[Array, "M M"]
    candidate: Float[Array, "M M"]


def step(
    kernels: Kernels, state: Float[Array, "M"], inputs: Float[Array, "3 M"]
) -> Float[Array, "M"]:
    """One step of one sequence.

    Args:
      kernels: of the state.
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
      kernels: of the state.
      inputs: W_r xₜ, W_z xₜ and W xₜ of every position.
      state: the one before the first step.
      token_mask: False marks padding: a step that leaves the state as it is.
      reverse: from the last position to the first.

    Returns:
      The state at every position, and the one after the last step.
    """

    def one(state: Array, own: tuple[Array, Array | None]) -> tuple[Array, Array]:
        inputs, real = own
        following = step(kernels, state, inputs)
        if real is not None:
            following = jnp.where(real, following, state)
        return following, following

    last, states = lax.scan(one, state, (inputs, token_mask), reverse=reverse)
    return states, last


class GRU(nn.Module):
    """A gated recurrent unit over a batch of sequences.

    Attributes:
      state_size: M.
      use_bias: whether W x has biases.
      kernel_init: initializer of W_r, W_z and W.
      recurrent_kernel_init: initializer of U_r, U_z and U.
      dtype: of the products W x and of the states returned; None: inferred from inputs
        and parameters. The recurrence itself is never narrower than float32.
      reverse: from the last position to the first.
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
        """Runs over the sequences.

        Args:
          x: inputs.
          state: the one to continue from; None: 0.
          token_mask: False marks padding: it changes no state, whatever stands there.

        Returns:
          The state at every position, and the last one, that in float32 (float64 for
          float64).

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
            # Of the sharding type of the inputs, as what a loop carries must be.
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
    """A GRU in the place of attention: what each token learns of those before it.

    Attributes:
      state_size: M; None: the width of the input.
      use_bias: whether W x and the output have biases.
      recurrent_kernel_init: initializer of U_r, U_z and U.
    """

    state_size: int | None = None
    use_bias: bool = True
    recurrent_kernel_init: Initializer = nn.initializers.orthogonal()

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Steps through the tokens, and projects the states."""
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
