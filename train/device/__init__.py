"""The check of one device: cases against float64, speed, tables."""
