"""Maps remixer_t5x parameters to Hugging Face arrays, and converts arrays in both directions.

Hugging Face stores a separate array for each layer. remixer_t5x stacks the arrays of a run of identical layers as
[layers, ...]. For a run of identical blocks, the arrays of each layer of the block are stacked as [blocks, ...].
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util

Params = Any
_LAYER_PATH = re.compile(r'(\w+)/run_(\d+)/layer(?:/layer_(\d+))?(?:/(.+))?')


@dataclasses.dataclass(frozen=True)
class HuggingFaceModule:
    """A Hugging Face module that contains the parameters of a remixer_t5x module.

    Attributes:
        name: name of the module, in which `{}` is replaced with the index of the layer.
        part: (index, count): the parameter is the array at `index` after splitting the Hugging Face array into `count`
            equal arrays along the parameter's last axis.
        transposed: whether to swap the two axes of the weight. By default, only kernels are transposed, because a
            PyTorch Linear stores its weight as [outputs, inputs].
    """

    name: str
    part: tuple[int, int] = (0, 1)
    transposed: bool | None = None


# Maps remixer_t5x modules, such as `encoder/layer/self_attention/query`, to Hugging Face modules. A key can also be the
# path of a parameter.
ModuleNames = Mapping[str, str | HuggingFaceModule]


@dataclasses.dataclass(frozen=True)
class ParamMapping:
    """A remixer_t5x parameter and the Hugging Face arrays of its layers, or a single array outside of the layers.

    Attributes:
        path: path in the remixer_t5x parameter tree.
        names: names of the Hugging Face arrays.
        is_stacked: whether the parameter has a layer axis.
        transposed, part: see `HuggingFaceModule`.
        zero_rows: number of rows of zeros to insert before the rows of the Hugging Face array.
        factor: factor by which Hugging Face values are multiplied; a power of two, so that the product is exact.
    """

    path: str
    names: Sequence[str]
    is_stacked: bool
    transposed: bool
    part: tuple[int, int]
    zero_rows: int
    factor: float

    def find_huggingface_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each Hugging Face array of a parameter with the shape `shape`."""
        first, *rest = shape[1:] if self.is_stacked else shape
        sizes = [first - self.zero_rows, *rest]
        sizes[-1] *= self.part[1]
        return tuple(sizes[::-1] if self.transposed else sizes)

    def to_flax(self, tensors: Mapping[str, Any]) -> np.ndarray:
        """Returns the parameter in the remixer_t5x layout."""
        layers = [self._convert_layer(np.asarray(tensors[name])) for name in self.names]
        return np.stack(layers) if self.is_stacked else np.ascontiguousarray(layers[0])

    def _convert_layer(self, array: np.ndarray) -> np.ndarray:
        index, count = self.part
        array = np.split(array.T if self.transposed else array, count, axis=-1)[index]
        array = array if self.factor == 1.0 else array * np.float32(self.factor)
        return np.pad(array, [(self.zero_rows, 0)] + [(0, 0)] * (array.ndim - 1)) if self.zero_rows else array

    def to_huggingface(self, array: np.ndarray) -> list[np.ndarray]:
        """Converts the parameter to Hugging Face arrays, one for each of `names`. They are views if possible."""
        layers = [layer[self.zero_rows :] for layer in (array if self.is_stacked else [array])]
        layers = layers if self.factor == 1.0 else [layer / layer.dtype.type(self.factor) for layer in layers]
        return [layer.T for layer in layers] if self.transposed else layers


def map_params(params: Params, modules: ModuleNames, id_offset: int, query_factor: float) -> list[ParamMapping]:
    """Maps the parameters of a model (arrays or ShapeDtypeStructs) to the Hugging Face arrays in `modules`.

    Args:
        id_offset: number of rows of zeros in arrays over the vocabulary.
        query_factor: factor of the query kernels.
    """
    flat = traverse_util.flatten_dict(params, sep='/')
    layers = LayerIndices({path: array.shape for path, array in flat.items()})
    mappings = []
    for path in flat:
        key, indices = layers.locate(path)
        module, _, leaf = key.rpartition('/')
        target = modules.get(key) or modules[module]
        target = HuggingFaceModule(target) if isinstance(target, str) else target
        name = f'{target.name}.{"bias" if leaf == "bias" else "weight"}'
        mappings.append(
            ParamMapping(
                path,
                [name] if indices is None else [name.format(index) for index in indices],
                is_stacked=indices is not None,
                transposed=leaf == 'kernel' if target.transposed is None else target.transposed,
                part=target.part,
                zero_rows=id_offset if key in ('token_embedder/embedding', 'head/bias') else 0,
                factor=query_factor if module.endswith('/query') else 1.0,
            )
        )
    return mappings


class LayerIndices:
    """Maps paths of parameters and modules to the indices of their layers within the whole stack.

    `shapes` maps the paths of all parameters to their shapes, whose first axis is the number of layers in a run.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        counts = {_get_layer_key(match): shapes[match[0]][0] for match in map(_LAYER_PATH.fullmatch, shapes) if match}
        self._indices: dict[tuple[str, int, int], range] = {}
        ends: dict[str, int] = {}
        for (stack, _), run in itertools.groupby(sorted(counts), key=lambda key: key[:2]):
            block, start = list(run), ends.get(stack, 0)
            ends[stack] = start + counts[block[0]] * len(block)
            self._indices |= {key: range(start + i, ends[stack], len(block)) for i, key in enumerate(block)}

    def locate(self, path: str) -> tuple[str, range | None]:
        """Returns a path such as `encoder/layer/self_attention` without its run, and the indices of its layers.

        Returns the unchanged path and None for a path outside of the layers.
        """
        match = _LAYER_PATH.fullmatch(path)
        if match is None:
            return path, None
        return '/'.join(filter(None, (match[1], 'layer', match[4]))), self._indices[_get_layer_key(match)]


def _get_layer_key(match: re.Match[str]) -> tuple[str, int, int]:
    """Returns the stack, the run and the index in the block, which is 0 without a block."""
    return match[1], int(match[2]), int(match[3] or 0)


def convert_to_huggingface(mappings: Iterable[ParamMapping], params: Params) -> dict[str, np.ndarray]:
    """Converts remixer_t5x `params` to a dict of named Hugging Face arrays, which are views if possible."""
    flat = traverse_util.flatten_dict(params, sep='/')
    parts: dict[str, list[np.ndarray]] = {}
    axes: dict[str, int] = {}
    for mapping in sorted(mappings, key=lambda mapping: mapping.part):
        for name, array in zip(mapping.names, mapping.to_huggingface(np.asarray(flat[mapping.path])), strict=True):
            parts.setdefault(name, []).append(array)
            axes[name] = 0 if mapping.transposed else -1
    return {
        name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axes[name]) for name, arrays in parts.items()
    }
