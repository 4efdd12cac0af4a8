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
    """Initializers of a block's kernels: the inner ones, and the output projections.

    2L output projections add to the residual stream. Their variance is smaller by the
    factor 1 / 2L, so that the variance of the stream does not grow with the depth.

    Args:
      num_layers: L, the number of blocks.

    Returns:
      The initializer of inner kernels, and that of output projections.

    Reference: Radford et al., 2019 (GPT-2), section 2.3.
    """
    out_scale = 1 / (2 * num_layers)
    return (
        nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
        nn.initializers.variance_scaling(out_scale, "fan_in", "normal"),
    )


def carried(
    module: nn.Module, name: str, empty: Callable[[], Any]
) -> tuple[Any, Callable[[Any], None]]:
    """The state that a module continues from, and a function that stores the next one.

    Args:
      module: a module with an attribute `decode`; if it is False, there is no state.
      name: name of the state in the 'cache' collection.
      empty: returns the state before the first token.

    Returns:
      The state, or None without `decode`; and `keep(state)`, which stores the next
      state. While the module is being initialized, `keep` stores nothing, so that the
      stored state is the empty one.
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

    x is reshaped to a matrix first: on XLA's CPU backend the gradient of a product with
    [B·T E] is about twice as fast as with [B T E].

    Attributes:
      features: sizes of the output axes, which replace the contracted axes.
      contracted: number of last axes of x that are contracted.
      use_bias: whether b is added.
      kernel_init: initializer of W [*inputs *features], called with the shape of the
        flattened matrix.
      bias_init: initializer of b [*features].
      dtype: dtype of the computation; None: inferred from x and the parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the matrix product.
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
        """Computes x W + b.

        Args:
          x: an array [*leading *inputs], `inputs` being the contracted axes.

        Returns:
          An array [*leading *features].
        """
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
    """Base class of the mixers that carry a state from token to token.

    A subclass implements `mix_tokens`, and creates its parameters in it.

    Attributes:
      kernel_init: initializer of the input projections.
      out_kernel_init: initializer of the output projection.
      dtype: dtype of the computation; None: inferred from inputs and parameters. States
        are in float32, or in float64 for float64.
      decode: whether to continue from the state in the 'cache' collection, and to store
        the last state there; each call takes any number of tokens.
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
          deterministic: not used, since these mixers have no dropout.
          token_mask: False marks padding, on either side, which changes no state; None:
            there is none.
          token_positions: not used, since the order of the tokens is sufficient.
          sow_weights: not used, since there are no attention weights.

        Returns:
          The mixed tokens; the output at padding is arbitrary.

        Raises:
          ValueError: if heads or shapes do not fit.
        """
        del deterministic, token_positions, sow_weights
        return self.mix_tokens(x, token_mask)

    def mix_tokens(
        self, x: Float[Array, "B T E"], token_mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Computes the output of `__call__`; token_mask is False at padding."""
        raise NotImplementedError

    def project(
        self, name: str, x: Float[Array, "..."], *features: int, use_bias: bool = False
    ) -> Float[Array, "..."]:
        """Projects the last axis of x to axes of the sizes `features`."""
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
        """Projects the last `contracted` axes of x to one axis of size `width`."""
        return Projection(
            features=(width,),
            contracted=contracted,
            use_bias=use_bias,
            kernel_init=self.out_kernel_init,
            dtype=self.dtype,
            name=name,
        )(x)


class MLP(nn.Module):
    """The MLP W₂ gelu(W₁ x), applied to every position.

    Attributes:
      width: F, the width of the hidden layer.
      use_bias: whether the projections have biases.
      kernel_init: initializer of W₁.
      out_kernel_init: initializer of W₂.
      dtype: dtype of the computation.
    """

    width: int
    use_bias: bool
    kernel_init: nn.initializers.Initializer
    out_kernel_init: nn.initializers.Initializer
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*B T E"]) -> Float[Array, "*B T E"]:
        """Computes W₂ gelu(W₁ x) at every position."""
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
    """A causal convolution over tokens, separate in each channel.

        yₜ = Σ_w kernel_w x_{t-W+1+w},    w = 0 … W-1

    Attributes:
      width: W, the number of tokens that a token sees, including the token itself.
      decode: whether to continue from the last W - 1 tokens in the 'cache' collection,
        and to store them there.

    Reference: Arora et al., 2023, arXiv:2312.04927.
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
        """Convolves the real tokens as though padding were removed.

        Args:
          x: the tokens.
          token_mask: False marks padding, on either side; None: there is none.

        Returns:
          y, 0 at padding.
        """
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
    """Initializes the kernel to the identity plus noise of variance 1 / W.

    The identity and the noise contribute equally to the variance of the output. With
    less noise, or without the identity, a model takes longer to learn recall.
    """
    noise = nn.initializers.normal(shape[0] ** -0.5)(rng, shape, dtype)
    return noise.at[-1].add(1)


class Embedding(nn.Module):
    """A table of vectors, one per id, for the input and for a tied output layer.

    Attributes:
      size: V, the number of ids.
      width: E, the width of the vectors.
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
        """Looks up the vectors; an id outside 0 … V-1 gives NaN, never another row."""
        return self.embedding.at[ids].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        )

    def attend(self, x: Float[Array, "*B T E"]) -> Float[Array, "*B T V"]:
        """Computes the logits x · embeddingᵥ of every id v, in float32."""
        flat = x.reshape(-1, self.width)
        table = self.embedding.astype(x.dtype)
        logits = jnp.matmul(flat, table.T, preferred_element_type=jnp.float32)
        return logits.reshape(*x.shape[:-1], self.size)
