"""Computes the minimum time of a training step on hardware that is not available."""
