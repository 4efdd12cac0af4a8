"""Attention as pure functions on arrays: no parameters, no flags, no files.

Letters, in every signature, einsum string and comment:

    B batch             T query length      S key/value length
    N query heads       K key/value heads   G = N / K
    H query/key width   D value width       E model width       F MLP width
    V vocabulary        L layers            M features, landmarks or state size

Public functions take [B T N H]; each mechanism is written for one head, on matrices,
and `heads` lifts it. Masks are True where a query may attend. Scores, softmax and
sums are in float32 at least; outputs have the dtype of the values.
"""

from attention import (
    additive,
    heads,
    linear,
    lowrank,
    mamba,
    masks,
    positions,
    properties,
    random_features,
    recurrence,
    retention,
    rwkv,
    rwkv6,
    score_mods,
    softmax,
)
from attention.dot_product import (
    IMPLEMENTATIONS,
    attention_weights,
    dot_product_attention,
)

__all__ = [
    "IMPLEMENTATIONS",
    "additive",
    "attention_weights",
    "dot_product_attention",
    "heads",
    "linear",
    "lowrank",
    "mamba",
    "masks",
    "positions",
    "properties",
    "random_features",
    "recurrence",
    "retention",
    "rwkv",
    "rwkv6",
    "score_mods",
    "softmax",
]
