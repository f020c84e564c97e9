"""Imports TensorFlow and seqio as the commands do, before another module imports them with all that they can use."""

from remixer_t5x.lazy import seqio

seqio.__name__  # noqa: B018 (any attribute loads both)
