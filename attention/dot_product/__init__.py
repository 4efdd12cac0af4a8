"""Scaled dot-product attention: the entry, its arguments and its implementations."""

from attention.dot_product.api import (
    IMPLEMENTATIONS,
    attention_weights,
    dot_product_attention,
    explain,
)

__all__ = [
    "IMPLEMENTATIONS",
    "attention_weights",
    "dot_product_attention",
    "explain",
]
