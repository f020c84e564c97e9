"""Writes a MODEL_DIR with one converted checkpoint, and reads the parameters of any checkpoint.

A converted checkpoint has the items `state` (only parameters) and `run`, so that `train`, `finetune`, `eval` and
`infer` read it like the checkpoint of a run.
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from remixer_t5x.checkpoints import durable, manager, saved_params
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.models import lora
from remixer_t5x.run_folder import model_dir

Params = Any


def record(vocabulary: str, config: str, source: str) -> dict[str, Any]:
    """The record of a converted checkpoint: vocabulary, gin text, source, versions."""
    versions = model_dir.package_versions()
    return {'vocabulary': vocabulary, 'config': config, 'converted_from': source, 'versions': versions}


def claim(path: str | os.PathLike[str]) -> epath.Path:
    """Creates a MODEL_DIR for one checkpoint.

    Raises UserError if the folder already contains checkpoints, or files that no run wrote.
    """
    folder = model_dir.absolute_path(path)
    if steps := saved_params.list_steps(folder / model_dir.CHECKPOINTS):
        raise UserError(f'{folder} already contains the checkpoint of step {steps[-1]}; use a new or empty folder')
    return model_dir.claim(path)


def copy_vocabulary(checkpoint: str, folder: epath.Path) -> None:
    """Copies the vocabulary of the MODEL_DIR that contains `checkpoint`, if it has one, to the MODEL_DIR `folder`."""
    source = model_dir.find_enclosing(checkpoint)
    if source is not None and task_vocabulary.saved_vocabulary_flags(source):
        (folder / task_vocabulary.FOLDER).mkdir(exist_ok=True)
        for file in (source / task_vocabulary.FOLDER).iterdir():
            file.copy(folder / task_vocabulary.FOLDER / file.name, overwrite=True)


def write(folder: epath.Path, params: Params, step: int, run: Mapping[str, Any]) -> epath.Path:
    """Writes the checkpoint of `step` (0 if unknown) into the MODEL_DIR `folder`, and returns its folder.

    `run` is the record of the checkpoint. Returns after the files are on disk.
    """
    checkpoints = folder / model_dir.CHECKPOINTS
    manager.write_params(checkpoints, step, params, run)
    return checkpoints / str(step)


def read(path: str, setting: str = 'CHECKPOINT_PATH', merge: bool = True) -> tuple[Params, dict[str, Any], int]:
    """Reads the parameters of any model's checkpoint (numpy), its record, and its step.

    Args:
        path: a checkpoint, or a MODEL_DIR (its newest).
        setting: name of the path in errors.
        merge: whether to add adapters to the kernels that they adapt, instead of returning them next to the kernels.

    Raises:
        UserError: there is no checkpoint, or its arrays need more memory than this machine has.
    """
    saved = saved_params.open_checkpoint(path, setting)
    kernels = {name for name in saved.shapes if not lora.is_adapter(name)}
    shapes = saved.shapes_for(kernels) if merge else saved.shapes
    # Reading more than fits into memory would kill the process.
    size = sum(map(math.prod, shapes.values())) * np.dtype(np.float32).itemsize
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if size > memory:
        raise UserError(
            f'the parameters in {saved.step} take {size / 2**30:,.1f} GiB and this machine has '
            f'{memory / 2**30:,.1f} GiB; convert them on a larger machine'
        )
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = saved.read({n: jax.ShapeDtypeStruct(shape, np.float32, sharding=device) for n, shape in shapes.items()})
    params = traverse_util.unflatten_dict({name: np.asarray(array) for name, array in arrays.items()}, sep='/')
    return params, dict(saved.record), int(saved.step.name) if durable.is_step_name(saved.step.name) else 0
