"""Exports trained models to files that run without this package."""
