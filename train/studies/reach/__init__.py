"""The study of how far back gradients reach, in a GRU and in attention."""
