"""Arrays in safetensors files: a Hugging Face folder, in one file or in shards, or one file of ours; never a pickle."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from remixer_t5x import safe_paths, temporary, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop.safetensors import header

WHOLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
# Dtypes that become float32 without loss; others are quantised.
FLOATS = ('F32', 'BF16', 'F16')


class Tensors(Mapping[str, np.ndarray]):
    """Float32 arrays by name, each read on demand."""

    def __init__(self, files: Mapping[str, pathlib.Path]):
        self._files = files
        self._open: dict[pathlib.Path, safe_open] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        self.shape(name)
        return np.asarray(self._reader(name).get_tensor(name), np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, without reading it. Raises UserError if the array is quantised, and so is not a
        parameter.
        """
        part = self._reader(name).get_slice(name)
        if part.get_dtype() not in FLOATS:
            raise UserError(
                f'{name} in {self._files[name]} is stored as {part.get_dtype()}; allowed are {", ".join(FLOATS)}: '
                'give the model as it was before it was quantised'
            )
        return tuple(part.get_shape())

    def _reader(self, name: str) -> safe_open:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path]


def read_folder(folder: pathlib.Path) -> Tensors:
    """The weights in a Hugging Face folder. Raises UserError if they are not in safetensors."""
    if (folder / INDEX).is_file():
        return Tensors(_shards(folder))
    if (folder / WHOLE).is_file():
        return Tensors(_names(folder / WHOLE))
    pickled = next(iter(sorted([*folder.glob('*.bin'), *folder.glob('*.pt')])), None)
    if pickled:
        raise UserError(
            f'{folder} has its weights in {pickled.name}, a pickle, which can run code when it is read; if you trust '
            f'it: python -c "import transformers as t; t.T5ForConditionalGeneration.from_pretrained({str(folder)!r})'
            f'.save_pretrained({str(folder)!r})" writes {WHOLE}'
        )
    raise UserError(f'{folder} has no {WHOLE} and no {INDEX}; give a folder of a Hugging Face T5')


def read_file(path: str) -> tuple[Tensors, dict[str, str]]:
    """The arrays and the metadata of one file."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise UserError(f'{file} is not a file; give a file that --to_safetensors wrote')
    reader = _opened(file)
    return Tensors(dict.fromkeys(reader.keys(), file)), dict(reader.metadata() or {})


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


def _opened(path: pathlib.Path) -> safe_open:
    try:
        reader = safe_open(path, framework='numpy')
    except (OSError, SafetensorError) as error:
        raise header.bad(path, str(error).removeprefix('Error while deserializing header: ')) from error
    header.check(path)
    return reader


def _names(path: pathlib.Path) -> dict[str, pathlib.Path]:
    return dict.fromkeys(_opened(path).keys(), path)


def _shards(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    by_name = untrusted_files.read_object(folder / INDEX).get('weight_map')
    if not isinstance(by_name, dict):
        raise UserError(f'{folder / INDEX} has no weight_map from names to files; download it again')
    files = {name: safe_paths.inside(folder, file, str(folder / INDEX)) for name, file in by_name.items()}
    present: dict[pathlib.Path, set[str]] = {}
    for name, file in files.items():
        if file not in present:
            if not file.is_file():
                raise UserError(f'{folder} lacks the shard {file.name} that {INDEX} names; download the folder again')
            present[file] = set(_names(file))
        if name not in present[file]:
            raise UserError(f'{file} lacks {name}, which {INDEX} says it has; download the folder again')
    return files
