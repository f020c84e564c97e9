"""Writes converted checkpoints to a MODEL_DIR, and reads the parameters of any checkpoint.

A converted checkpoint has the items `state` (only the parameters) and `run`, so commands such as `finetune` and `infer`
load it like the checkpoint of a training run.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from flax import traverse_util

from remixer_t5x.checkpoints import checkpoint_manager, checkpoint_paths, durable_folders, saved_params
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.models import lora
from remixer_t5x.run_folder import model_dir

Params = Any


def build_checkpoint_record(vocabulary: str, config: str, source: str) -> dict[str, Any]:
    """Builds the record of a converted checkpoint: vocabulary, gin text, source and package versions."""
    versions = model_dir.get_package_versions()
    return {'vocabulary': vocabulary, 'config': config, 'converted_from': source, 'versions': versions}


def check_folder_is_empty(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the expanded path of an output. Raises UserError if it is a file or a folder that is not empty."""
    folder = pathlib.Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'{folder} already exists; use a new path or an empty folder')
    return folder


def create_model_dir(path: str | os.PathLike[str]) -> epath.Path:
    """Creates a MODEL_DIR for a converted checkpoint.

    Raises UserError if the folder already contains checkpoints, or files that were not written by a run.
    """
    folder = model_dir.create_model_dir(path)
    if steps := checkpoint_paths.list_steps(folder / model_dir.CHECKPOINTS):
        raise UserError(f'{folder} already contains the checkpoint of step {steps[-1]}; use a new or empty folder')
    return folder


def copy_vocabulary(checkpoint: str, target: epath.Path) -> bool:
    """Copies the vocabulary saved with `checkpoint` to the folder `target`, and returns whether there is one."""
    source = model_dir.find_model_dir(checkpoint)
    return source is not None and copy_vocabulary_files(source / task_vocabulary.VOCABULARY_FOLDER, target)


def copy_vocabulary_files(source: epath.Path, target: epath.Path) -> bool:
    """Copies a saved vocabulary to another folder, and returns whether `source` contains one."""
    if not (source / task_vocabulary.INDEX_FILE).is_file():
        return False
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        file.copy(target / file.name, overwrite=True)
    return True


def write_checkpoint(folder: epath.Path, params: Params, step: int, run: Mapping[str, Any]) -> epath.Path:
    """Writes a checkpoint with the record `run` to the MODEL_DIR `folder`, and returns the checkpoint's folder."""
    checkpoints = folder / model_dir.CHECKPOINTS
    checkpoint_manager.write_params(checkpoints, step, params, run)
    return checkpoints / str(step)


def read_checkpoint(
    path: str, setting: str = 'CHECKPOINT_PATH', merge: bool = True
) -> tuple[Params, dict[str, Any], int]:
    """Reads the parameters (NumPy arrays), the record and the step of a checkpoint.

    The arrays include those of the base of an adapter checkpoint, so the record does not name the base.

    Args:
        path: a checkpoint, or a MODEL_DIR, whose newest checkpoint is read.
        setting: name of the setting or flag that contains the path, for error messages.
        merge: whether to merge LoRA adapters into their kernels instead of returning both separately.
    """
    saved = saved_params.open_checkpoint(path, setting)
    kernels = {name for name in saved.shapes if not lora.is_adapter(name)}
    shapes = saved.select_shapes(kernels) if merge else saved.shapes
    arrays = jax.device_get(saved.read_on_one_device(shapes))
    params = traverse_util.unflatten_dict(arrays, sep='/')
    record = {name: value for name, value in saved.record.items() if name not in saved_params.BASE_KEYS}
    return params, record, durable_folders.get_step(saved.step)
