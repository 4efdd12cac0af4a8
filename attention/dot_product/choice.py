"""Which implementation `implementation=None` uses, by platform, sizes and arguments.

It is the first one in `AGAINST` against which there is no reason.
"""

import types
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.dot_product import arguments, jax_nn

# Scores of one head from which blocks are faster than the dense form: measured on two
# cores of an AMD EPYC; on other platforms it is a guess that bounds the memory.
SCORES = 2**18


def choose(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    options: arguments.Options,
) -> str:
    """Names the implementation that `implementation=None` uses."""
    call = query, key, value, options
    return next(name for name, against in AGAINST.items() if not against(*call))


def explain(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    options: arguments.Options,
) -> str:
    """Says which implementation is chosen, and why the others are not, a line each."""
    call = query, key, value, options
    name = choose(*call)
    lines = [f"{name}: chosen on {jax.default_backend()}"]
    for other, against in AGAINST.items():
        if other != name:
            reasons = against(*call) or [f"{name} comes first"]
            lines.append(f"{other}: not chosen: {'; '.join(reasons)}")
    return "\n".join(lines)


def _against_cudnn(
    query: Array, key: Array, value: Array, options: arguments.Options
) -> list[str]:
    _, length, _, width = query.shape
    window = options.local_window_size
    odd = length % 2 == 1 or key.shape[1] % 2 == 1
    reasons = {
        "there is no CUDA device": not jax_nn.on_cuda(),
        "it takes float16 and bfloat16 only": query.dtype
        not in (jnp.float16, jnp.bfloat16),
        "it takes widths up to 128 that 8 divides": width > 128 or width % 8 != 0,
        "its scale is a number, not an array": not isinstance(
            options.scale, (int, float)
        ),
        # The kernel differentiates a bias, as which it takes a mask, in some shapes
        # only, and the log-sum-exp not at all.
        "it differentiates a bias in some shapes only": options.bias is not None,
        "it takes a mask for even lengths only": options.mask is not None and odd,
        "its log-sum-exp has no gradient": options.return_residual,
        "its windows are causal": window is not None
        and window[1] != 0
        and not options.is_causal,
    }
    lacks = jax_nn.limits(query, key, value, options)
    return [
        *(f"it does not honour {what}" for what in lacks),
        *(reason for reason, holds in reasons.items() if holds),
    ]


def _against_flash(
    query: Array, key: Array, value: Array, options: arguments.Options
) -> list[str]:
    del value, options
    T, S = query.shape[1], key.shape[1]
    if T * S < SCORES:
        return [f"below {SCORES} scores a head the dense form is faster: {T} x {S}"]
    return []


AGAINST: Mapping[str, Callable[..., list[str]]] = types.MappingProxyType(
    {
        "cudnn": _against_cudnn,
        "flash": _against_flash,
        "reference": lambda *call: [],
        "xla": lambda *call: ["it is the dense form with fewer features"],
    }
)
