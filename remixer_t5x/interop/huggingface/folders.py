"""Reads folders of Hugging Face's models into our parameters, and writes them.

A folder has config.json, the weights as safetensors, in one file or in shards, and the files of a tokenizer.
"""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.bert import Bert
from remixer_t5x.interop.huggingface.description import Refusal
from remixer_t5x.interop.huggingface.family import Config, Family
from remixer_t5x.interop.huggingface.gpt2 import Gpt2
from remixer_t5x.interop.huggingface.t5 import T5
from remixer_t5x.interop.huggingface.table import Params, Runs
from remixer_t5x.interop.safetensors import files as safetensors_files

FAMILIES: tuple[type[Family], ...] = (T5, Bert, Gpt2)
CONFIG = 'config.json'
GENERATION_CONFIG = 'generation_config.json'


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder with a model of a family; its weights are read on demand."""

    folder: pathlib.Path
    family: Family
    tensors: safetensors_files.Tensors

    def params(self) -> Params:
        """Our parameters, numpy float32. Raises UserError if a weight is missing, has another shape, or is unknown."""
        return self.family.read(self.tensors, str(self.folder))

    def first_difference(self, params: Params, runs: Runs | None = None) -> str | None:
        """The name of a weight that differs in `params`, whose layers are grouped in `runs` (None: one run)."""
        return self.family.first_difference(self.tensors, params, runs or self.family.one_run())


def read(path: str) -> Source:
    """Opens the folder `path`. Raises UserError if it does not contain a model that one of ours can express."""
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        hint = 'for a model on the Hub type hf://NAME' if '/' in path else f'give a folder with {CONFIG}'
        raise UserError(f'{path} is not a folder; {hint}')
    safe_paths.check_inside(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(f'{folder} has no {CONFIG}; give the folder of a Hugging Face model')
    values = untrusted_files.read_object(folder / CONFIG)
    config = Config(values, str(folder))
    families = {model_type: family for family in FAMILIES for model_type in family.model_types}
    model_type = values.get('model_type')
    if not isinstance(model_type, str) or model_type not in families:
        raise config.error('model_type', f'it must be one of {", ".join(families)}')
    tensors = safetensors_files.read_folder(folder)
    return Source(folder, families[model_type].from_config(config, tensors), tensors)


def describe(model: Any, vocabulary: Any) -> tuple[Family, Runs]:
    """The family and sizes of a model of ours, and the lengths of its runs of layers.

    Raises Refusal, with the first part that differs, if no family has it.
    """
    refusals = []
    for family in FAMILIES:
        if isinstance(model, family.model_class):
            try:
                return family.describe(model, vocabulary)
            except Refusal as refusal:
                refusals.append(refusal)
    if refusals:
        raise refusals[0]
    kinds = ', '.join(family.kind for family in FAMILIES)
    raise Refusal(f'transformers has {kinds}, and FRAME is {model.frame!r}')


def write(path: str, family: Family, params: Params, runs: Runs, dtype: str = 'float32') -> pathlib.Path:
    """Writes configuration and weights into the new or empty folder `path`, and returns it.

    Args:
        path: the folder.
        family: the model.
        params: our parameters.
        runs: lengths of the runs of layers in `params`.
        dtype: dtype of the weights in the file.
    """
    folder = check_free(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / CONFIG, {**family.to_config(), 'dtype': dtype, 'torch_dtype': dtype})
        if generation := family.generation_config():
            _write_json(folder / GENERATION_CONFIG, generation)
    except OSError as error:
        raise UserError(f'{folder} cannot be written ({error.strerror}); check the space and rights there') from error
    arrays: dict[str, np.ndarray] = {
        name: array.astype(np.dtype(dtype), copy=False) for name, array in family.write(params, runs).items()
    }
    safetensors_files.write_file(folder / safetensors_files.WHOLE, arrays, {'format': 'pt'})
    return folder


def check_free(path: str) -> pathlib.Path:
    """The folder to write into. Raises UserError if it is not empty."""
    folder = pathlib.Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'{folder} is not empty; give a new or empty folder')
    return folder


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
