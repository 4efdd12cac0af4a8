"""PyTorch's scaled_dot_product_attention as a runner.

    torch.nn.functional.scaled_dot_product_attention(query, key, value) on [B N T H]

The tensors are in PyTorch's order before the clock starts. Only `train.bench.peers`
imports this, and only where PyTorch is installed (the extra `peers`).
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional

from train.bench import workload


def missing() -> str | None:
    """Returns why PyTorch cannot run beside jax here, or None if it can."""
    if jax.default_backend() == "cpu":
        return None
    if jax.default_backend() == "gpu" and torch.cuda.is_available():
        return None
    return f"PyTorch has no device of jax's platform, {jax.default_backend()}"


def runners(
    work: workload.Work, arrays: Sequence[jax.Array]
) -> dict[str, workload.Runner]:
    """Makes the runner 'eager': forward without a graph, or gradients by autograd.

    Args:
      work: shapes, dtype and direction of the call.
      arrays: query, key, value and, for gradients, the output's cotangent.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    tensors = [_tensor(x, work.dtype) for x in arrays]
    inputs, cotangents = tensors[:3], tensors[3:]
    attend = functools.partial(
        functional.scaled_dot_product_attention,
        is_causal=work.is_causal,
        enable_gqa=work.num_heads != work.num_kv_heads,
    )
    for x in inputs:
        x.requires_grad_(work.backward)

    def function(*cotangents: Any) -> Any:
        if not work.backward:
            with torch.no_grad():
                return (attend(*inputs),)
        output = attend(*inputs)
        return output.detach(), *torch.autograd.grad(output, inputs, *cotangents)

    def run() -> None:
        function(*cotangents)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()

    def outputs(cotangent: jax.Array | None) -> workload.Outputs:
        rest = [] if cotangent is None else [_tensor(cotangent, work.dtype)]
        results = function(*rest)
        return [x.double().transpose(1, 2).cpu().numpy() for x in results]

    return {"eager": workload.Runner(run, outputs)}


def _tensor(x: jax.Array, dtype: str) -> Any:
    """Copies [B L N H] to a contiguous tensor [B N L H] on the device jax uses."""
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    array = np.asarray(x)
    if dtype == "bfloat16":  # which NumPy does not have
        array = array.astype(np.float32)
    tensor = torch.tensor(array).transpose(1, 2).contiguous()
    return tensor.to(device, getattr(torch, dtype))
