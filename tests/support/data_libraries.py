"""Imports TensorFlow and seqio through `remixer_t5x.lazy_imports`, before other modules import them directly."""

from remixer_t5x.lazy_imports import seqio

seqio.__name__  # noqa: B018 (accessing any attribute loads both)
