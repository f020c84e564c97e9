"""Arrays in safetensors files: a Hugging Face folder, in one file or in shards, or one file of ours; never a pickle.

A file is 8 bytes with the header's length N (little endian), N bytes of JSON, and the arrays' bytes. The library
refuses a header that does not describe exactly the bytes after it; of two equal names it takes the last one.
"""

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from remixer_t5x import safe_paths, temporary, untrusted_files
from remixer_t5x.errors import UserError

WHOLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
# Dtypes that become float32 without loss; others are quantised.
FLOATS = ('F32', 'BF16', 'F16')
# NumPy has at most 64 dimensions.
MAX_DIMENSIONS = 32
# Elements, counting a size of 0 as 1: NumPy refuses shapes whose bytes do not fit into a signed 64-bit number.
MAX_SIZE = 2**59


class Tensors(Mapping[str, np.ndarray]):
    """Float32 arrays by name, each read on demand.

    places: file of each array, and its name there.
    """

    def __init__(self, places: Mapping[str, tuple[pathlib.Path, str]]):
        self._places = places
        self._readers: dict[pathlib.Path, safe_open] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        self.shape(name)
        file, name_there = self._places[name]
        return np.asarray(self._reader(file).get_tensor(name_there), np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, without reading it. Raises UserError if the array is quantised, and so is not a
        parameter.
        """
        file, name_there = self._places[name]
        part = self._reader(file).get_slice(name_there)
        if part.get_dtype() not in FLOATS:
            raise UserError(
                f'{name} in {file} is stored as {part.get_dtype()}; allowed are {", ".join(FLOATS)}: '
                'give the model as it was before it was quantised'
            )
        return tuple(part.get_shape())

    def renamed(self, names: Mapping[str, str]) -> 'Tensors':
        """The arrays by other names; `names` is a mapping from the new names to those here."""
        return Tensors({new: self._places[name] for new, name in names.items()})

    def _reader(self, file: pathlib.Path) -> safe_open:
        if file not in self._readers:
            self._readers[file] = _open(file)
        return self._readers[file]


def read_folder(folder: pathlib.Path) -> Tensors:
    """The weights in a Hugging Face folder. Raises UserError if they are not in safetensors."""
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    if (folder / WHOLE).is_file():
        return _read_tensors(folder / WHOLE)
    pickled = next(iter(sorted([*folder.glob('*.bin'), *folder.glob('*.pt')])), None)
    if pickled:
        raise UserError(
            f'{folder} has its weights in {pickled.name}, a pickle, which can run code when it is read; if you trust '
            f'it: python -c "import transformers as t; t.T5ForConditionalGeneration.from_pretrained({str(folder)!r})'
            f'.save_pretrained({str(folder)!r})" writes {WHOLE}'
        )
    raise UserError(f'{folder} has no {WHOLE} and no {INDEX}; give the folder of a Hugging Face model')


def read_file(path: str) -> tuple[Tensors, dict[str, str]]:
    """The arrays and the metadata of one file."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise UserError(f'{file} is not a file; give a file that --to_safetensors wrote')
    return _read_tensors(file), dict(_open(file).metadata() or {})


def write_file(path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes `arrays`, in order of their names, under a temporary name first. Raises UserError if it cannot."""
    unfinished = path.with_name(f'{path.name}.unfinished')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The library writes memory in its order, so a transposed view would be scrambled.
        contiguous = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
        save_file(contiguous, unfinished, dict(metadata))
        temporary.commit(unfinished, path)
    except (OSError, SafetensorError) as error:
        # On a read-only disk, unlink fails even for a file that does not exist.
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise UserError(f'{path} cannot be written: {error}; check the space and rights there') from error


def _open(path: pathlib.Path) -> safe_open:
    try:
        reader = safe_open(path, framework='numpy')
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, str(error).removeprefix('Error while deserializing header: ')) from error
    _check_header(path)
    return reader


def _read_tensors(path: pathlib.Path) -> Tensors:
    names = _open(path).keys()
    return Tensors({name: (path, name) for name in names})


def _read_shards(folder: pathlib.Path) -> Tensors:
    by_name = untrusted_files.read_object(folder / INDEX).get('weight_map')
    if not isinstance(by_name, dict):
        raise UserError(f'{folder / INDEX} has no weight_map from names to files; download it again')
    files = {name: safe_paths.inside(folder, file, str(folder / INDEX)) for name, file in by_name.items()}
    names: dict[pathlib.Path, set[str]] = {}
    for name, file in files.items():
        if not file.is_file():
            raise UserError(f'{folder} lacks the shard {file.name} that {INDEX} names; download the folder again')
        if file not in names:
            names[file] = {*_open(file).keys()}
        if name not in names[file]:
            raise UserError(f'{file} lacks {name}, which {INDEX} says it has; download the folder again')
    return Tensors({name: (file, name) for name, file in files.items()})


def _check_header(path: pathlib.Path) -> None:
    """Raises UserError for what the library does not check: equal names, and shapes that NumPy cannot express."""
    with untrusted_files.opened(path) as file:
        header = file.read(int.from_bytes(file.read(8), 'little'))
    try:
        arrays = untrusted_files.parse(header, unique=True)
    except untrusted_files.NotJson as error:
        raise _unreadable(path, str(error)) from error
    for name, array in arrays.items():
        if name == '__metadata__':
            continue
        shape = array['shape']
        if len(shape) > MAX_DIMENSIONS:
            raise _unreadable(path, f'{name!r} has {len(shape)} dimensions, allowed are {MAX_DIMENSIONS}')
        # The library multiplies the sizes, and lets an array of [0, 2**62] pass.
        if math.prod(max(size, 1) for size in shape) > MAX_SIZE:
            raise _unreadable(path, f'{name!r} has shape {shape}, and an array that NumPy cannot express')


def _unreadable(path: pathlib.Path, reason: str) -> UserError:
    """The error for a file that is damaged or not safetensors; `reason` may quote the file."""
    shown = ascii(reason)[1:-1]
    shown = shown if len(shown) <= 200 else f'{shown[:200]}...'
    return UserError(f'{path} cannot be read as safetensors: {shown}; copy or download it again')
