"""Reads and writes safetensors files with Hugging Face weights (a single file or shards) or a remixer_t5x model.

A safetensors file starts with the header length N as 8 little-endian bytes, followed by N bytes of JSON and the bytes
of the arrays. In files of remixer_t5x models, layers are stacked, and the name of an array is its path in
the parameter tree, such as `encoder/run_0/layer/...`. The metadata contains `format`, `step`, `config` (the gin text of
the run), `vocabulary` (as in a checkpoint), `versions` (package versions as JSON) and `lengths` (those of a
`TrainedModel` that was saved, as JSON, or null).
"""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from remixer_t5x import temporary_files, untrusted_files
from remixer_t5x.errors import UserError, to_one_line

Params = Any
FORMAT = 'remixer_t5x'
WEIGHTS_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
# Dtypes that can be converted to float32 without loss; arrays of other dtypes count as quantized.
FLOAT_DTYPES = ('F32', 'BF16', 'F16')


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """The array `name` in a safetensors file, which is read as float32 when it is converted to a NumPy array."""

    file: pathlib.Path
    reader: safe_open
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, without reading the array. Raises UserError if the array is missing or quantized."""
        try:
            part = self.reader.get_slice(self.name)
        except SafetensorError as error:
            raise _unreadable_file_error(self.file, f'{self.name!r}: {error}') from error
        if part.get_dtype() not in FLOAT_DTYPES:
            raise UserError(
                f'{self.name} in {self.file} must have dtype {", ".join(FLOAT_DTYPES)}, got {part.get_dtype()}; use '
                'the unquantized model'
            )
        return tuple(part.get_shape())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        shape = self.shape
        try:
            return np.asarray(self.reader.get_tensor(self.name), np.float32).reshape(shape)
        except (ValueError, SafetensorError) as error:
            # safetensors accepts shapes that NumPy does not support, such as [0, 2**62].
            raise _unreadable_file_error(self.file, f'{self.name!r}: {error}') from error


Tensors = Mapping[str, StoredArray]


def open_weights_folder(folder: pathlib.Path, auto_class: str) -> Tensors:
    """Opens the weights in a Hugging Face folder.

    Raises UserError if the weights are not in safetensors format; `auto_class` of transformers can convert them.
    """
    # If both exist, transformers loads the single file.
    if (folder / WEIGHTS_FILE).is_file():
        return _open_tensors(folder / WEIGHTS_FILE)
    if (folder / INDEX_FILE).is_file():
        return _open_shards(folder)
    raise missing_weights_error(str(folder), auto_class)


def missing_weights_error(name: str, auto_class: str) -> UserError:
    """Returns the error for a folder or a Hub model without safetensors; `auto_class` can write them."""
    return UserError(
        f'{name} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, and loading a pickle can run code; if you trust its '
        f'pickles, run python -c "import transformers as t; t.{auto_class}.from_pretrained({name!r})'
        ".save_pretrained('DIR')\" to write a folder with safetensors"
    )


def open_weights_file(path: str) -> tuple[Tensors, dict[str, str]]:
    """Opens a single safetensors file, and returns its arrays and metadata."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise UserError(f'{file} is not a file; use a file that --to_safetensors wrote')
    return _open_tensors(file), dict(_open_safetensors_file(file).metadata() or {})


def write_weights_file(path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes `arrays` to a temporary file and then renames it to `path`. Raises UserError if writing fails."""
    unfinished = path.with_name(f'{path.name}.unfinished')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # safetensors ignores strides, so transposed views would be written in the wrong order.
        contiguous = {name: np.asarray(arrays[name], order='C') for name in sorted(arrays)}
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(contiguous, unfinished, dict(metadata))
        # safetensors restricts the file to its owner, regardless of the umask.
        unfinished.chmod(mode)
        temporary_files.sync_and_rename(unfinished, path)
    except (OSError, SafetensorError) as error:
        # On a read-only disk, unlink fails even for a missing file.
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise UserError(f'{path} cannot be written: {error}; check free disk space and permissions') from error


def write_params(
    path: str, params: Params, step: int, record: Mapping[str, Any], dtype: str = 'float32'
) -> pathlib.Path:
    """Writes a remixer_t5x checkpoint, converted to `dtype`, to a new file, and returns the path of the file."""
    file = pathlib.Path(path).expanduser()
    if file.exists():
        raise UserError(f'{file} already exists; use another file')
    arrays = traverse_util.flatten_dict(params, sep='/')
    cast = {name: np.asarray(array).astype(np.dtype(dtype), copy=False) for name, array in arrays.items()}
    metadata = {
        'format': FORMAT,
        'step': str(step),
        'config': str(record.get('config') or ''),
        'vocabulary': str(record.get('vocabulary') or ''),
        'versions': json.dumps(record.get('versions', {})),
        'lengths': json.dumps(record.get('lengths')),
    }
    write_weights_file(file, cast, metadata)
    return file


def read_params(path: str) -> tuple[Params, int, dict[str, Any]]:
    """Reads the parameters (NumPy, float32), the step and the record from a file written by `write_params`."""
    tensors, metadata = open_weights_file(path)
    if metadata.get('format') != FORMAT:
        raise UserError(
            f'{path} was not written by --to_safetensors (its metadata has format {metadata.get("format")!a:.60}); to '
            'convert a Hugging Face folder, use --from_hf'
        )
    parents = {name[: match.start()] for name in tensors for match in re.finditer('/', name)}
    if nested := sorted(parents & tensors.keys()):
        raise UserError(
            f'{path} contains the array {ascii(nested[0])[:80]} and arrays nested under its name; copy the file again'
        )
    try:
        if not re.fullmatch('[0-9]{1,18}', metadata['step']):
            raise ValueError(f'step {metadata["step"]!a:.60}')
        step, versions = int(metadata['step']), untrusted_files.parse_json(metadata['versions'])
        lengths = untrusted_files.parse_json(metadata.get('lengths', 'null'))
        if lengths and not all(type(lengths[side]) is int and lengths[side] > 0 for side in ('inputs', 'targets')):
            raise ValueError(f'lengths {lengths!a:.60}')
    except (KeyError, TypeError, ValueError) as error:
        reason = to_one_line(f'{type(error).__name__}: {error}')
        raise UserError(f'{path} has damaged metadata ({reason}); copy the file again') from error
    record = {name: metadata.get(name, '') for name in ('config', 'vocabulary')}
    params = traverse_util.unflatten_dict({name: np.asarray(array) for name, array in tensors.items()}, sep='/')
    return params, step, {**record, 'versions': versions, **({'lengths': lengths} if lengths else {})}


def round_params(params: Params, dtype: str) -> Params:
    """Rounds `params` to `dtype`, and returns them as float32."""
    return jax.tree.map(lambda array: np.asarray(array).astype(np.dtype(dtype)).astype(np.float32), params)


def find_differing_array(before: Params, after: Params) -> str | None:
    """Returns the path of the first array that is not bit-identical in both trees, or None if all arrays are."""
    trees = [traverse_util.flatten_dict(tree, sep='/') for tree in (before, after)]
    for name in sorted({*trees[0], *trees[1]}):
        pair = [np.asarray(tree[name]) for tree in trees if name in tree]
        if len({(array.shape, array.dtype, array.tobytes()) for array in pair}) != 1 or len(pair) < 2:
            return name
    return None


def _open_safetensors_file(path: pathlib.Path) -> safe_open:
    try:
        return safe_open(path, framework='numpy')
    except (OSError, SafetensorError) as error:
        raise _unreadable_file_error(path, str(error).removeprefix('Error while deserializing header: ')) from error


def _open_tensors(path: pathlib.Path) -> Tensors:
    reader = _open_safetensors_file(path)
    return {name: StoredArray(path, reader, name) for name in reader.keys()}  # noqa: SIM118 (safe_open is no mapping)


def _open_shards(folder: pathlib.Path) -> Tensors:
    by_name = untrusted_files.read_json_object(folder / INDEX_FILE).get('weight_map')
    if not isinstance(by_name, dict):
        raise UserError(f'{folder / INDEX_FILE} has no weight_map, which maps arrays to files; download the file again')
    files = {
        name: untrusted_files.resolve_path_inside(folder, file, str(folder / INDEX_FILE))
        for name, file in by_name.items()
    }
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise UserError(f'{folder} lacks the shard {missing[0]}, listed in {INDEX_FILE}; download the folder again')
    readers = {file: _open_safetensors_file(file) for file in {*files.values()}}
    return {name: StoredArray(file, readers[file], name) for name, file in files.items()}


def _unreadable_file_error(path: pathlib.Path, reason: str) -> UserError:
    """Returns the error for a file that is damaged or not in safetensors format; `reason` is an untrusted string."""
    text = ascii(reason)[1:-1]
    text = text if len(text) <= 200 else f'{text[:200]}...'
    return UserError(f'{path} cannot be read as safetensors: {text}; copy or download it again')
