"""A stranger's callable in JAX, NumPy or PyTorch, as NumPy in and NumPy out.

Trying tells which of the three it is: a PyTorch module says so; what answers
NumPy arrays with NumPy arrays is NumPy, since `x[0] = 1` fails on JAX's arrays and
`x.sort()` leaves them as they are; what JAX can trace is JAX; the rest is called with
arrays and, if PyTorch is loaded and that fails, with tensors. PyTorch itself is never
imported here: a callable that needs it has done so.
"""

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from attention.properties import calls, movements
from train import foreign
from train.callables import modes

Framework = Literal["JAX", "NumPy", "PyTorch"]
# NumPy arrays [B T ...] -> [B T ...].
Call = Callable[[np.ndarray], np.ndarray]
# A copy as an array of the callable's framework.
Convert = Callable[[np.ndarray], Any]


def detect(fn: Callable[[Any], Any], example: np.ndarray) -> tuple[Framework, bool]:
    """Detects which framework's arrays the callable takes.

    Args:
      fn: takes one argument.
      example: inputs that it should accept.

    Returns:
      The framework, and whether JAX can trace the callable.

    Raises:
      Exception: whatever the callable raises if it accepts none.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(modes.switchable(fn), torch.nn.Module):
        return "PyTorch", False
    reason, output = None, None
    # Foreign code, called with what it may not know: anything may go wrong.
    try:
        output = _call_with_numpy(fn, example)
    except Exception as error:
        reason = error
    if isinstance(output, np.ndarray):
        return "NumPy", False
    if is_traceable(fn, example):
        return "JAX", True
    if reason is None:
        return ("JAX" if isinstance(output, jax.Array) else "NumPy"), False
    with contextlib.suppress(Exception):
        fn(jnp.array(example))
        return "JAX", False
    if torch is None:
        raise reason
    with torch.no_grad():
        fn(_tensor(example))
    return "PyTorch", False


def _call_with_numpy(fn: Callable[[Any], Any], example: np.ndarray) -> Any:
    """The output for a NumPy array; a tracer if JAX's operations can be traced.

    To trace them takes a tenth of the time to do them one by one.
    """
    outputs = []

    def call() -> tuple[()]:
        outputs.append(_copied(fn)(np.array(example)))
        return ()

    try:
        jax.eval_shape(call)
    # Such as a branch by a value, which only a number can take.
    except Exception:
        return fn(np.array(example))
    return outputs[0]


def is_traceable(fn: Callable[[Any], Any], example: np.ndarray) -> bool:
    """Whether JAX can trace the callable, and so compile it.

    Not an object that remembers what it was called with: it would hold a tracer.
    """
    copied = _copied(fn)
    try:
        with foreign.guarded():
            jax.eval_shape(copied, jax.ShapeDtypeStruct(example.shape, example.dtype))
    except calls.Refused:
        return False
    memory = jax.tree.leaves(getattr(copied, "__dict__", {}))
    return not any(isinstance(value, jax.core.Tracer) for value in memory)


def _copied(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A copy of an object, so that the stranger's remembers nothing of a tracing."""
    if not inspect.isfunction(type(fn).__call__):
        return fn
    try:
        return copy.copy(fn)
    except Exception:
        return fn


def converter(fn: Callable[..., Any], framework: Framework) -> Convert:
    """Makes a function that turns NumPy inputs into a copy that the callable takes.

    PyTorch's ids are int64, and its tensors lie where the module's parameters are, as
    wide as the first of them that is floating.
    """
    if framework != "PyTorch":
        return jnp.array if framework == "JAX" else np.array
    parameters: Any = list(getattr(modes.switchable(fn), "parameters", tuple)())
    device = next((parameter.device for parameter in parameters), "cpu")
    floating = [p.dtype for p in parameters if p.is_floating_point()]

    def convert(inputs: np.ndarray) -> Any:
        tensor = _tensor(inputs).to(device)
        is_vectors = tensor.is_floating_point()
        return tensor.to(floating[0]) if is_vectors and floating else tensor

    return convert


def as_numpy(fn: Callable[[Any], Any], convert: Convert, *, traceable: bool) -> Call:
    """Wraps the callable from NumPy to NumPy, guarded and without gradients.

    Args:
      fn: takes one argument.
      convert: turns NumPy arrays into those of its framework.
      traceable: whether JAX can trace it; then it is compiled, every time anew.
    """
    torch = sys.modules.get("torch")
    compiled = jax.jit(lambda x: fn(x)) if traceable else fn

    def call(inputs: np.ndarray) -> np.ndarray:
        no_gradients = contextlib.nullcontext() if torch is None else torch.no_grad()
        with foreign.guarded(), no_gradients:
            return to_numpy(compiled(convert(inputs)))

    return call


def to_numpy(output: Any) -> np.ndarray:
    """Converts one array of real numbers to NumPy's, of the same type, bfloat16 too.

    Raises:
      UnusableOutput: if it is anything else.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(output, torch.Tensor):
        output = output.detach().cpu()
        name = str(output.dtype).removeprefix("torch.")
        if hasattr(np, name):
            output = output.numpy()
        else:  # bfloat16 and narrower: of the same name in JAX
            bits = getattr(torch, f"int{8 * output.element_size()}")
            output = output.contiguous().view(bits).numpy().view(getattr(jnp, name))
    if not isinstance(output, np.ndarray | jax.Array):
        raise foreign.UnusableOutput(
            f"returned {type(output).__name__!r}, expected one array: "
            "return the logits or the vectors alone"
        )
    array = np.array(output)
    real = jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.kind in "iub"
    if not real or array.dtype.itemsize > 8:
        raise foreign.UnusableOutput(f"returned {array.dtype}, expected real numbers")
    return array


def gradient(
    fn: Callable[[Any], Any], convert: Convert, framework: Framework, *, seed: int
) -> Call:
    """Makes the function x [B T E] -> largest |cᵀ ∂yᵢ/∂xⱼ| [T T].

    It computes what `movements.jacobian_norms` does, in either framework.

    Args:
      fn: takes vectors; JAX can trace it, or it is PyTorch's.
      convert: turns NumPy arrays into those of its framework.
      framework: 'JAX' or 'PyTorch'.
      seed: seed of the random cotangents.
    """
    rng = jax.random.key(seed)

    def norms(inputs: np.ndarray) -> np.ndarray:
        with foreign.guarded():
            if framework == "PyTorch":
                return _torch_jacobian_norms(fn, convert(inputs), seed)
            return movements.jacobian_norms(fn, inputs, rng=rng)

    return norms


def _torch_jacobian_norms(
    fn: Callable[[Any], Any], inputs: Any, seed: int
) -> Float[np.ndarray, "T T"]:
    """One backward pass per output position, with a random normal cotangent."""
    torch: Any = sys.modules["torch"]
    inputs.requires_grad_()
    outputs = fn(inputs)
    noise = np.random.default_rng(seed).standard_normal(tuple(outputs.shape))
    features = [axis for axis in range(outputs.ndim) if axis != 1]
    norms = []
    for output in (outputs * torch.tensor(noise).to(outputs)).sum(dim=features):
        (row,) = torch.autograd.grad(
            output, inputs, retain_graph=True, materialize_grads=True
        )
        norms.append(row.abs().amax(dim=(0, 2)).cpu().double().numpy())
    return np.stack(norms)


def _tensor(inputs: Shaped[np.ndarray, "B T ..."]) -> Any:
    tensor = sys.modules["torch"].tensor(inputs)
    return tensor if tensor.is_floating_point() else tensor.long()
