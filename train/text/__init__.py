"""Text: corpora and their batches, tokenizers, n-gram baselines."""
