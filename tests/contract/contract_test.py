"""One suite: every implementation and every module, under one table of properties.

Each property of each subject is declared: it holds, it must fail in a stated way, or
it does not apply; `DECLARED` lists what does not simply hold, and `test_contract`
asserts it. A new row of `attention.IMPLEMENTATIONS` is a subject by itself, presumed to
honour everything.
"""

import functools
from typing import NamedTuple

import jax
import pytest

import attention
from attention import properties
from attention.dot_product import api, flash
from tests.contract import (
    budget,
    dependence,
    features,
    module_subjects,
    subjects,
    transformations,
    values,
    wrong_implementations,
)

# A check of one feature, dtype or size of those that it knows.
_with = functools.partial

# name -> check(subject), which raises unless the property holds
PROPERTIES = {
    # what it computes
    "plain": _with(budget.within_budget, feature="plain"),
    "scale": _with(budget.within_budget, feature="scale"),
    "bias": _with(budget.within_budget, feature="bias"),
    "is_causal": _with(budget.within_budget, feature="is_causal"),
    "window": _with(budget.within_budget, feature="window"),
    "masks": _with(budget.within_budget, feature="masks"),
    "softcap": _with(budget.within_budget, feature="softcap"),
    "score_mod": _with(budget.within_budget, feature="score_mod"),
    "sinks": features.sinks,
    "all at once": _with(budget.within_budget, feature=None),
    "budget in bfloat16": _with(budget.within_budget, feature=None, dtype="bfloat16"),
    "budget in float16": _with(budget.within_budget, feature=None, dtype="float16"),
    "oracle": values.of_oracle,
    "oracle in bfloat16": _with(values.in_narrow_floats, dtype="bfloat16"),
    "oracle in float16": _with(values.in_narrow_floats, dtype="float16"),
    "float64": budget.in_float64,
    "gradient of the log-sum-exp": features.log_sum_exp_gradient,
    "dropout": features.dropout,
    "T != S": values.of_memory,
    "D != H": features.other_width,
    "T = 1": values.of_one_token,
    "S = 0": features.no_keys,
    "nothing": values.of_nothing,
    "leading dimensions": features.leading_dimensions,
    "grouped heads": features.grouped_heads,
    "means of values": _with(features.means_of_values, sizes=(0.01, 1.0, 1e3)),
    "huge scores": _with(features.means_of_values, sizes=(1e8,)),
    # what it depends on
    "causal": dependence.causal,
    "independent rows": dependence.independent_rows,
    "padding invariant": dependence.padding_invariant,
    "NaN-safe": dependence.nan_safe,
    "padding reaches no gradient": features.padding_reaches_nothing,
    "permutation equivariant": dependence.permutation_equivariant,
    "shift invariant": dependence.shift_invariant,
    "deterministic": dependence.deterministic,
    "old and new keys": dependence.old_and_new_keys,
    # under transformations
    "vmap": transformations.vmap,
    "vmap of grad": transformations.vmap_of_grad,
    "jacobian": transformations.jacobian,
    "second derivatives": transformations.second_derivatives,
    "remat": transformations.remat,
    "scan": transformations.scan,
    "decoding": transformations.decoding,
    "shard_map": transformations.shard_map,
    "same dtype": transformations.same_dtype,
    "strict promotion": transformations.strict_promotion,
    "no leaked tracers": transformations.no_leaked_tracers,
    "one trace": transformations.one_trace,
    "jit = eager": transformations.eager,
    "fake_jit": transformations.fake_jit,
}


class MustFail(NamedTuple):
    """The check raises this error with these words."""

    error: type[Exception]
    words: str


class NotApplicable(NamedTuple):
    """The check asks for what the subject does not have."""

    why: str


ANY = "any property"
NO_HEADS = NotApplicable("it takes no queries, keys and values")
NO_DTYPE = MustFail(ValueError, "dtype must be one of float32, bfloat16")
ORDERED = MustFail(AssertionError, "under the permutation")
# What flax.linen.RMSNorm and jax.nn do to bfloat16.
PROMOTES = MustFail(jax.dtypes.TypePromotionError, "'bfloat16', 'float32'")
# (subject or kind of subject, property) -> what is declared; all else holds.
DECLARED = {
    ("xla", "softcap"): MustFail(ValueError, "does not honour softcap"),
    ("xla", "score_mod"): MustFail(ValueError, "does not honour score_mod"),
    ("xla", "sinks"): MustFail(ValueError, "does not honour sinks"),
    ("xla", "float64"): MustFail(ValueError, "does not honour float64"),
    ("xla", "dropout"): MustFail(ValueError, "does not honour dropout"),
    ("xla", "old and new keys"): MustFail(ValueError, "does not honour dropout"),
    ("xla", "D != H"): MustFail(ValueError, "does not honour values of another width"),
    ("xla", "S = 0"): MustFail(ValueError, "does not honour no keys"),
    ("xla", "nothing"): MustFail(ValueError, "does not honour no keys"),
    ("xla", "gradient of the log-sum-exp"): MustFail(AssertionError, "has another"),
    ("xla", "strict promotion"): PROMOTES,
    ("xla", "huge scores"): NotApplicable(
        "jax.nn scales after the product: NaN where a compiler contracts that"
    ),
    ("cudnn", "softcap"): MustFail(ValueError, "does not honour softcap"),
    ("cudnn", "score_mod"): MustFail(ValueError, "does not honour score_mod"),
    ("cudnn", "sinks"): MustFail(ValueError, "does not honour sinks"),
    ("cudnn", "float64"): MustFail(ValueError, "does not honour float64"),
    ("cudnn", "dropout"): MustFail(ValueError, "does not honour dropout"),
    ("cudnn", "old and new keys"): MustFail(ValueError, "does not honour dropout"),
    ("cudnn", "D != H"): MustFail(
        ValueError, "does not honour values of another width"
    ),
    ("cudnn", "S = 0"): MustFail(ValueError, "does not honour no keys"),
    ("cudnn", "nothing"): MustFail(ValueError, "does not honour no keys"),
    ("cudnn", ANY): MustFail(ValueError, "needs a CUDA device, got cpu"),
    ("module", "plain"): NO_HEADS,
    ("module", "scale"): NO_HEADS,
    ("module", "bias"): NO_HEADS,
    ("module", "is_causal"): NO_HEADS,
    ("module", "window"): NO_HEADS,
    ("module", "masks"): NO_HEADS,
    ("module", "softcap"): NO_HEADS,
    ("module", "score_mod"): NO_HEADS,
    ("module", "sinks"): NO_HEADS,
    ("module", "all at once"): NO_HEADS,
    ("module", "budget in bfloat16"): NO_HEADS,
    ("module", "budget in float16"): NO_HEADS,
    ("module", "gradient of the log-sum-exp"): NO_HEADS,
    ("module", "dropout"): NO_HEADS,
    ("module", "D != H"): NO_HEADS,
    ("module", "S = 0"): NO_HEADS,
    ("module", "grouped heads"): NO_HEADS,
    ("module", "means of values"): NO_HEADS,
    ("module", "huge scores"): NO_HEADS,
    ("module", "padding reaches no gradient"): NO_HEADS,
    ("module", "decoding"): NO_HEADS,
    ("attention", "causal"): MustFail(properties.LeakError, "depends on input"),
    ("attention", "shift invariant"): NotApplicable("it knows no positions"),
    ("rotary attention", "permutation equivariant"): ORDERED,
    ("block", "permutation equivariant"): ORDERED,
    ("block", "T != S"): NotApplicable("it attends to itself only"),
    ("block", "float64"): NO_DTYPE,
    ("block", "oracle in float16"): NO_DTYPE,
    ("block", "strict promotion"): PROMOTES,
    ("language model", "permutation equivariant"): ORDERED,
    ("language model", "T != S"): NotApplicable("it attends to itself only"),
    ("language model", "float64"): NO_DTYPE,
    ("language model", "oracle in float16"): NO_DTYPE,
    ("language model", "strict promotion"): PROMOTES,
    ("language model", "same dtype"): MustFail(
        AssertionError, "bfloat16 in, float32 out"
    ),
    ("block", "leading dimensions"): NotApplicable("it takes [B T E] only"),
    ("language model", "leading dimensions"): NotApplicable("it takes [B T E] only"),
    ("language model", "one trace"): NotApplicable("it makes its mask itself"),
}
# Of four queries and keys the default is one block: here are 2 x 2, the last ragged.
BLOCKS = {"flash in blocks": functools.partial(flash.attention, sizes=(3, 2))}
ROWS = {**attention.IMPLEMENTATIONS, **BLOCKS}
# These cannot tell one block from several: the subject with several tries them.
WHATEVER_BLOCKS = (
    "grouped heads",
    "independent rows",
    "permutation equivariant",
    "shift invariant",
    "deterministic",
    "old and new keys",
    "vmap",
    "vmap of grad",
    "jacobian",
    "second derivatives",
    "remat",
    "scan",
    "shard_map",
    "same dtype",
    "no leaked tracers",
    "one trace",
    "jit = eager",
    "fake_jit",
)
DECLARED |= {
    ("flash", name): NotApplicable("flash in blocks tries it")
    for name in WHATEVER_BLOCKS
}


def of_implementation(name):
    """The subject of a row of `attention.IMPLEMENTATIONS`."""
    lacks = frozenset(what for subject, what in DECLARED if subject == name)
    return subjects.Implementation(name, lacks)


SUBJECTS = (
    *map(of_implementation, ROWS),
    *module_subjects.MODULES,
)


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    """All of them can be asked for by name."""
    monkeypatch.setattr(api, "IMPLEMENTATIONS", ROWS)


def declared(subject, name):
    """What is declared of a subject's property; None: it holds."""
    for key in ((subject.name, name), (subject.kind, name), (subject.name, ANY)):
        if key in DECLARED:
            return DECLARED[key]
    return None


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        pytest.param(
            name,
            subject,
            marks=[pytest.mark.x64] if name == "float64" else [],
            id=f"{name}-{subject.name}",
        )
        for name in PROPERTIES
        for subject in SUBJECTS
        if not isinstance(declared(subject, name), NotApplicable)
    ],
)
def test_contract(name, subject):
    """What is declared is so."""
    verdict = declared(subject, name)
    if verdict is None:
        PROPERTIES[name](subject)
        return
    with pytest.raises(verdict.error, match=verdict.words):
        PROPERTIES[name](subject)


def test_declarations_are_of_what_there_is():
    """No line outlives its subject or its property."""
    names = {subject.name for subject in SUBJECTS}
    assert len(names) == len(SUBJECTS)
    assert names >= set(attention.IMPLEMENTATIONS)
    names |= {subject.kind for subject in SUBJECTS}
    for subject, name in DECLARED:
        assert subject in names and name in (*PROPERTIES, ANY), (subject, name)


# wrong implementation -> properties that it breaks, and some that it keeps
WRONG = {
    "ignores the mask": ({"masks", "causal"}, {"plain"}),
    "scales twice": ({"plain"}, {"causal"}),
    "reads head n % K": ({"plain", "grouped heads"}, {"decoding"}),
    "sees the last token": ({"causal"}, {"oracle in bfloat16", "independent rows"}),
    "mixes rows": ({"causal", "independent rows"}, {"oracle in bfloat16"}),
    "rounds its scores": ({"plain"}, {"means of values"}),
    "casts in silence": ({"strict promotion"}, {"same dtype"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_implementation_is_found(name, monkeypatch):
    """A row added to the table is in the suite, and breaks what it should."""
    rows = {**ROWS, name: wrong_implementations.WRONG[name]}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", rows)
    subject = of_implementation(name)
    broken, kept = WRONG[name]
    found = set()
    for what in sorted(broken | kept):
        try:
            PROPERTIES[what](subject)
        except Exception:
            found.add(what)
    assert found == broken
