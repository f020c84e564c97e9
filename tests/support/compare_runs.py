"""Compares the logs, checkpoint arrays and data positions of two runs bit for bit.

The folder of a run can be read while the run writes to it.
"""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from remixer_t5x.run_folder import model_dir

Folder = str | os.PathLike[str]


def read_log(folder: Folder) -> list[dict[str, Any]]:
    """Returns the records of the complete lines of metrics.jsonl, without their timing."""
    path = pathlib.Path(folder, model_dir.METRICS)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith('\n')]
    return [{name: value for name, value in record.items() if name != 'timing'} for record in records]


def last_step(folder: Folder) -> int:
    """Returns the last logged step, or 0 if the log is empty."""
    return max((record['step'] for record in read_log(folder)), default=0)


def checkpoint_steps(folder: Folder) -> list[int]:
    """Returns the steps of the checkpoints in ascending order."""
    path = pathlib.Path(folder, model_dir.CHECKPOINTS)
    return sorted(int(child.name) for child in path.iterdir() if child.name.isdigit()) if path.exists() else []


def checkpoint_arrays(folder: Folder, step: int) -> dict[str, np.ndarray]:
    """Reads all arrays of a checkpoint by name, without building a model."""
    path = pathlib.Path(folder, model_dir.CHECKPOINTS, str(step), 'state').absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        shapes = reader.metadata(path).item_metadata.tree
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf) for path, leaf in leaves}


def difference(folder: Folder, other: Folder, step: int) -> str | None:
    """Describes the first difference between two runs up to `step`; None if they are bit-identical."""
    first_log, second_log = ([line for line in read_log(run) if line['step'] <= step] for run in (folder, other))
    if first_log != second_log:
        first_step = next((a['step'] for a, b in zip(first_log, second_log, strict=False) if a != b), None)
        if first_step is None:
            return f'the log: {len(first_log)} lines and {len(second_log)}'
        return f'the log at step {first_step}'
    first, second = checkpoint_arrays(folder, step), checkpoint_arrays(other, step)
    if first.keys() != second.keys():
        return f'the names of arrays: {", ".join(sorted(first.keys() ^ second.keys())[:3])}'
    for name, array in first.items():
        # Compares bytes, so that NaN equals NaN and -0.0 differs from 0.0.
        if array.dtype != second[name].dtype or array.tobytes() != second[name].tobytes():
            return f'the array {name}'
    if _batch_counts(folder, step) != _batch_counts(other, step):
        return 'the number of batches drawn'
    return None


def _batch_counts(folder: Folder, step: int) -> list[int]:
    text = pathlib.Path(folder, model_dir.CHECKPOINTS, str(step), 'data', 'metadata').read_text()
    return [record['batches'] for record in json.loads(text)['positions']]
