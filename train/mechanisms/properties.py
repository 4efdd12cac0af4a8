"""What each mechanism keeps, what it must break, and what it costs: one table.

A property holds, must fail (a check that nothing fails says nothing), or does not
apply. What must fail is tried as well: a mechanism that keeps what it cannot keep is
not what its name says.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from attention import properties
from attention.properties import equivalence
from train.mechanisms import cores, table

Part = TypeVar("Part")

B, T = cores.B, cores.T
HOLDS, MUST_FAIL, NOT_APPLICABLE = "holds", "must fail", "not applicable"
# Of the largest value, as for the forms of a recurrence in float32.
_TOLERANCE = 1e-5


class Examined(NamedTuple):
    """A layer and a core, ready to be asked."""

    layer: table.Layer
    params: Any
    fn: Callable[[Any, Any], Any]  # (x, token_mask) to y, compiled
    core: cores.Core | None


def _examined(name: str) -> Examined:
    subject = table.SUBJECTS[name]
    layer = subject.layer(cores.SMALL, T)
    rng = np.random.default_rng(1)
    # Not small: what passes a nonlinearity unnoticed shows nothing.
    params = jax.tree.map(
        lambda x: (0.5 * rng.normal(size=x.shape)).astype(x.dtype), layer.shapes
    )
    fn = jax.jit(functools.partial(layer.apply, params))
    return Examined(layer, params, fn, subject.core and subject.core())


X = cores.normal(B, T, cores.SMALL.width, seed=5)
_LENGTHS = np.array([T, T - 3])


def _all_real(subject: Examined) -> Callable[[Any], Any]:
    return lambda x: subject.fn(x, np.ones(x.shape[:2], bool))


def _causal(subject: Examined) -> None:
    properties.assert_causal(_all_real(subject), X)


def _padding(subject: Examined) -> None:
    def fn(x: Any, lengths: Any) -> Any:
        return subject.fn(x, np.arange(x.shape[1]) < np.asarray(lengths)[:, None])

    properties.assert_padding_invariant(fn, X, _LENGTHS, nan_safe=True)


def _batch(subject: Examined) -> None:
    properties.assert_batch_independent(_all_real(subject), X)


def _permutation(subject: Examined) -> None:
    properties.assert_permutation_equivariant(_all_real(subject), X)


def _given(part: Part | None) -> Part:
    """What a property is about; ValueError, which no `must fail` takes, if missing."""
    if part is None:
        raise ValueError("declared, but there is nothing to try it on")
    return part


def _hull(subject: Examined) -> None:
    core = _given(subject.core)
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
    # Compiled for X, whose start is all that a causal layer knows of its start.
    full = _all_real(subject)(X)[:, :length]
    properties.assert_streaming_equals_full(lambda x: full, step, cache, X[:, :length])


def _assert_same(found: Any, wanted: Any, what: str) -> None:
    wanted = np.asarray(wanted, np.float32)
    atol = _TOLERANCE * max(1.0, float(np.max(np.abs(wanted))))
    equivalence.assert_close(np.asarray(found), wanted, what, atol=atol)


def _softmax(subject: Examined) -> None:
    """Against softmax in float64, written out."""
    core = _given(subject.core)
    fn = _given(core.softmax)
    query, key, value = (
        np.asarray(x, np.float64) for x in (cores.QUERY, cores.KEY, core.values)
    )
    scores = np.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    if core.visible is not None:
        weights *= np.asarray(core.visible.materialize(T, T))
    weights /= weights.sum(axis=-1, keepdims=True)
    wanted = np.einsum("bnts,bsnd->btnd", weights, value)
    _assert_same(jax.jit(fn)(core.values), wanted, "against softmax")


def _loop(subject: Examined) -> None:
    core = _given(subject.core)
    wanted = _given(core.loop)(core.values)
    for name, form in core.forms.items():
        _assert_same(jax.jit(form)(core.values), wanted, f"form {name}")


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
    """What was declared of a property, and what contradicts it: '' if nothing does."""

    declared: str
    contradiction: str


def declared(name: str) -> dict[str, str]:
    """What the table of mechanisms says of every property.

    Args:
      name: of a row.

    Returns:
      Property to 'holds', 'must fail' or 'not applicable'.

    Raises:
      ValueError: if the row names an unknown property, or one of them twice.
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
    """Tries every property of a mechanism.

    Args:
      name: of a row.

    Returns:
      Property to what was declared and whether it is so.
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
