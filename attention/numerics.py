"""The dtype in which scores, softmax and sums are computed."""

import jax.numpy as jnp


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64, float32 for anything narrower.

    Not `jnp.promote_types(dtype, float32)`: strict dtype promotion refuses that.
    """
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
