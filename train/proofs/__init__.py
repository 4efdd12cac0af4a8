"""Proofs that a run's model is causal: by edits and gradients, and by learning."""
