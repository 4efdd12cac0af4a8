"""The audit of anyone's callable: adapters, probes, replay, verdict and screen."""
