"""Implementations 'xla' and 'cudnn': `jax.nn.dot_product_attention`, with its limits.

One deviation, as everywhere here: a query that sees no key gives 0, not the mean of the
values. jax.nn masks with a finite number, so under 'xla' a weight is exactly 0 only
while the visible scores of its row stay above about -2e38; and its log-sum-exp has no
gradient.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.dot_product import arguments

# Bound at import, since a test replaces jax.nn's function by ours; `Any`, since its
# return type depends on return_residual.
_JAX_NN: Any = jax.nn.dot_product_attention


def attention(
    name: Literal["xla", "cudnn"],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    options: arguments.Options,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"] | None]:
    """Calls `jax.nn.dot_product_attention`; a query that sees no key gives 0.

    Args:
      name: jax.nn's name of the implementation.
      query: queries.
      key: keys.
      value: values.
      options: masks, bias and scale.

    Returns:
      The output and, with `options.return_residual`, the log-sum-exp of every row.

    Raises:
      ValueError: if it does not have a feature, or there is no device for it.
    """
    if reasons := limits(query, key, value, options):
        raise ValueError(
            f"implementation={name!r} does not honour {', '.join(reasons)}; "
            f"use implementation='reference' or None"
        )
    if name == "cudnn" and not on_cuda():
        raise ValueError(
            f"implementation='cudnn' needs a CUDA device, got {jax.default_backend()}"
        )
    if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
        # jax.nn's product of float16 with sums in float32 does not exist on CPUs.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    window, is_causal = options.local_window_size, options.is_causal
    if window is not None and (is_causal or window[1] == 0):
        # The same keys; cuDNN's kernel knows windows as causal ones only.
        window, is_causal = (window[0], 0), True
    outputs = _JAX_NN(
        query,
        key,
        value,
        options.bias,
        arguments.materialize(options.mask, query, key),
        scale=options.scale,
        is_causal=is_causal,
        query_seq_lengths=options.query_seq_lengths,
        key_value_seq_lengths=options.key_value_seq_lengths,
        local_window_size=window,
        implementation=name,
        return_residual=options.return_residual,
    )
    output, residual = outputs if options.return_residual else (outputs, None)
    visible = arguments.materialize(options.visible, query, key)
    if visible is not None:
        sees = jnp.any(visible, axis=-1)  # [B|1 N|1 T|1]
        sees = jnp.swapaxes(sees, 1, 2)
        output = jnp.where(sees[..., None], output, 0)
        if residual is not None:
            residual = jnp.where(sees, residual, -jnp.inf)
    return output, residual


def limits(
    query: Array, key: Array, value: Array, options: arguments.Options
) -> list[str]:
    """Names the features of a call that jax.nn does not have."""
    features = {
        "float64": query.dtype == jnp.float64,
        "values of another width than the keys": value.shape[-1] != key.shape[-1],
        "no keys": key.shape[1] == 0,
        "score_mod": options.score_mod is not None,
        "softcap": options.softcap is not None,
        "sinks": options.sinks is not None,
        "dropout": options.dropout_rng is not None,
        "precision": options.precision is not None,
    }
    return [words for words, is_used in features.items() if is_used]


def on_cuda() -> bool:
    """Whether the default device is a CUDA device."""
    return "cuda" in jax.devices()[0].client.platform_version
