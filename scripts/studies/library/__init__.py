"""Shared code of the studies: training, tasks, model variants, result files and figures."""
