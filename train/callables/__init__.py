"""The audit of anyone's callable: adapters of frameworks, probes, replay, report."""
