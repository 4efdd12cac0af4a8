"""The properties of the table of mechanisms, and their checks.

A property of a mechanism is declared to hold, to fail, or not to apply. A property that
must fail is checked as well: if it held, either the check would be too weak or the
mechanism would not be the one that its name says.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from attention import properties
from attention.properties import equivalence
from train.mechanisms import cores, table

Part = TypeVar("Part")

B, T = cores.B, cores.T
HOLDS, MUST_FAIL, NOT_APPLICABLE = "holds", "must fail", "not applicable"
# Relative to the largest value, for forms of a recurrence in float32.
_TOLERANCE = 1e-5


class Examined(NamedTuple):
    """The layer and the core of a mechanism, on which its properties are checked.

    Attributes:
      layer: the layer.
      params: random parameters of the layer.
      fn: the compiled layer with these parameters, (x, token_mask) -> y.
      core: the core; None if the mechanism has none.
    """

    layer: table.Layer
    params: Any
    fn: Callable[[Any, Any], Any]
    core: cores.Core | None


def _examined(name: str) -> Examined:
    subject = table.SUBJECTS[name]
    layer = subject.layer(cores.SMALL, T)
    rng = np.random.default_rng(1)
    # With small parameters the nonlinearities would be almost linear.
    params = jax.tree.map(
        lambda x: (0.5 * rng.normal(size=x.shape)).astype(x.dtype), layer.shapes
    )
    fn = jax.jit(functools.partial(layer.apply, params))
    return Examined(layer, params, fn, subject.core and subject.core())


X = cores.normal(B, T, cores.SMALL.width, seed=5)
_LENGTHS = np.array([T, T - 3])
# At least as many as `assert_causal` edits at once.
_ROWS = 20


def _all_real(subject: Examined) -> Callable[[Any], Any]:
    return lambda x: subject.fn(x, np.ones(x.shape[:2], bool))


def _causal(subject: Examined) -> None:
    def in_one_shape(x: Any) -> Any:
        """Compiles one program for all the numbers of rows that the probes ask for."""
        rows = jnp.resize(x, (_ROWS, *x.shape[1:]))
        return _all_real(subject)(rows)[: len(x)]

    properties.assert_causal(in_one_shape, X)


def _padding(subject: Examined) -> None:
    def fn(x: Any, lengths: Any) -> Any:
        return subject.fn(x, np.arange(x.shape[1]) < np.asarray(lengths)[:, None])

    properties.assert_padding_invariant(fn, X, _LENGTHS, nan_safe=True)


def _batch(subject: Examined) -> None:
    properties.assert_batch_independent(_all_real(subject), X)


def _permutation(subject: Examined) -> None:
    properties.assert_permutation_equivariant(_all_real(subject), X)


def _required(part: Part | None) -> Part:
    """Returns the part of a mechanism that a property is about.

    Raises:
      ValueError: if the part is None. An AssertionError would count as the failure of
        a property that must fail.
    """
    if part is None:
        raise ValueError("declared, but there is nothing to try it on")
    return part


def _hull(subject: Examined) -> None:
    core = _required(subject.core)
    properties.assert_in_hull(jax.jit(core.fn), core.values)


def _streaming(subject: Examined) -> None:
    module, length = subject.layer.stream, 3

    @jax.jit
    def step(cache: Any, x: Any) -> tuple[Any, Any]:
        y, cache = module.apply(
            subject.params | cache, x, deterministic=True, mutable=["cache"]
        )
        return cache, y

    init = functools.partial(module.init, deterministic=True)
    cache = {"cache": jax.jit(init)(jax.random.key(0), X)["cache"]}
    # The layer is called with all of X, for which it is compiled already. Since it is
    # causal, its first outputs are those of the first inputs alone.
    full = _all_real(subject)(X)[:, :length]
    properties.assert_streaming_equals_full(
        lambda x: full, step, cache, X[:, :length], atol=_tolerance(full)
    )


def _tolerance(expected: Any) -> float:
    return _TOLERANCE * max(1.0, float(np.max(np.abs(expected))))


def _assert_same(actual: Any, expected: Any, what: str) -> None:
    expected = np.asarray(expected, np.float32)
    equivalence.assert_close(
        np.asarray(actual), expected, what, atol=_tolerance(expected)
    )


def _softmax(subject: Examined) -> None:
    """Compares the core with softmax attention, computed in float64."""
    core = _required(subject.core)
    fn = _required(core.softmax)
    query, key, value = (
        np.asarray(x, np.float64) for x in (cores.QUERY, cores.KEY, core.values)
    )
    scores = np.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    if core.visible is not None:
        weights *= np.asarray(core.visible.materialize(T, T))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("bnts,bsnd->btnd", weights, value)
    _assert_same(jax.jit(fn)(core.values), expected, "against softmax")


def _loop(subject: Examined) -> None:
    core = _required(subject.core)
    expected = _required(core.loop)(core.values)
    for name, form in core.forms.items():
        _assert_same(jax.jit(form)(core.values), expected, f"form {name}")


PROPERTIES: Mapping[str, Callable[[Examined], None]] = types.MappingProxyType(
    {
        "causal": _causal,
        "padding": _padding,
        "batch": _batch,
        "permutation": _permutation,
        "hull": _hull,
        "streaming": _streaming,
        "softmax": _softmax,
        "loop": _loop,
    }
)


class Cell(NamedTuple):
    """The result of a check of one property.

    Attributes:
      declared: 'holds', 'must fail' or 'not applicable'.
      contradiction: how the check contradicts the declaration; '' if it does not.
    """

    declared: str
    contradiction: str


def declared(name: str) -> dict[str, str]:
    """Looks up the declared properties of a mechanism.

    Args:
      name: name of a row of the table of mechanisms.

    Returns:
      A mapping from each property to 'holds', 'must fail' or 'not applicable'.

    Raises:
      ValueError: if the row names an unknown property, or a property twice.
    """
    subject = table.SUBJECTS[name]
    unknown = (subject.holds | subject.must_fail) - PROPERTIES.keys()
    contrary = subject.holds & subject.must_fail
    if unknown or contrary:
        raise ValueError(
            f"{name}: each property is one of {', '.join(PROPERTIES)} and stands once, "
            f"got {sorted(unknown | contrary)}"
        )
    words = dict.fromkeys(PROPERTIES, NOT_APPLICABLE)
    words |= dict.fromkeys(subject.holds, HOLDS)
    return words | dict.fromkeys(subject.must_fail, MUST_FAIL)


def examine(name: str) -> dict[str, Cell]:
    """Checks every declared property of a mechanism.

    Args:
      name: name of a row of the table of mechanisms.

    Returns:
      A mapping from each property to its declaration and the result of its check.

    Raises:
      ValueError: if the row names an unknown property or a property twice, or declares
        a property of a part that the mechanism does not have.
    """
    subject = _examined(name)
    cells = {}
    for label, word in declared(name).items():
        contradiction = ""
        if word != NOT_APPLICABLE:
            contradiction = _contradiction(PROPERTIES[label], subject, word)
        cells[label] = Cell(word, contradiction)
    return cells


def _contradiction(
    check: Callable[[Examined], None], subject: Examined, word: str
) -> str:
    try:
        check(subject)
    except AssertionError as error:
        return "" if word == MUST_FAIL else str(error)
    return "it holds" if word == MUST_FAIL else ""
