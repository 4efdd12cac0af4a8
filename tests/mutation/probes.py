"""Mutations of the leak verifier and its assertions: see `mutations`."""

import types

_MOVEMENTS = (
    (
        "    same |= np.isnan(base) & np.isnan(edited)\n",
        "",
        "NaN of other bits has moved",
    ),
    (
        "sizes = np.maximum(np.abs(edited - base), _SIGN_OF_ZERO)",
        "sizes = np.abs(edited - base)",
        "0.0 that becomes -0.0 has not moved",
    ),
    (
        "return jnp.max(jnp.abs(gradient), axis=features)",
        "return jnp.sqrt(jnp.sum(gradient**2, axis=features))",
        "squares of small derivatives are 0",
    ),
)

_COMPARISON = (
    (
        "(np.arange(base.shape[1]) >= edit.since)",
        "(np.arange(base.shape[1]) > edit.since)",
        "an output must not see its own input",
    ),
    (
        "allowed = edit.rows[:, None] & (",
        "allowed = (edit.rows[:, None] | True) & (",
        "rows may see one another",
    ),
    (
        "unsafe = nonfinite & spreads",
        "unsafe = nonfinite",
        "a number that turns others into NaN is no leak",
    ),
    (
        "spreads = not ordinary or",
        "spreads = False and",
        "a huge number that overflows is a leak",
    ),
    (
        "edit = change.max(axis=1) if sizes is None",
        "edit = change.max(axis=(1, 2), keepdims=True)[..., 0] if sizes is None",
        "one column of huge numbers hides the movement of all others",
    ),
    (
        "_ulps(base.dtype) * _at_least_tenth(largest)",
        "0 * _at_least_tenth(largest)",
        "a few units in the last place are a leak",
    ),
)

_EXAMINATION = (
    (
        "parts += _halves(inputs, part)",
        "pass",
        "one refused id hides what the other edits show",
    ),
    (
        "        _confirm(fn, base, worst, tolerance)\n",
        "        pass\n",
        "a function's own memory is a leak",
    ),
)

_SHRINKING = (
    (
        "end = max(smallest.source, smallest.target) + 1",
        "end = smallest.inputs.shape[1]",
        "the smallest input keeps what follows the edit",
    ),
)

_EDITS = (
    (
        "return (token + 1 + turn) % vocab_size",
        "return (token + turn) % vocab_size",
        "a token is replaced by itself, and one id is never tried",
    ),
    (
        "chosen = (start + np.arange(copies)) % count",
        "chosen = np.arange(copies) % count",
        "the same few replacements are tried again",
    ),
    (
        "since = position if causal else 0",
        "since = 0",
        "a row may see its own future when rows are edited one at a time",
    ),
)

_VALUE_PROBES = (
    (
        "finding = _number_on_the_way(subject, finding) or finding",
        "pass",
        "a stabilising maximum passes for an overflow",
    ),
)

_PROBES = (
    ("np.triu(norms != 0, 1)", "np.tril(norms != 0, -1)", "the past is the future"),
    (
        '"leak": later & finite & (',
        '"leak": later & (',
        "an infinite derivative is a leak",
    ),
    (
        '        _edit_single_rows("training", subject, rows, _diagonal(rows)),\n',
        "",
        "in training mode rows may see one another",
    ),
    ("4 * power + 1}", "2 * power - 1}", "no length is past a power of two"),
)

_ASSERTIONS = (
    (
        "(subject, rows, everywhere, one, causal=False)",
        "(subject, rows, everywhere, one, causal=True)",
        "rows must be causal to be independent",
    ),
)

_INVARIANCE = (
    (
        "(0, 1, 1e3, np.nan, np.inf) if nan_safe",
        "(0, 1, 1e3) if nan_safe",
        "NaN is no padding",
    ),
    ("splits = ([1] * length, [length],", "splits = ([length],", "no single steps"),
)

_EQUIVALENCE = (
    (
        "zip(actual_by, expected_by, strict=True)",
        "zip(actual_by, actual_by, strict=True)",
        "gradients are not compared",
    ),
    ("equal_nan=True", "equal_nan=False", "NaN is not NaN"),
)

ROWS = types.MappingProxyType(
    {
        "attention/properties/movements.py": _MOVEMENTS,
        "attention/properties/comparison.py": _COMPARISON,
        "attention/properties/examination.py": _EXAMINATION,
        "attention/properties/shrinking.py": _SHRINKING,
        "attention/properties/edits.py": _EDITS,
        "attention/properties/value_probes.py": _VALUE_PROBES,
        "attention/properties/probes.py": _PROBES,
        "attention/properties/assertions.py": _ASSERTIONS,
        "attention/properties/invariance.py": _INVARIANCE,
        "attention/properties/equivalence.py": _EQUIVALENCE,
    }
)
