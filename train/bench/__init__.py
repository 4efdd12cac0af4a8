"""The benchmark: presets, peers, measurements, claims and tables."""
