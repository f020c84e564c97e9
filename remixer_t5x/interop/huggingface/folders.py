"""Reads folders of Hugging Face's T5 into our parameters, and writes them.

A folder has config.json and the weights as safetensors, in one file or in shards; `tokenizer` handles the tokenizer.
"""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import config as hf_config
from remixer_t5x.interop.huggingface import weights as hf_weights
from remixer_t5x.interop.huggingface.config import T5
from remixer_t5x.interop.safetensors import files as safetensors_files

Params = Any
DTYPES = ('float32', 'bfloat16')
CONFIG = 'config.json'
GENERATION_CONFIG = 'generation_config.json'


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder that contains a T5; its weights are read on demand.

    Attributes:
        folder: its path.
        t5: its architecture.
        eos_id: the id that ends a sequence, according to config.json.
        tensors: its weights.
    """

    folder: pathlib.Path
    t5: T5
    eos_id: int
    tensors: safetensors_files.Tensors

    def params(self) -> Params:
        """Our parameters, numpy float32. Raises UserError if a weight is missing, has another shape, or is unknown."""
        return hf_weights.from_huggingface(self.t5, self.tensors, str(self.folder))


def read_config(path: str) -> tuple[pathlib.Path, dict[str, Any]]:
    """The folder `path` and the content of its config.json, which says what kind of model it has."""
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        hint = 'for a model on the Hub type hf://NAME' if '/' in path else 'give a folder with config.json'
        raise UserError(f'{path} is not a folder; {hint}')
    safe_paths.check_inside(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(f'{folder} has no {CONFIG}; give the folder of a Hugging Face T5 or BERT')
    return folder, untrusted_files.read_object(folder / CONFIG)


def read(path: str) -> Source:
    """Opens the folder `path`. Raises UserError if it does not contain a T5 that our encoder-decoder can express."""
    folder, config = read_config(path)
    # This comes before the weights, which another kind of model has under other names.
    hf_config.check_kind(config, str(folder))
    tensors = safetensors_files.read_folder(folder)
    t5 = hf_config.from_config(config, hf_weights.has_output_matrix(tensors), str(folder))
    return Source(folder, t5, config.get('eos_token_id') or 1, tensors)


def check_vocabulary(source: Source, vocabulary: Any, name: str) -> None:
    """Raises UserError if `vocabulary` (called `name`) cannot belong to the model in `source`."""
    advice = 'give the vocabulary of this model by --vocabulary'
    rows = source.t5.dimensions.vocab_size
    if vocabulary.vocab_size > rows:
        sizes = f'{vocabulary.vocab_size} ids, {vocabulary.extra_ids} of them sentinels'
        raise UserError(f'{name} has {sizes}, and the model in {source.folder} has {rows}; {advice}')
    if vocabulary.eos_id != source.eos_id:
        given = f'eos_token_id {source.eos_id}, and {name} has {vocabulary.eos_id}'
        raise UserError(f'{source.folder}/config.json says {given}; {advice}')


def write(path: str, t5: T5, params: Params, runs: hf_weights.Runs, dtype: str = 'float32', eos_id: int = 1) -> None:
    """Writes config.json, generation_config.json and model.safetensors into the folder `path`.

    Args:
        path: a new or empty folder.
        t5: the architecture.
        params: our parameters.
        runs: lengths of the runs of layers in `params`.
        dtype: one of DTYPES, of the weights in the file.
        eos_id: the id that ends a sequence.
    """
    arrays = hf_weights.to_huggingface(t5, params, runs)
    if hf_config.writes_output(t5) and t5.tied:
        arrays[hf_weights.OUTPUT] = arrays[hf_weights.TABLE]
    config = hf_config.to_config(t5, eos_id)
    generation = {name: config[name] for name in hf_config.GENERATION}
    folder = write_model(path, config, arrays, dtype)
    _write_json(folder / GENERATION_CONFIG, generation)


def write_model(path: str, config: dict[str, Any], arrays: dict[str, np.ndarray], dtype: str) -> pathlib.Path:
    """Writes config.json and model.safetensors into the new or empty folder `path`, and returns it."""
    folder = check_free(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'{folder} cannot be made ({error.strerror}); give a folder that you may write to') from error
    _write_json(folder / CONFIG, {**config, 'dtype': dtype, 'torch_dtype': dtype})
    cast: dict[str, np.ndarray] = {name: array.astype(np.dtype(dtype), copy=False) for name, array in arrays.items()}
    safetensors_files.write_file(folder / safetensors_files.WHOLE, cast, {'format': 'pt'})
    return folder


def check_free(path: str) -> pathlib.Path:
    """The folder to write into. Raises UserError if it is not empty."""
    folder = pathlib.Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'{folder} is not empty; give a new or empty folder')
    return folder


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
    except OSError as error:
        raise UserError(f'{path} cannot be written ({error.strerror}); check the space and rights there') from error


def first_difference(source: Source, params: Params, runs: hf_weights.Runs | None = None) -> str | None:
    """Hugging Face's name of a weight of `source` that differs in `params`, whose layers are grouped in `runs`; None if
    all weights are equal.
    """
    ours = hf_weights.to_huggingface(source.t5, params, runs or hf_weights.one_run(source.t5))
    renamed = {hf_weights.TABLE: hf_weights.table_name(source.tensors)}
    for name, array in ours.items():
        if not np.array_equal(array, source.tensors[renamed.get(name, name)]):
            return name
    return None
