"""Whether two runs are the same run, bit for bit: their logs, a checkpoint's arrays, and where in the data they are.

Reads folders only, also of a run that is being written.
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


def logged(folder: Folder) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, without what the clock decides."""
    path = pathlib.Path(folder, model_dir.METRICS)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith('\n')]
    return [{name: value for name, value in record.items() if name != 'timing'} for record in records]


def last_step(folder: Folder) -> int:
    """The newest step that was logged, 0 where none was."""
    return max((record['step'] for record in logged(folder)), default=0)


def checkpoint_steps(folder: Folder) -> list[int]:
    """The steps of the checkpoints, oldest first."""
    path = pathlib.Path(folder, model_dir.CHECKPOINTS)
    return sorted(int(child.name) for child in path.iterdir() if child.name.isdigit()) if path.exists() else []


def arrays(folder: Folder, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by name, as numpy, read without any model."""
    path = pathlib.Path(folder, model_dir.CHECKPOINTS, str(step), 'state').absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        shapes = reader.metadata(path).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=kinds))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf) for path, leaf in leaves}


def difference(folder: Folder, other: Folder, step: int) -> str | None:
    """What first differs between the two runs at `step`, None where they are equal in every bit."""
    ours, theirs = ([line for line in logged(each) if line['step'] <= step] for each in (folder, other))
    if ours != theirs:
        where = next((a['step'] for a, b in zip(ours, theirs, strict=False) if a != b), None)
        return f'the log at step {where}' if where else f'the log: {len(ours)} lines and {len(theirs)}'
    mine, yours = arrays(folder, step), arrays(other, step)
    if mine.keys() != yours.keys():
        return f'the names of arrays: {", ".join(sorted(mine.keys() ^ yours.keys())[:3])}'
    for name, array in mine.items():
        # As bytes, so that NaN equals itself and -0.0 is not 0.0.
        if array.dtype != yours[name].dtype or array.tobytes() != yours[name].tobytes():
            return f'the array {name}'
    if _batches(folder, step) != _batches(other, step):
        return 'the number of batches drawn'
    return None


def _batches(folder: Folder, step: int) -> list[int]:
    text = pathlib.Path(folder, model_dir.CHECKPOINTS, str(step), 'data', 'metadata').read_text()
    return [record['batches'] for record in json.loads(text)['positions']]
