"""Defines a tf.data iterator whose exact position can be saved, and functions that build suitable pipelines."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from remixer_t5x import temporary_files
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import tf

# Operations whose positions TensorFlow 2.21 cannot save. Restoring a parallel interleave also hangs. PyFunc is a
# stateful tf.numpy_function; EagerPyFunc is a tf.py_function.
UNSAVED_OPERATIONS = (
    'PyFunc',
    'EagerPyFunc',
    'GeneratorDataset',
    'CacheDataset',
    'CacheDatasetV2',
    'ParallelInterleaveDataset',
    'ParallelInterleaveDatasetV2',
    'ParallelInterleaveDatasetV3',
    'ParallelInterleaveDatasetV4',
)


@contextlib.contextmanager
def patch_tf_data() -> Iterator[None]:
    """Patches the tf.data methods `interleave` and `shard`, whose positions TensorFlow 2.21 cannot restore exactly.

    seqio and TFDS use a parallel `interleave`, which hangs when it is restored, so `interleave` becomes sequential.
    `shard` becomes a filter, because TensorFlow's `shard` loses elements at the end of an interleave block. The order
    of the elements does not change.
    """
    dataset_class: Any = tf.data.Dataset
    interleave, shard = dataset_class.interleave, dataset_class.shard

    def interleave_sequentially(
        dataset: Any, *args: Any, num_parallel_calls: Any = None, deterministic: Any = None, **kwargs: Any
    ):
        return interleave(dataset, *args, **kwargs)

    dataset_class.interleave, dataset_class.shard = interleave_sequentially, _shard_by_filter
    try:
        yield
    finally:
        dataset_class.interleave, dataset_class.shard = interleave, shard


def _shard_by_filter(dataset: tf.data.Dataset, num_shards: int, index: int, name: str | None = None) -> tf.data.Dataset:
    if num_shards == 1:
        return dataset
    plain = tf.autograph.experimental.do_not_convert
    numbered = dataset.enumerate().filter(plain(lambda number, element: tf.equal(number % num_shards, index)))
    return numbered.map(plain(lambda number, element: element), name=name)


def call_without_autograph(build: Callable[[], tf.data.Dataset]) -> tf.data.Dataset:
    """Calls `build` without AutoGraph, and falls back to AutoGraph if that fails.

    AutoGraph takes most of the time needed to open a task. Only Python control flow on tensors requires
    AutoGraph, and raises an error without it, so a call that succeeds without AutoGraph builds the same operations.
    """
    try:
        return tf.autograph.experimental.do_not_convert(build)()
    except UserError:
        raise
    except Exception:
        return build()


class ResumableIterator:
    """Iterates over a tf.data dataset, and saves and restores the position of the iterator.

    Unless `saves` is false, raises UserError if the pipeline contains an operation whose position cannot be saved.
    `name` is the task name in error messages.
    """

    def __init__(self, dataset: tf.data.Dataset, name: str, saves: bool = True):
        if saves and (unsaved := _find_unsaved_operation(dataset)):
            raise UserError(
                f'{name} uses a {unsaved}, whose position cannot be saved; use seqio.TextLineDataSource to read files '
                'and tf.numpy_function(..., stateful=False) to call Python code, or set SAVE_DATA_POSITION=False (a '
                'resumed run then reads the data from the beginning, in another order)'
            )
        self._name, self._saves = name, saves
        self._iterator = iter(dataset)
        self._drawn = 0
        self._is_restored = False

    def __next__(self) -> Any:
        try:
            element = next(self._iterator)
        except tf.errors.OpError as error:
            self._iterator = iter(())
            # Drop the traceback and context, because they keep the iterator and its threads alive.
            error.__context__ = None
            advice = '; restore the old settings of the task, such as NOISE_DENSITY' if self._is_restored else ''
            raise UserError(
                f'{self._name} failed after {self._drawn} batches of this run: {extract_error_message(error)}{advice}'
            ) from error.with_traceback(None)
        self._drawn += 1
        return element

    def capture_position(self) -> bytes:
        """Returns the position of the iterator. Raises UserError if a temporary file cannot be written."""
        if not self._saves:
            return b''
        with _create_temporary_folder(self._name) as folder:
            tf.train.Checkpoint(self._iterator).write(os.fspath(folder / 'position'))
            parts = [(folder / f'position.{end}').read_bytes() for end in ('index', 'data-00000-of-00001')]
        return len(parts[0]).to_bytes(8, 'little') + parts[0] + parts[1]

    def restore_position(self, state: bytes) -> None:
        """Restores a position returned by `capture_position`. Raises UserError if the pipeline has changed."""
        split = 8 + int.from_bytes(state[:8], 'little')
        with _create_temporary_folder(self._name) as folder:
            (folder / 'position.index').write_bytes(state[8:split])
            (folder / 'position.data-00000-of-00001').write_bytes(state[split:])
            try:
                tf.train.Checkpoint(self._iterator).read(os.fspath(folder / 'position')).assert_consumed()
                self._is_restored = True
            except (tf.errors.OpError, AssertionError) as error:
                raise UserError(
                    f'the saved data position does not match the current {self._name} '
                    f'({extract_error_message(error)}); use a new MODEL_DIR with INITIAL_CHECKPOINT_PATH set to '
                    'the old one'
                ) from error


@contextlib.contextmanager
def _create_temporary_folder(name: str) -> Iterator[pathlib.Path]:
    try:
        with temporary_files.reserve_temporary_path(
            pathlib.Path(tempfile.gettempdir()), 'position-', '.remixer_t5x'
        ) as folder:
            folder.mkdir(mode=0o700)
            yield folder
    except (OSError, tf.errors.OpError) as error:
        raise UserError(
            f'the data position of {name} cannot be written to {tempfile.gettempdir()} '
            f'({extract_error_message(error)}); free disk space in this folder, set TMPDIR to another folder, or set '
            'SAVE_DATA_POSITION=False'
        ) from error


def _find_unsaved_operation(dataset: tf.data.Dataset) -> str | None:
    """Returns the first of UNSAVED_OPERATIONS that the pipeline contains, or None if it contains none.

    Without this check, TensorFlow raises an error only when the position is saved, and then hangs at the end of the
    iterator.
    """
    # Policy 1 (IGNORE) omits external state, which is not needed to search the graph for operations.
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=1)
    graph = tf.compat.v1.GraphDef.FromString(text.numpy())
    operations = {node.op for node in graph.node}
    operations.update(node.op for function in graph.library.function for node in function.node_def)
    return next((name for name in UNSAVED_OPERATIONS if name in operations), None)


@contextlib.contextmanager
def wrap_task_errors(name: str) -> Iterator[None]:
    """Converts seqio, tf.data and file errors to a UserError that says why the task `name` cannot be read."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError, tf.errors.OpError) as error:
        raise UserError(f'{name} cannot be read: {extract_error_message(error)}') from error


def extract_error_message(error: BaseException) -> str:
    """Returns an error's message as one line, without the graph trace that tf.data appends."""
    text = str(error)
    # TensorFlow writes the message of an assertion in brackets.
    if user_error := re.search(r'(\[)?UserError: ([^\n]+)(?(1)\])', text):
        return user_error.group(2).strip()
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r'^\{\{function_node [^}]*\}\}\s*', '', first).strip()
