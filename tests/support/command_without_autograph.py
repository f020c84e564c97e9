"""Runs the command line without AutoGraph, which no function here needs and which takes seconds at each start."""

from collections.abc import Sequence

import tensorflow as tf

from remixer_t5x.cli import main as command_line


def main(argv: Sequence[str]) -> int:
    """Runs `remixer_t5x.cli.main.main` and returns its exit code."""
    return tf.autograph.experimental.do_not_convert(command_line.main)(argv)
