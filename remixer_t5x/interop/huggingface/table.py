"""The parameter table of a model family: the path of each of our parameters, and its name and shape in Hugging Face's
files.

Hugging Face stores one array per layer; we store one array [layers, ...] per run of identical layers, and for a run of
blocks of several layers one array [blocks, ...] per layer of the block.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util

Params = Any
# By stack, the number of layers in each run, or for a run of blocks the numbers of blocks and of layers in a block.
Runs = Mapping[str, Sequence[int | tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One of our parameters and its counterpart in Hugging Face's files.

    Attributes:
        path: path in our tree; in `encoder/run/layer/...`, `run` stands for run_0, run_1, ...
        name: Hugging Face's name; `{}` stands for the index of a layer.
        shape: Hugging Face's shape, of one layer.
        transposed: whether the last two axes of our array are swapped.
        part: (index, count): our array is one of `count` equal parts of theirs along our last axis. The rows of all
            parts have the same name and are listed in order.
        zero_rows: number of rows of zeros that precede theirs in our array.
        factor: our array is theirs times this number, a power of two so that the product is exact.
        first_layer: the layers before it have no such array.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    zero_rows: int = 0
    factor: float = 1.0
    first_layer: int = 0

    @property
    def is_stacked(self) -> bool:
        return '{}' in self.name

    def places(self, runs: Runs) -> Iterator[tuple[str, list[str]]]:
        """Yields the path of each of our arrays with Hugging Face's names of its layers (one name if not stacked)."""
        if not self.is_stacked:
            yield self.path, [self.name]
            return
        start = 0
        for run, shape in enumerate(runs[self.path.partition('/')[0]]):
            count, size = shape if isinstance(shape, tuple) else (shape, 0)
            path, step = self.path.replace('/run/', f'/run_{run}/'), max(size, 1)
            for index in range(step):
                layers = range(start + index, start + count * step, step)
                if names := [self.name.format(layer) for layer in layers if layer >= self.first_layer]:
                    yield path.replace('/layer/', f'/layer/layer_{index}/') if size else path, names
            start += count * step

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """Converts Hugging Face's array of one layer."""
        index, count = self.part
        array = np.split(array.T if self.transposed else array, count, axis=-1)[index]
        array = array if self.factor == 1.0 else array * np.float32(self.factor)
        return np.pad(array, [(self.zero_rows, 0)] + [(0, 0)] * (array.ndim - 1)) if self.zero_rows else array

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Converts our array of one layer; returns a view if possible."""
        array = array[self.zero_rows :]
        array = array if self.factor == 1.0 else array / array.dtype.type(self.factor)
        return array.T if self.transposed else array


def kernel(path: str, name: str, inputs: int, outputs: int) -> Row:
    """A weight of torch's Linear, [outputs, inputs], which is our kernel transposed."""
    return Row(f'{path}/kernel', f'{name}.weight', (outputs, inputs), transposed=True)


def dense(path: str, name: str, inputs: int, outputs: int) -> list[Row]:
    """Weight and bias of torch's Linear."""
    return [kernel(path, name, inputs, outputs), Row(f'{path}/bias', f'{name}.bias', (outputs,))]


def layer_norm(path: str, name: str, width: int) -> list[Row]:
    """Scale and bias of torch's LayerNorm."""
    return [Row(f'{path}/scale', f'{name}.weight', (width,)), Row(f'{path}/bias', f'{name}.bias', (width,))]


def read(rows: Iterable[Row], runs: Runs, tensors: Mapping[str, np.ndarray]) -> Params:
    """Reads our parameters, float32, from tensors whose names and shapes have been checked."""
    flat = {}
    for row in rows:
        for path, names in row.places(runs):
            layers = [row.to_ours(tensors[name]) for name in names]
            flat[path] = np.stack(layers) if row.is_stacked else np.ascontiguousarray(layers[0])
    return traverse_util.unflatten_dict(flat, sep='/')


def write(rows: Iterable[Row], runs: Runs, params: Params) -> dict[str, np.ndarray]:
    """Returns Hugging Face's arrays by name, as views of `params` if possible."""
    flat = traverse_util.flatten_dict(params, sep='/')
    parts: dict[str, list[np.ndarray]] = {}
    axes: dict[str, int] = {}
    for row in rows:
        for path, names in row.places(runs):
            layers = np.asarray(flat[path]) if row.is_stacked else [np.asarray(flat[path])]
            for name, layer in zip(names, layers, strict=True):
                parts.setdefault(name, []).append(row.to_theirs(layer))
                axes[name] = 0 if row.transposed else -1
    return {
        name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axes[name]) for name, arrays in parts.items()
    }
