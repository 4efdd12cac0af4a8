"""The implementations that the benchmark of attention compares, in a literal table.

They are those of `attention.IMPLEMENTATIONS` ('auto' is implementation=None) and those
of other libraries. A kernel of the user's has the signature of
`jax.nn.dot_product_attention`, of which `is_causal` is used, and takes part as
'target'.
"""

import functools
import importlib
import importlib.util
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from jax import Array

import attention
from train.bench import workload

TARGET = "target"


class Contender(NamedTuple):
    """An implementation that can be measured.

    Attributes:
      missing: returns why it is not available here, or None if it is.
      runners: (work, arrays) -> a runner for each of its modes.
      modes: 'jit' and 'eager', or one of them.
    """

    missing: Callable[[], str | None]
    runners: Callable[[workload.Work, Sequence[Array]], dict[str, workload.Runner]]
    modes: tuple[str, ...] = ("jit", "eager")


def of_kernel(
    kernel: workload.Kernel, missing: Callable[[], str | None] = lambda: None
) -> Contender:
    """Makes a contender of a kernel.

    Args:
      kernel: `kernel(query, key, value, is_causal=...)`, traceable by jax.
      missing: returns why it is not available here, or None if it is.
    """

    def runners(
        work: workload.Work, arrays: Sequence[Array]
    ) -> dict[str, workload.Runner]:
        bound = functools.partial(kernel, is_causal=work.is_causal)
        return workload.jax_runners(bound, arrays)

    return Contender(missing, runners)


def _flax(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    tokens = jnp.zeros((1, query.shape[1]), jnp.int32)
    mask = linen.make_causal_mask(tokens, dtype=bool) if is_causal else None
    return linen.dot_product_attention(query, key, value, mask=mask, deterministic=True)


def _tokamax(query: Array, key: Array, value: Array, *, is_causal: bool) -> Any:
    tokamax = importlib.import_module("tokamax")  # an extra
    return tokamax.dot_product_attention(query, key, value, is_causal=is_causal)


def splash(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool,
    interpret: bool = False,
) -> Array:
    """Splash attention, jax's kernel for TPUs, on [B T N H]."""
    from jax.experimental.pallas.ops.tpu import splash_attention  # slow to import

    batch_size, length, num_heads, width = query.shape
    kv_heads = key.shape[2]
    shape = (length, key.shape[1])
    mask = splash_attention.CausalMask if is_causal else splash_attention.FullMask
    group = [mask(shape)] * (num_heads // kv_heads)
    kernel = splash_attention.make_splash_mqa_single_device(
        splash_attention.MultiHeadMask(group), interpret=interpret
    )
    # The kernel takes no scale.
    grouped = (query / width**0.5).astype(query.dtype)
    grouped = grouped.reshape(batch_size, length, kv_heads, -1, width)
    output = jax.vmap(jax.vmap(kernel))(
        grouped.transpose(0, 2, 3, 1, 4),
        key.transpose(0, 2, 1, 3),
        value.transpose(0, 2, 1, 3),
    )
    return output.transpose(0, 3, 1, 2, 4).reshape(query.shape)


def _torch_runners(
    work: workload.Work, arrays: Sequence[Array]
) -> dict[str, workload.Runner]:
    from train.bench import torch_sdpa  # an extra, and slow to import

    return torch_sdpa.runners(work, arrays)


def _torch_missing() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    from train.bench import torch_sdpa

    return torch_sdpa.missing()


def _tokamax_missing() -> str | None:
    return None if importlib.util.find_spec("tokamax") else "tokamax is not installed"


def _cudnn_missing() -> str | None:
    on_cuda = "cuda" in jax.devices()[0].client.platform_version
    return None if on_cuda else "cuDNN needs a CUDA device"


def _splash_missing() -> str | None:
    return None if jax.default_backend() == "tpu" else "splash attention needs a TPU"


CONTENDERS: Mapping[str, Contender] = types.MappingProxyType(
    {
        name: of_kernel(
            functools.partial(attention.dot_product_attention, implementation=name),
            _cudnn_missing if name == "cudnn" else lambda: None,
        )
        for name in attention.IMPLEMENTATIONS
    }
    | {
        "auto": of_kernel(attention.dot_product_attention),
        "jax.nn.xla": of_kernel(
            functools.partial(jax.nn.dot_product_attention, implementation="xla")
        ),
        "jax.nn.cudnn": of_kernel(
            functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
            _cudnn_missing,
        ),
        "flax.linen": of_kernel(_flax),
        "torch": Contender(_torch_missing, _torch_runners, modes=("eager",)),
        "tokamax": of_kernel(_tokamax, _tokamax_missing),
        "splash": of_kernel(splash, _splash_missing),
    }
)


def choose(
    names: Sequence[str], target: workload.Kernel | None
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Selects the available contenders.

    Args:
      names: keys of `CONTENDERS`.
      target: a kernel of the user's, or None.

    Returns:
      The contenders by name, and for each unavailable name the reason.

    Raises:
      ValueError: a name is unknown, or no contender is available.
    """
    table = dict(CONTENDERS)
    unknown = [name for name in names if name not in table]
    if unknown:
        raise ValueError(
            f"no implementation {unknown[0]!r}, only {', '.join(CONTENDERS)}"
        )
    reasons = {name: table[name].missing() for name in names}
    chosen = {name: table[name] for name, reason in reasons.items() if reason is None}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    if target is not None:
        chosen = {TARGET: of_kernel(target)} | chosen
    if not chosen:
        raise ValueError(f"nobody is left to be measured: {left_out}")
    return chosen, left_out
