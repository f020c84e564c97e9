"""The table of a model family: each row is one of our parameters and its name and shape in Hugging Face's files.

Hugging Face has one array for each layer. We have one array [layers, ...] for each run of identical layers.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util

from remixer_t5x.errors import UserError
from remixer_t5x.interop.safetensors.files import Tensors

Params = Any
# Number of layers in each run, by stack.
Runs = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One of our parameters, and its place in Hugging Face's files.

    Attributes:
        path: path in our tree; in `encoder/run/layer/...`, `run` stands for run_0, run_1, ...
        name: Hugging Face's name; `{}` stands for the index of a layer.
        shape: Hugging Face's shape, of one layer.
        transposed: the last two axes of our array are swapped.
        part: (index, count): our array is one of `count` equal parts of theirs, along the last axis. The rows of all
            parts have the same name, and follow each other.
        zero_rows: rows of zeros that our array has before theirs.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    zero_rows: int = 0

    @property
    def is_stacked(self) -> bool:
        return '{}' in self.name

    def places(self, runs: Runs) -> Iterator[tuple[str, list[str]]]:
        """The path of each of our arrays, and Hugging Face's names of its layers (one name if it is not stacked)."""
        if not self.is_stacked:
            yield self.path, [self.name]
            return
        first = 0
        for run, count in enumerate(runs[self.path.partition('/')[0]]):
            names = [self.name.format(layer) for layer in range(first, first + count)]
            yield self.path.replace('/run/', f'/run_{run}/'), names
            first += count

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """Converts Hugging Face's array of one layer."""
        index, count = self.part
        array = np.split(array, count, axis=-1)[index]
        array = array.T if self.transposed else array
        return np.pad(array, ((self.zero_rows, 0), (0, 0))) if self.zero_rows else array

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Converts our array of one layer; a view."""
        array = array[self.zero_rows :] if self.zero_rows else array
        return array.T if self.transposed else array


def kernel(path: str, name: str, inputs: int, outputs: int) -> Row:
    """A matrix of torch's Linear, [outputs, inputs], which is our kernel transposed."""
    return Row(f'{path}/kernel', f'{name}.weight', (outputs, inputs), transposed=True)


def dense(path: str, name: str, inputs: int, outputs: int) -> list[Row]:
    """Kernel and bias of torch's Linear."""
    return [kernel(path, name, inputs, outputs), Row(f'{path}/bias', f'{name}.bias', (outputs,))]


def layer_norm(path: str, name: str, width: int) -> list[Row]:
    """Scale and bias of torch's LayerNorm."""
    return [Row(f'{path}/scale', f'{name}.weight', (width,)), Row(f'{path}/bias', f'{name}.bias', (width,))]


def read(rows: Iterable[Row], runs: Runs, tensors: Tensors) -> Params:
    """Reads our parameters, float32, from tensors that `check` has accepted."""
    flat = {}
    for row in rows:
        for path, names in row.places(runs):
            layers = [row.to_ours(tensors[name]) for name in names]
            flat[path] = np.stack(layers) if row.is_stacked else np.ascontiguousarray(layers[0])
    return traverse_util.unflatten_dict(flat, sep='/')


def write(rows: Iterable[Row], runs: Runs, params: Params) -> dict[str, np.ndarray]:
    """Hugging Face's arrays by name, as views of `params` if possible."""
    flat = traverse_util.flatten_dict(params, sep='/')
    parts: dict[str, list[np.ndarray]] = {}
    for row in rows:
        for path, names in row.places(runs):
            layers = np.asarray(flat[path]) if row.is_stacked else [np.asarray(flat[path])]
            for name, layer in zip(names, layers, strict=True):
                parts.setdefault(name, []).append(row.to_theirs(layer))
    return {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays, -1) for name, arrays in parts.items()}


def check(
    rows: Iterable[Row],
    runs: Runs,
    tensors: Tensors,
    folder: str,
    hf_class: str,
    copies: Mapping[str, str],
    ignored: str,
) -> None:
    """Raises UserError for a weight in `folder` that is missing, has another shape than it should, or would be ignored.

    Args:
        rows: the table of the model.
        runs: lengths of its runs of layers.
        tensors: the weights, by the names in the table.
        folder: named in errors.
        hf_class: transformers' class of the model, named in errors.
        copies: names that are allowed in addition, and the names in the table whose arrays they must equal.
        ignored: pattern of names that are allowed in addition and not read.
    """
    shapes = {name: row.shape for row in rows for _, names in row.places(runs) for name in names}
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise UserError(f'{folder} lacks the weight {missing[0]}{_count_more(missing)}; give a whole {hf_class}')
    differing = [name for name, shape in shapes.items() if tensors.shape(name) != shape]
    if differing:
        name = differing[0]
        raise UserError(
            f'{name} in {folder} has shape {tensors.shape(name)}, and {shapes[name]} by config.json'
            f'{_count_more(differing)}; give the config.json that belongs to the weights'
        )
    extra = [name for name in sorted({*tensors} - {*shapes, *copies}) if not re.fullmatch(ignored, name)]
    if extra:
        raise UserError(
            f'{folder} has the weight {extra[0]}{_count_more(extra)}, which a {hf_class} of its config.json does not '
            'have; give the config.json that belongs to the weights'
        )
    for copy, name in copies.items():
        if copy in tensors and copy not in shapes and not np.array_equal(tensors[copy], tensors[name]):
            raise UserError(f'{copy} in {folder} is not {name}; a {hf_class} must have one array for both')


def _count_more(names: Sequence[str]) -> str:
    return f' (and {len(names) - 1} more)' if len(names) > 1 else ''
