"""The layers around attention: projections, the MLP, embeddings, a convolution.

projection    y = x W + b
MLP           y = W₂ gelu(W₁ x)               Hendrycks and Gimpel, 2016
convolution   yₜ = Σ_w kernel_w x_{t-W+1+w}   Arora et al., 2023, arXiv:2312.04927
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from attention import convolution


def kernel_inits(
    num_layers: int,
) -> tuple[nn.initializers.Initializer, nn.initializers.Initializer]:
    """Initializers of a block's inner kernels, and of those that add to the stream.

    2L layers add to the residual stream, which is to stay of the size it starts with.
    """
    out_scale = 1 / (2 * num_layers)
    return (
        nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
        nn.initializers.variance_scaling(out_scale, "fan_in", "normal"),
    )


def carried(
    module: nn.Module, name: str, empty: Callable[[], Any]
) -> tuple[Any, Callable[[Any], None]]:
    """The state that a module continues from, and what keeps the next one.

    Args:
      module: with an attribute `decode`; if that is False, there is no state.
      name: of the state in the 'cache' collection.
      empty: makes the state before the first token.

    Returns:
      The state, or None; and `keep(state)`, which stores it unless the module is being
      initialized: that leaves the state empty.
    """
    if not module.decode:
        return None, lambda state: None
    cached = module.variable("cache", name, empty)

    def keep(state: Any) -> None:
        if not module.is_initializing():
            cached.value = state

    return cached.value, keep


class Projection(nn.Module):
    """y = x W + b over the last axes, with the parameters of `flax.linen.DenseGeneral`.

    The product is taken on flat matrices: XLA's CPU backend is about twice as fast on
    the gradient of [B·T E] as on that of [B T E].

    Attributes:
      features: the axes of the output that take the place of the contracted ones.
      contracted: how many axes at the end of x are contracted.
      use_bias: whether b is added.
      kernel_init: initializer of W, [*inputs *features], from its flat shape.
      bias_init: initializer of b, [*features].
      dtype: of the computation; None: inferred from x and the parameters.
      param_dtype: of the parameters.
      precision: of the matrix product.
    """

    features: tuple[int, ...]
    contracted: int = 1
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: lax.PrecisionLike = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Projects every position of x."""
        leading = x.shape[: -self.contracted]
        inputs = x.shape[-self.contracted :]
        flat = (math.prod(inputs), math.prod(self.features))

        def init_kernel(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return self.kernel_init(rng, flat, dtype).reshape(shape)

        kernel = self.param(
            "kernel", init_kernel, (*inputs, *self.features), self.param_dtype
        )
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, self.features, self.param_dtype)
        x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = jnp.matmul(
            x.reshape(math.prod(leading), flat[0]),
            kernel.reshape(flat),
            precision=self.precision,
        )
        if bias is not None:
            y += bias.reshape(1, flat[1])
        return y.reshape(*leading, *self.features)


class Mixer(nn.Module, kw_only=True):
    """What the mixers share that carry a state from token to token.

    A mixer implements `mix_tokens`, whose parameters belong to the call.

    Attributes:
      kernel_init: initializer of the projections of the input.
      out_kernel_init: initializer of the projection back.
      dtype: of the computation; None: inferred from inputs and parameters. States are
        never narrower than float32.
      decode: continue from the state in the 'cache' collection, and leave the last one
        there; any number of tokens at a time. Initializing leaves it empty.
    """

    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: Any = None
    decode: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T E"],
        *,
        deterministic: bool = True,
        token_mask: Bool[Array, "B T"] | None = None,
        token_positions: Int[Array, "B T"] | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T E"]:
        """Mixes each token with those before it.

        Args:
          x: the tokens.
          deterministic: not used: these mixers have no dropout.
          token_mask: False marks padding, on either side, which changes no state.
          token_positions: not used: the order of the tokens suffices.
          sow_weights: not used: there are no weights.

        Returns:
          The mixed tokens; those at padding mean nothing.

        Raises:
          ValueError: if heads or shapes do not fit.
        """
        del deterministic, token_positions, sow_weights
        return self.mix_tokens(x, token_mask)

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Computes the call's output."""
        raise NotImplementedError

    def project(
        self, name: str, x: Float[Array, "..."], *features: int, use_bias: bool = False
    ) -> Float[Array, "..."]:
        """Projects the last axis of x to new ones."""
        return Projection(
            features=features,
            use_bias=use_bias,
            kernel_init=self.kernel_init,
            dtype=self.dtype,
            name=name,
        )(x)

    def project_back(
        self,
        name: str,
        x: Float[Array, "..."],
        width: int,
        *,
        contracted: int = 1,
        use_bias: bool = False,
    ) -> Float[Array, "..."]:
        """Projects the last `contracted` axes of x to the width of the stream."""
        return Projection(
            features=(width,),
            contracted=contracted,
            use_bias=use_bias,
            kernel_init=self.out_kernel_init,
            dtype=self.dtype,
            name=name,
        )(x)


class MLP(nn.Module):
    """Two projections with a nonlinearity between them, at every position alone.

    Attributes:
      width: F, of the layer between.
      use_bias: whether the projections have biases.
      kernel_init: initializer of the first projection.
      out_kernel_init: initializer of the second one.
      dtype: of the computation.
    """

    width: int
    use_bias: bool
    kernel_init: nn.initializers.Initializer
    out_kernel_init: nn.initializers.Initializer
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*B T E"]) -> Float[Array, "*B T E"]:
        """Maps every position by itself."""
        h = Projection(
            features=(self.width,),
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            dtype=self.dtype,
            name="up",
        )(x)
        return Projection(
            features=(x.shape[-1],),
            use_bias=self.use_bias,
            kernel_init=self.out_kernel_init,
            dtype=self.dtype,
            name="down",
        )(nn.gelu(h))


class ShortConvolution(nn.Module):
    """Mixes each channel of a token with those of the few tokens before it.

    Attributes:
      width: W, tokens that one sees, itself included.
      decode: keep the last tokens in the 'cache' collection, and continue from them.
    """

    width: int
    decode: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T E"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T E"]:
        """Convolves real tokens, whose neighbours are real ones; padding becomes 0."""
        batch, _, channels = x.shape
        shape = self.width, channels
        kernel = self.param("kernel", _identity_and_noise, shape, jnp.float32)
        before, keep = carried(
            self,
            "tokens",
            lambda: jnp.zeros_like(x, shape=(batch, self.width - 1, channels)),
        )
        last, y = convolution.depthwise(x, kernel, token_mask=token_mask, state=before)
        keep(last)
        return y


def _identity_and_noise(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """A kernel that passes the present token on, beside as much noise of all it sees.

    With less noise, or without the token, a model takes longer to learn recall.
    """
    noise = nn.initializers.normal(shape[0] ** -0.5)(rng, shape, dtype)
    return noise.at[-1].add(1)


class Embedding(nn.Module):
    """A table of vectors, one per id, read both ways.

    Attributes:
      size: V, the number of ids.
      width: E.
      embedding_init: initializer of the table.
    """

    size: int
    width: int
    embedding_init: nn.initializers.Initializer

    def setup(self) -> None:
        """Creates the table."""
        self.embedding = self.param(
            "embedding", self.embedding_init, (self.size, self.width), jnp.float32
        )

    def __call__(self, ids: Int[Array, "*B T"]) -> Float[Array, "*B T E"]:
        """Looks the vectors up; an id outside 0 … V-1 gives NaN, never another row."""
        return self.embedding.at[ids].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        )

    def attend(self, x: Float[Array, "*B T E"]) -> Float[Array, "*B T V"]:
        """Scores every id against x, in float32: x · embeddingᵥ."""
        flat = x.reshape(-1, self.width)
        table = self.embedding.astype(x.dtype)
        logits = jnp.matmul(flat, table.T, preferred_element_type=jnp.float32)
        return logits.reshape(*x.shape[:-1], self.size)
