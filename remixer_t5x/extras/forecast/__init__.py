"""Predicts the speed of a training step on hardware that is not available: HLO costs, roofline, advice."""
