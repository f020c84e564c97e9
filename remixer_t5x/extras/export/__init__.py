"""Exports trained models as files that programs without this package can run."""
