"""A folder with any model of ours, as it is shared: what it needs, and nothing of the place where it was made.

    model.safetensors   the parameters, as --to_safetensors writes them
    model.gin           MODEL and TASK_FEATURE_LENGTHS: the statements of the run's configuration that they read
    config.json         model_type 'remixer_t5x' and the frame
    vocabulary/         the vocabulary, as MODEL_DIR has it

model.gin is a program, as every gin file. It does not name the vocabulary, whose path changes with the folder's.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from flax import traverse_util

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.interop.safetensors import export
from remixer_t5x.interop.safetensors import files as safetensors_files

MODEL_TYPE = 'remixer_t5x'
# Prefix of a model's name on the Hugging Face Hub.
HUB_SCHEME = 'hf://'
CONFIG, GIN = 'config.json', 'model.gin'
_ADVICE = 'download it again'


@dataclasses.dataclass(frozen=True)
class Shared:
    """A folder that `write` wrote. Nothing but config.json has been read."""

    folder: pathlib.Path

    def params(self) -> tuple[Any, int, dict[str, Any]]:
        """The parameters (numpy float32), the step and the record of the checkpoint."""
        return export.read(str(self.folder / safetensors_files.WHOLE))

    def gin_text(self) -> str:
        """The text of model.gin, without the vocabulary."""
        return untrusted_files.read_text(self.folder / GIN, _ADVICE)


def shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of arrays by name, as `model_changes.describe` takes them."""
    return {f'params/{name}': leaf.shape for name, leaf in traverse_util.flatten_dict(params, sep='/').items()}


def is_shared(folder: pathlib.Path) -> bool:
    """Whether config.json in `folder` says that `write` wrote it."""
    path = folder / CONFIG
    return path.is_file() and untrusted_files.read_object(path, _ADVICE).get('model_type') == MODEL_TYPE


def read(folder: pathlib.Path) -> Shared:
    """Opens a folder that `write` wrote. Raises UserError for another folder, or one that lacks a file."""
    safe_paths.check_inside(folder)
    if not is_shared(folder):
        raise UserError(f'{folder / CONFIG} does not have the model_type {MODEL_TYPE}; {_ADVICE}')
    for name in (GIN, safetensors_files.WHOLE, f'{task_vocabulary.FOLDER}/{task_vocabulary.INDEX}'):
        if not (folder / name).is_file():
            raise UserError(f'{folder} has no {name}; {_ADVICE}')
    return Shared(folder)


def write(
    folder: pathlib.Path, model: Any, vocabulary: Any, gin_text: str, params: Any, step: int, record: Mapping[str, Any]
) -> None:
    """Writes everything but the model card into the new or empty `folder`.

    Args:
        folder: exists.
        model: the model, for its frame and its number of ids.
        vocabulary: a seqio vocabulary.
        gin_text: MODEL and TASK_FEATURE_LENGTHS.
        params: our parameters.
        step: of the checkpoint.
        record: of the checkpoint; its configuration is replaced by `gin_text`.

    Raises:
        UserError: the vocabulary is a user's own class, or the disk is full.
    """
    if not task_vocabulary.save(vocabulary, folder / task_vocabulary.FOLDER):
        raise UserError(f'VOCABULARY is a {type(vocabulary).__name__}, which cannot be written to a folder to share')
    (folder / GIN).write_text(gin_text, encoding='utf-8')
    config = {'model_type': MODEL_TYPE, 'frame': model.frame, 'vocab_size': model.vocab_size}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    export.write(str(folder / safetensors_files.WHOLE), params, step, {**record, 'config': gin_text})
