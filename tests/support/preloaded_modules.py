"""Imports the modules that forked test processes use; preloaded by the fork server of `real_processes`."""

import contextlib
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import tests.support.data_libraries  # noqa: F401  # isort: skip
import matplotlib.pyplot  # noqa: F401
import scipy.stats  # noqa: F401
import tensorboardX  # noqa: F401

from remixer_t5x.cli import main  # noqa: F401
from remixer_t5x.config import loading  # noqa: F401
from remixer_t5x.evaluate import (
    checkpoint_evaluation,  # noqa: F401
    text_inference,  # noqa: F401
)
from remixer_t5x.train import loop  # noqa: F401
from remixer_tasks import catalogue  # noqa: F401
from remixer_tasks.benchmarks import text_metrics  # noqa: F401
from tests.evaluate import prediction_worker  # noqa: F401
from tests.support import command_without_autograph, process_overhead, tiny_training  # noqa: F401
from tests.train import lines_worker, mesh_worker  # noqa: F401

# Only needed for buckets.
with contextlib.suppress(ImportError):
    from google.cloud import storage  # noqa: F401

process_overhead.configure_after_imports()
