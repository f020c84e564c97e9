"""Reads and writes safetensors files with Hugging Face weights (a single file or shards) or a remixer_t5x model.

A safetensors file starts with the header length N as 8 little-endian bytes, followed by N bytes of JSON and the bytes
of the arrays. In files of remixer_t5x models, layers are stacked, and the name of an array is its path in
the parameter tree, such as `encoder/run_0/layer/...`. The metadata contains `format`, `step`, `config` (the gin text of
the run), `vocabulary` (as in a checkpoint), `versions` (package versions as JSON) and `lengths` (those of a
`TrainedModel` that was saved, as JSON, or null).
"""

import contextlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
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


class LazyTensors(Mapping[str, np.ndarray]):
    """A mapping from names to float32 arrays, which are read on demand.

    `locations` maps the name of each array to its file and its name in that file.
    """

    def __init__(self, locations: Mapping[str, tuple[pathlib.Path, str]]):
        self._locations = dict(locations)
        self._readers: dict[pathlib.Path, safe_open] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        self.read_shape(name)
        reader, name_in_file = self._locate_array(name)
        try:
            return np.asarray(reader.get_tensor(name_in_file), np.float32)
        except (ValueError, SafetensorError) as error:
            # safetensors accepts shapes that NumPy does not support, such as [0, 2**62].
            raise _unreadable_file_error(self._locations[name][0], f'{name!r}: {error}') from error

    def __contains__(self, name: object) -> bool:
        return name in self._locations

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def read_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array without reading the array. Raises UserError if the array is quantized."""
        reader, name_in_file = self._locate_array(name)
        try:
            part = reader.get_slice(name_in_file)
        except SafetensorError as error:
            raise _unreadable_file_error(self._locations[name][0], f'{name!r}: {error}') from error
        if part.get_dtype() not in FLOAT_DTYPES:
            raise UserError(
                f'{name} in {self._locations[name][0]} must have dtype {", ".join(FLOAT_DTYPES)}, '
                f'got {part.get_dtype()}; use the unquantized model'
            )
        return tuple(part.get_shape())

    def with_new_names(self, names: Mapping[str, str]) -> 'LazyTensors':
        """Returns the arrays with new names: `names` maps new names to current names."""
        return LazyTensors({new: self._locations[name] for new, name in names.items()})

    def merge_with_prefix(self, folder: str, tensors: 'LazyTensors') -> 'LazyTensors':
        """Returns these arrays and the arrays of `tensors`, with the prefix `folder`/ added to the latter's names."""
        return LazyTensors(
            self._locations | {f'{folder}/{name}': location for name, location in tensors._locations.items()}
        )

    def _locate_array(self, name: str) -> tuple[safe_open, str]:
        file, name_in_file = self._locations[name]
        if file not in self._readers:
            self._readers[file] = _open_safetensors_file(file)
        return self._readers[file], name_in_file


def open_weights_folder(folder: pathlib.Path, auto_class: str) -> LazyTensors:
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


def open_weights_file(path: str) -> tuple[LazyTensors, dict[str, str]]:
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
    params = traverse_util.unflatten_dict(dict(tensors), sep='/')
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


def _open_tensors(path: pathlib.Path) -> LazyTensors:
    return LazyTensors({name: (path, name) for name in _open_safetensors_file(path).keys()})  # noqa: SIM118 (safe_open is no mapping)


def _open_shards(folder: pathlib.Path) -> LazyTensors:
    by_name = untrusted_files.read_json_object(folder / INDEX_FILE).get('weight_map')
    if not isinstance(by_name, dict):
        raise UserError(f'{folder / INDEX_FILE} has no weight_map, which maps arrays to files; download the file again')
    files = {
        name: untrusted_files.resolve_path_inside(folder, file, str(folder / INDEX_FILE))
        for name, file in by_name.items()
    }
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise UserError(f'{folder} lacks the shard {missing[0]}, listed in {INDEX_FILE}; download the folder again')
    return LazyTensors({name: (file, name) for name, file in files.items()})


def _unreadable_file_error(path: pathlib.Path, reason: str) -> UserError:
    """Returns the error for a file that is damaged or not in safetensors format; `reason` is an untrusted string."""
    text = ascii(reason)[1:-1]
    text = text if len(text) <= 200 else f'{text[:200]}...'
    return UserError(f'{path} cannot be read as safetensors: {text}; copy or download it again')
