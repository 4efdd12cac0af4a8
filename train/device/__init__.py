"""The check of one device: plans, cases against float64, speed, verdict."""
