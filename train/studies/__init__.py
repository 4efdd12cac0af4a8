"""Studies: synthetic tasks and their batches, runs under vmap, intervals."""
