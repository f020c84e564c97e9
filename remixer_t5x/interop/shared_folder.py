"""Reads and writes self-contained folders for sharing a model.

    model.safetensors   the parameters, in the format of --to_safetensors
    model.gin           the gin statements that configure MODEL and TASK_FEATURE_LENGTHS
    config.json         model_type 'remixer_t5x', `architecture` (such as 'encoder_decoder') and vocab_size
    vocabulary/         the vocabulary files, as in a MODEL_DIR
    code/               the custom modules that model.gin imports

model.gin can execute code, like every gin file. The path of the vocabulary is not in model.gin, because the folder can
be moved.
"""

import contextlib
import importlib.util
import json
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import traverse_util

from remixer_t5x import untrusted_files
from remixer_t5x.config import user_modules
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files

MODEL_TYPE = 'remixer_t5x'
# URL prefix of models on the Hugging Face Hub.
HUB_SCHEME = 'hf://'
CONFIG, GIN, CODE = 'config.json', 'model.gin', 'code'
_ADVICE = 'download the folder again'


@contextlib.contextmanager
def make_code_importable(folder: pathlib.Path) -> Iterator[None]:
    """Makes the modules in `code` importable. Raises UserError if another module with the same name is loaded."""
    code = folder / CODE
    for path in code.glob('*'):
        file = path / '__init__.py' if path.is_dir() else path
        loaded = getattr(sys.modules.get(path.stem), '__file__', None)
        if loaded and pathlib.Path(loaded).read_bytes() != file.read_bytes():
            raise UserError(
                f'{path.stem} is already loaded from {loaded}, which differs from {file}; start a new process'
            )
    sys.path.insert(0, str(code))
    try:
        yield
    finally:
        sys.path.remove(str(code))


def read_gin_text(folder: pathlib.Path) -> str:
    """Reads model.gin, which does not configure the vocabulary."""
    return untrusted_files.read_text(folder / GIN, _ADVICE)


def read_checkpoint(folder: pathlib.Path) -> tuple[Any, int, dict[str, Any]]:
    """Reads the parameters (NumPy, float32), the step and the record of the checkpoint."""
    return safetensors_files.read_params(str(folder / safetensors_files.WEIGHTS_FILE))


def map_names_to_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Maps parameter names with the prefix `params/` to shapes, for `compatibility.describe_shape_difference`."""
    return {f'params/{name}': leaf.shape for name, leaf in traverse_util.flatten_dict(params, sep='/').items()}


def is_shared_folder(folder: pathlib.Path) -> bool:
    """Returns whether config.json in `folder` has the model type of shared folders."""
    path = folder / CONFIG
    return path.is_file() and untrusted_files.read_json_object(path, _ADVICE).get('model_type') == MODEL_TYPE


def check_shared_folder(folder: pathlib.Path) -> None:
    """Raises UserError unless `folder` contains the files that `write_shared_folder` writes."""
    untrusted_files.check_links_inside(folder)
    vocabulary = f'{task_vocabulary.VOCABULARY_FOLDER}/{task_vocabulary.INDEX_FILE}'
    for name in (GIN, safetensors_files.WEIGHTS_FILE, vocabulary):
        if not (folder / name).is_file():
            raise UserError(f'{folder} has no {name}; {_ADVICE}')


def copy_custom_code(folder: pathlib.Path, packages: Sequence[str]) -> list[str]:
    """Copies custom modules and packages to `folder`/code, including modules that they import from their own folder.

    Only Python files are copied. Returns the names of packages that were not copied because they are installed or
    cannot be found.
    """
    missing, names = [], list(packages)
    for name in names:
        spec = importlib.util.find_spec(name)
        source = pathlib.Path((spec and spec.origin) or '')
        if not source.is_file() or {'site-packages', 'dist-packages'} & set(source.parts):
            missing.append(name)
            continue
        is_package = bool(spec and spec.submodule_search_locations)
        parent = source.parent.parent if is_package else source.parent
        for file in sorted(source.parent.rglob('*.py')) if is_package else [source]:
            path = file.relative_to(parent)
            if not any(part.startswith('.') for part in path.parts):
                (folder / CODE / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / CODE / path)
        for other in user_modules.find_imported_modules(spec) if spec else ():
            # The parent folder can be a checkout of this package.
            known = other in names or other in ('remixer_t5x', 'remixer_tasks')
            if not known and ((parent / other).is_dir() or (parent / f'{other}.py').is_file()):
                names.append(other)
    return missing


def write_shared_folder(
    folder: pathlib.Path, model: Any, vocabulary: Any, gin_text: str, params: Any, step: int, record: Mapping[str, Any]
) -> None:
    """Writes all files of a shared folder, except for the model card and `code`, to an empty folder.

    `gin_text` configures MODEL and TASK_FEATURE_LENGTHS, and replaces the configuration in the checkpoint's `record`.
    Raises UserError if the vocabulary is a custom class, or the files cannot be written.
    """
    if not task_vocabulary.save_vocabulary(vocabulary, folder / task_vocabulary.VOCABULARY_FOLDER):
        raise UserError(
            f'to share a model, VOCABULARY must come from remixer_tasks.vocabularies, got {type(vocabulary).__name__}'
        )
    (folder / GIN).write_text(gin_text, encoding='utf-8')
    config = {'model_type': MODEL_TYPE, 'architecture': model.model_type, 'vocab_size': model.vocab_size}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    path = str(folder / safetensors_files.WEIGHTS_FILE)
    safetensors_files.write_params(path, params, step, {**record, 'config': gin_text})
