"""Flax linen modules: they own parameters and call the primitives of `attention`."""
