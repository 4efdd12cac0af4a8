"""Floating-point operations of a function, counted by how often each of them runs.

XLA counts the body of a loop once. Here a body counts as often as it runs: a `scan` by
its length, a `while` by its turns, which a run of the function counts. Blocks which
attention skips therefore cost nothing.

    product, convolution    2 · numbers of the output · numbers summed in each
    reduction               numbers of the input
    moving numbers          0
    any other operation     numbers of the output
"""

import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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
    """Counts the operations of fn(*args).

    Args:
      fn: a function that jax can trace.
      args: its arguments, pytrees of arrays.

    Returns:
      Floating-point operations; those on integers and booleans are free.
    """
    closed = jax.make_jaxpr(fn)(*args)
    turns: Sequence[Any] = []
    if _loops(closed.jaxpr):
        # Compiled, so that nothing is computed on which no loop's length depends.
        run = jax.jit(lambda *args: _run(closed.jaxpr, closed.consts, args)[1])
        turns = run(*jax.tree.leaves(args))
    return _operations(closed.jaxpr, 1, iter(turns))


# The operations of a jaxpr, from the turns of its loops


def _operations(jaxpr: core.Jaxpr, runs: int, turns: Iterator[Any]) -> int:
    """Counts the operations of all runs of a jaxpr.

    Args:
      jaxpr: what is run.
      runs: how often it is run.
      turns: how often each while loop's body is run in all, loop after loop.
    """
    return sum(_of_equation(eqn, runs, turns) for eqn in jaxpr.eqns)


def _of_equation(eqn: core.JaxprEqn, runs: int, turns: Iterator[Any]) -> int:
    name, bodies = eqn.primitive.name, list(core.jaxprs_in_params(eqn.params))
    if name == "while":
        in_turns = int(next(turns))
        test, body = (eqn.params[x].jaxpr for x in ("cond_jaxpr", "body_jaxpr"))
        tests = _operations(test, runs + in_turns, turns)
        return tests + _operations(body, in_turns, turns)
    if name == "cond":
        return max(_operations(body, runs, turns) for body in bodies)
    if name == "scan":
        runs *= eqn.params["length"]
    if bodies:
        return sum(_operations(body, runs, turns) for body in bodies)
    return runs * _once(eqn)


def _once(eqn: core.JaxprEqn) -> int:
    """Counts the operations of one run of an equation that contains no jaxpr."""
    name = eqn.primitive.name
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


def _loops(jaxpr: core.Jaxpr) -> int:
    """Counts the loops in a jaxpr whose length depends on values."""
    return sum(map(_loops_of, jaxpr.eqns))


def _loops_of(eqn: core.JaxprEqn) -> int:
    is_one = int(eqn.primitive.name == "while")
    return is_one + sum(map(_loops, core.jaxprs_in_params(eqn.params)))


# A run of a jaxpr that counts the turns of its while loops


def _run(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Runs a jaxpr; returns its results and the turns of each of its while loops."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    turns = []
    for eqn in jaxpr.eqns:
        inputs = [read(x) for x in eqn.invars]
        if _loops_of(eqn):
            results, new = LOOPS.get(eqn.primitive.name, _call)(eqn, inputs)
            turns += new
        else:
            results = _bind(eqn, inputs)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars], turns


def _bind(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    parameters = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*inputs, **parameters)
    return list(results) if eqn.primitive.multiple_results else [results]


def _call(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Runs a function that is called once: `jit`, `custom_vjp_call`, `remat` ..."""
    (body,) = (x for x in eqn.params.values() if hasattr(x, "eqns"))
    # Closed (a jaxpr and its constants) or not; newer jax has one class for both.
    jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    return _run(jaxpr, consts, inputs)


def _scan(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    body = eqn.params["jaxpr"]
    # Stacked arrays come last and have one axis more than in the body. Their number is
    # read off the shapes, since versions of jax name it by different parameters.
    carries = sum(map(_same_rank, eqn.outvars, body.jaxpr.outvars))
    whole = sum(map(_same_rank, eqn.invars, body.jaxpr.invars))
    fixed, carry = inputs[: whole - carries], inputs[whole - carries : whole]

    def step(carry: Any, elements: Any) -> Any:
        results, turns = _run(body.jaxpr, body.consts, [*fixed, *carry, *elements])
        return results[:carries], (results[carries:], turns)

    length, reverse = eqn.params["length"], eqn.params["reverse"]
    carry, (stacked, turns) = lax.scan(step, carry, inputs[whole:], length, reverse)
    return [*carry, *stacked], [jnp.sum(x) for x in turns]


def _same_rank(outer: Any, inner: Any) -> bool:
    return outer.aval.ndim == inner.aval.ndim


def _while(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    split = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_test, of_body = inputs[: split[0]], inputs[split[0] : sum(split)]
    assert not _loops(test.jaxpr), "a loop that decides whether another goes on"

    def again(state: Any) -> Any:
        (result,), _ = _run(test.jaxpr, test.consts, [*of_test, *state[0]])
        return result

    def turn(state: Any) -> Any:
        carry, turns = state
        results, new = _run(body.jaxpr, body.consts, [*of_body, *carry])
        return results, [a + b for a, b in zip(turns, [1, *new], strict=True)]

    none_yet = [jnp.int32(0)] * (1 + _loops(body.jaxpr))
    carry, turns = lax.while_loop(again, turn, (list(inputs[sum(split) :]), none_yet))
    return carry, turns


LOOPS = types.MappingProxyType({"scan": _scan, "while": _while})
