"""The verifier: assertions about any function, and the probes behind them."""

from attention.properties.assertions import (
    LeakError,
    assert_batch_independent,
    assert_causal,
    assert_deterministic,
    assert_equivalent,
    assert_in_hull,
    assert_padding_invariant,
    assert_permutation_equivariant,
    assert_streaming_equals_full,
    dependency_matrix,
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
