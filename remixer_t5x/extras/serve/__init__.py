"""Serves a model over HTTP: `remixer-t5x serve`, described in docs/guide/serving.md."""
