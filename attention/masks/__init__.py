"""Masks as values: constructors, what composes them, and which blocks they fill."""

from attention.masks.constructors import (
    Blocks,
    Mask,
    Predicate,
    bigbird,
    causal,
    chunked,
    dense,
    lengths,
    longformer,
    prefix,
    segments,
    sliding_window,
    where,
    window,
)

__all__ = [
    "Blocks",
    "Mask",
    "Predicate",
    "bigbird",
    "causal",
    "chunked",
    "dense",
    "lengths",
    "longformer",
    "prefix",
    "segments",
    "sliding_window",
    "where",
    "window",
]
