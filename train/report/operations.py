"""Floating-point operations of a function, counted as it runs.

XLA counts the body of a loop once. Here a body counts as often as it runs: a
`scan` by its length, a `while` by running it, so that blocks which attention skips cost
nothing.

    product, convolution    2 · numbers of the output · numbers summed in each
    reduction               numbers of the input
    moving numbers          0
    any other operation     numbers of the output
"""

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Primitives that move numbers without computing any.
MOVES = frozenset(
    {
        "broadcast_in_dim",
        "bitcast_convert_type",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "gather",
        "iota",
        "optimization_barrier",
        "pad",
        "reshape",
        "rev",
        "scatter",
        "select_n",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)


def count(fn: Callable[..., Any], *args: Any) -> int:
    """Counts the operations of fn(*args) by running it.

    Args:
      fn: a function that jax can trace.
      args: its arguments, pytrees of arrays.

    Returns:
      Floating-point operations; those on integers and booleans are free.
    """
    closed = jax.make_jaxpr(fn)(*args)
    _, operations = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return operations


def _run(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Any], int]:
    """Runs a jaxpr; returns its results and its operations."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    operations = 0
    for eqn in jaxpr.eqns:
        inputs = [read(x) for x in eqn.invars]
        if _has_while(eqn):
            results, new = LOOPS.get(eqn.primitive.name, _call)(eqn, inputs)
        else:
            results, new = _bind(eqn, inputs), _static(eqn)
        operations += new
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars], operations


def _bind(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    parameters = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*inputs, **parameters)
    return list(results) if eqn.primitive.multiple_results else [results]


def _static(eqn: core.JaxprEqn) -> int:
    """Counts the operations of an equation without loops that end by values."""
    name = eqn.primitive.name
    if bodies := list(core.jaxprs_in_params(eqn.params)):
        inner = [sum(map(_static, body.eqns)) for body in bodies]
        if name == "cond":
            return max(inner)
        return sum(inner) * (eqn.params["length"] if name == "scan" else 1)
    output: Any = eqn.outvars[0].aval
    inputs: list[Any] = [x.aval for x in eqn.invars]
    if not np.issubdtype(getattr(output, "dtype", np.int32), np.inexact):
        return 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        summed = math.prod(inputs[0].shape[axis] for axis in contracted)
        return 2 * math.prod(output.shape) * summed
    if name == "conv_general_dilated":
        kernel = inputs[1].shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(output.shape) * math.prod(kernel) // features
    if name in MOVES:
        return 0
    if name.startswith(("reduce_", "cum", "arg")):
        return math.prod(inputs[0].shape)
    return math.prod(output.shape)


def _has_while(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation contains a loop whose length depends on values."""
    return eqn.primitive.name == "while" or any(
        _has_while(e) for jaxpr in core.jaxprs_in_params(eqn.params) for e in jaxpr.eqns
    )


def _call(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> tuple[list[Any], int]:
    """Runs a function that is called once: `jit`, `custom_vjp_call`, `remat` ..."""
    (body,) = (x for x in eqn.params.values() if hasattr(x, "eqns"))
    # Closed (a jaxpr and its constants) or not; newer jax has one class for both.
    jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    return _run(jaxpr, consts, inputs)


def _scan(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> tuple[list[Any], int]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    # Stacked arrays come last and have one axis more than in the body. Their number is
    # read off the shapes, since versions of jax name it by different parameters.
    carries = sum(map(_same_rank, eqn.outvars, body.jaxpr.outvars))
    whole = sum(map(_same_rank, eqn.invars, body.jaxpr.invars))
    consts = whole - carries
    fixed, carry = inputs[:consts], inputs[consts:whole]
    steps = range(length)[:: -1 if eqn.params["reverse"] else 1]
    operations, stacked = 0, {}
    for i in steps:
        elements = [x[i] for x in inputs[whole:]]
        results, new = _run(body.jaxpr, body.consts, [*fixed, *carry, *elements])
        carry, stacked[i] = results[:carries], results[carries:]
        operations += new
    rows = zip(*(stacked[i] for i in range(length)), strict=True)
    return [*carry, *(jnp.stack(row) for row in rows)], operations


def _same_rank(outer: Any, inner: Any) -> bool:
    return outer.aval.ndim == inner.aval.ndim


def _while(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> tuple[list[Any], int]:
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    split = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_test, of_body = inputs[: split[0]], inputs[split[0] : sum(split)]
    carry, operations = list(inputs[sum(split) :]), 0
    while True:
        (again,), new = _run(test.jaxpr, test.consts, [*of_test, *carry])
        operations += new
        if not again:
            return carry, operations
        carry, new = _run(body.jaxpr, body.consts, [*of_body, *carry])
        operations += new


LOOPS = types.MappingProxyType({"scan": _scan, "while": _while})
