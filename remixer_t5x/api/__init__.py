"""Implements the public API of remixer_t5x, which builds models and loads, runs and saves trained models."""
