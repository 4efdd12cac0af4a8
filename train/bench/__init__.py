"""The benchmarks of attention, of mixers and of a training step."""
