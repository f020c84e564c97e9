"""Imports TensorFlow and seqio through `remixer_t5x.lazy`, before other modules import them directly."""

from remixer_t5x.lazy import seqio

seqio.__name__  # noqa: B018 (accessing any attribute loads both)
