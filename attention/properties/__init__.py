"""The verifier: assertions about any function, and the probes behind them."""

from attention.properties.assertions import (
    assert_batch_independent,
    assert_causal,
    assert_deterministic,
    dependency_matrix,
)
from attention.properties.equivalence import assert_equivalent
from attention.properties.findings import LeakError
from attention.properties.hull import assert_in_hull
from attention.properties.invariance import (
    assert_padding_invariant,
    assert_permutation_equivariant,
    assert_streaming_equals_full,
)

__all__ = [
    "LeakError",
    "assert_batch_independent",
    "assert_causal",
    "assert_deterministic",
    "assert_equivalent",
    "assert_in_hull",
    "assert_padding_invariant",
    "assert_permutation_equivariant",
    "assert_streaming_equals_full",
    "dependency_matrix",
]
