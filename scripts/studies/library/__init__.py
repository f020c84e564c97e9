"""Modules of toy_task.py: data, network and results file."""
