"""Forecasts of a training step on a machine that is not present: HLO costs, a roofline, and advice."""
