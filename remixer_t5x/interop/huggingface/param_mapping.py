"""Maps remixer_t5x parameters to Hugging Face arrays, and converts arrays in both directions.

Hugging Face stores a separate array for each layer. remixer_t5x stacks the arrays of a run of identical layers as
[layers, ...]. For a run of identical blocks, the arrays of each layer of the block are stacked as [blocks, ...].
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util

Params = Any
# Maps each stack to its runs. A run is a number of layers, or (blocks, layers per block) for a run of blocks.
Runs = Mapping[str, Sequence[int | tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class ParamMapping:
    """A remixer_t5x parameter and the corresponding Hugging Face array.

    Attributes:
        path: path in the remixer_t5x parameter tree; in `encoder/run/layer/...`, `run` means run_0, run_1, ...
        name: name of the Hugging Face array, in which `{}` is replaced with the index of the layer.
        shape: shape of the Hugging Face array of a single layer.
        transposed: whether to swap the last two axes.
        part: (index, count): the parameter is the array at `index` after splitting the Hugging Face array into `count`
            equal arrays along the parameter's last axis. Mappings with the same name are in the order of `index`.
        zero_rows: number of rows of zeros to insert before the rows of the Hugging Face array.
        factor: factor by which Hugging Face values are multiplied; a power of two, so that the product is exact.
        first_layer: index of the first layer that has this parameter.
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

    def expand_layer_runs(self, runs: Runs) -> Iterator[tuple[str, list[str]]]:
        """Yields the path of each remixer_t5x array and the names of the Hugging Face arrays that it stacks."""
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

    def to_flax(self, array: np.ndarray) -> np.ndarray:
        """Converts the Hugging Face array of a single layer to the remixer_t5x layout."""
        index, count = self.part
        array = np.split(array.T if self.transposed else array, count, axis=-1)[index]
        array = array if self.factor == 1.0 else array * np.float32(self.factor)
        return np.pad(array, [(self.zero_rows, 0)] + [(0, 0)] * (array.ndim - 1)) if self.zero_rows else array

    def to_huggingface(self, array: np.ndarray) -> np.ndarray:
        """Converts the remixer_t5x array of a single layer to the Hugging Face layout, as a view if possible."""
        array = array[self.zero_rows :]
        array = array if self.factor == 1.0 else array / array.dtype.type(self.factor)
        return array.T if self.transposed else array


def build_kernel_mapping(path: str, name: str, inputs: int, outputs: int) -> ParamMapping:
    """Returns the mapping from a Flax kernel to the weight of a PyTorch Linear, [outputs, inputs], its transpose."""
    return ParamMapping(f'{path}/kernel', f'{name}.weight', (outputs, inputs), transposed=True)


def build_dense_mappings(path: str, name: str, inputs: int, outputs: int) -> list[ParamMapping]:
    """Returns the mappings of the weight and bias of a PyTorch Linear."""
    return [build_kernel_mapping(path, name, inputs, outputs), ParamMapping(f'{path}/bias', f'{name}.bias', (outputs,))]


def build_layer_norm_mappings(path: str, name: str, width: int) -> list[ParamMapping]:
    """Returns the mappings of the scale and bias of a PyTorch LayerNorm."""
    return [
        ParamMapping(f'{path}/scale', f'{name}.weight', (width,)),
        ParamMapping(f'{path}/bias', f'{name}.bias', (width,)),
    ]


def convert_to_flax(mappings: Iterable[ParamMapping], runs: Runs, tensors: Mapping[str, np.ndarray]) -> Params:
    """Converts Hugging Face `tensors` to remixer_t5x parameters in float32. The caller must check names and shapes."""
    flat = {}
    for mapping in mappings:
        for path, names in mapping.expand_layer_runs(runs):
            layers = [mapping.to_flax(tensors[name]) for name in names]
            flat[path] = np.stack(layers) if mapping.is_stacked else np.ascontiguousarray(layers[0])
    return traverse_util.unflatten_dict(flat, sep='/')


def convert_to_huggingface(mappings: Iterable[ParamMapping], runs: Runs, params: Params) -> dict[str, np.ndarray]:
    """Converts remixer_t5x `params` to a dict of named Hugging Face arrays, which are views if possible."""
    flat = traverse_util.flatten_dict(params, sep='/')
    parts: dict[str, list[np.ndarray]] = {}
    axes: dict[str, int] = {}
    for mapping in mappings:
        for path, names in mapping.expand_layer_runs(runs):
            layers = np.asarray(flat[path]) if mapping.is_stacked else [np.asarray(flat[path])]
            for name, layer in zip(names, layers, strict=True):
                parts.setdefault(name, []).append(mapping.to_huggingface(layer))
                axes[name] = 0 if mapping.transposed else -1
    return {
        name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axes[name]) for name, arrays in parts.items()
    }
