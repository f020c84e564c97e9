"""Reads and writes T5X checkpoints without requiring T5X.

A T5X checkpoint, `checkpoint_<step>`, has one of two formats. In the original format, the msgpack file `checkpoint`
contains 'version' and 'optimizer'. The file stores arrays as TensorStore specs, which refer to zarr folders in the same
folder. Published checkpoints use this format, all versions of T5X can read it, and this module writes it. Newer
versions of T5X write Orbax checkpoints to the subfolder `state`.

In both formats, `target` contains the parameters, with the names that the trained module uses. Models trained with
configs/t5x have the parameter names of remixer_t5x. T5X's network (t5x/examples/t5/network.py) stores each layer
separately, as `encoder/layers_0`. T5X's scalable network stacks the layers in `encoder/encoder`, by default along the
second axis. The shapes equal those of remixer_t5x, but some versions use a separate head axis in attention kernels.
"""

import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from flax import serialization, traverse_util

from remixer_t5x import temporary_files, untrusted_files
from remixer_t5x.checkpoints import saved_params, untrusted_checkpoints
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.model_family import MAX_LAYERS
from remixer_t5x.run_folder import model_dir

Params = Any
Array = np.ndarray
Shapes = Mapping[str, tuple[int, ...]]

_MSGPACK_FILE = 'checkpoint'
_ORBAX_FOLDER = 'state'
_FORMAT_VERSION = 3
_CHUNK_BYTES = 2**26
_STEP_FOLDER = re.compile(r'checkpoint_(\d+)')

# Maps the names of parameters and sublayers in remixer_t5x to the corresponding names in T5X's network.
_OUTSIDE_LAYERS = {
    'token_embedder/embedding': 'token_embedder/embedding',
    'logits/kernel': 'decoder/logits_dense/kernel',
    'encoder/position_bias/embedding': 'encoder/relpos_bias/rel_embedding',
    'decoder/position_bias/embedding': 'decoder/relpos_bias/rel_embedding',
    'encoder/final_norm/scale': 'encoder/encoder_norm/scale',
    'decoder/final_norm/scale': 'decoder/decoder_norm/scale',
}
_FEED_FORWARD = dict.fromkeys(('gated_mlp', 'relu_mlp'), 'mlp') | dict.fromkeys(
    ('gated_mlp_norm', 'relu_mlp_norm'), 'pre_mlp_layer_norm'
)
_SUBLAYERS = {
    'encoder': {
        'self_attention': 'attention',
        'self_attention_norm': 'pre_attention_layer_norm',
        **_FEED_FORWARD,
    },
    'decoder': {
        'self_attention': 'self_attention',
        'self_attention_norm': 'pre_self_attention_layer_norm',
        'cross_attention': 'encoder_decoder_attention',
        'cross_attention_norm': 'pre_cross_attention_layer_norm',
        **_FEED_FORWARD,
    },
}
_LAYER_PARAM = re.compile(r'(encoder|decoder)/run_0/layer/([^/]+)/(.+)')
KEEP_NAMES_ADVICE = 'pass --own_names to keep the parameter names of remixer_t5x, which configs/t5x/*.gin read'


class _SavedParams(NamedTuple):
    """A checkpoint: a dict from parameter names to shapes, a function that reads arrays by name, and the step."""

    shapes: Shapes
    read: Callable[[Sequence[str]], dict[str, Array]]
    step: int


class _ParamSource(NamedTuple):
    """The arrays of a T5X checkpoint that correspond to a remixer_t5x parameter.

    Attributes:
        names: the name of a single array, or one name for each layer.
        per_layer: whether each array in `names` is a single layer.
        axis: the index of the layer axis in a single array, or None if the array has no layer axis.
        shared: whether the layers share the parameter; all layers of the array must be equal, and the first is used.
    """

    names: Sequence[str]
    per_layer: bool = False
    axis: int | None = None
    shared: bool = False

    def build_param(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
        """Returns the parameter in float32. Merges the head axis of attention kernels if it is separate.

        Raises ValueError if the layers of a shared parameter differ.
        """
        parts = [np.asarray(arrays[name]).astype(np.float32) for name in self.names]
        value = np.stack(parts) if self.per_layer else parts[0]
        if self.axis is not None:
            value = np.moveaxis(value, self.axis, 0)
        if self.shared:
            if not (value == value[:1]).all():
                raise ValueError('each layer has a different position bias, but the layers of this model share one')
            value = value[0]
        has_heads = value.ndim == len(shape) + 1 and value.size == np.prod(shape)
        return np.ascontiguousarray(value.reshape(shape) if has_heads else value)


def read_t5x_checkpoint(path: str, abstract: Params) -> tuple[Params, int]:
    """Reads the parameters (NumPy, float32) and the step of a T5X checkpoint.

    Args:
        path: a folder `checkpoint_<step>`, or the MODEL_DIR of T5X, whose newest checkpoint is read.
        abstract: the parameter tree of the model, with ShapeDtypeStructs as leaves.

    Raises:
        UserError: there is no checkpoint, it cannot be read, or it does not match the model's architecture or size.
    """
    folder = _find_checkpoint(path)
    untrusted_checkpoints.check_untrusted_checkpoint(folder)
    expected = {name: tuple(leaf.shape) for name, leaf in _flatten_params(abstract).items()}
    with saved_params.wrap_checkpoint_errors(folder, 'read'):
        saved = (
            _open_orbax_checkpoint(folder / _ORBAX_FOLDER)
            if (folder / _ORBAX_FOLDER).is_dir()
            else _open_msgpack_checkpoint(folder)
        )
        has_our_names = any('/run_0/' in name for name in saved.shapes)
        if has_our_names:
            sources = {name: _ParamSource([name]) for name in expected}
        else:
            sources = _find_param_sources(expected, saved.shapes)
        needed = {name for source in sources.values() for name in source.names}
        missing, extra = sorted(needed - saved.shapes.keys()), sorted(saved.shapes.keys() - needed)
        if missing or extra:
            problem = f'it has no {missing[0]}' if missing else f'the model has no {extra[0]}'
            raise UserError(f'{folder} does not fit this model: {problem}; use the same architecture and size')
        arrays = {}
        for name, source in sources.items():
            _check_stored_array_size(folder, name, expected[name], source, saved.shapes)
            arrays[name] = source.build_param(saved.read(source.names), expected[name])
            if arrays[name].shape != expected[name]:
                raise _shape_error(folder, name, arrays[name].shape, expected[name])
    return traverse_util.unflatten_dict(arrays, sep='/'), saved.step


def check_folder_is_new(path: str, step: int) -> epath.Path:
    """Returns the folder `path`/checkpoint_<step>. Raises UserError if the folder exists."""
    folder = model_dir.to_absolute_path(path) / f'checkpoint_{step}'
    if folder.exists():
        raise UserError(f'{folder} already exists; use another folder, or remove it')
    return folder


def write_t5x_checkpoint(path: str, params: Params, step: int, own_names: bool = False) -> str:
    """Writes `params` to `path`/checkpoint_<step> in the msgpack format of T5X, and returns the folder.

    The optimizer state is not written. With `own_names`, the checkpoint keeps the parameter names of remixer_t5x, which
    configs/t5x uses, instead of those of T5X's network.

    Raises:
        UserError: the folder exists or cannot be written, or T5X's network has no equivalent of a parameter.
    """
    flat = _flatten_params(params)
    arrays = flat if own_names else _convert_to_t5x_params(flat)
    folder = check_folder_is_new(path, step)
    unfinished = folder.parent / f'{folder.name}.tmp'
    with saved_params.wrap_checkpoint_errors(folder, 'written'):
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        target = traverse_util.unflatten_dict(
            {name: _write_array(unfinished, f'target/{name}', np.asarray(value)) for name, value in arrays.items()},
            sep='/',
        )
        state = {'step': np.asarray(step, np.int32)}
        contents = {'version': _FORMAT_VERSION, 'optimizer': {'target': target, 'state': state}}
        (unfinished / _MSGPACK_FILE).write_bytes(serialization.msgpack_serialize(contents))
        temporary_files.sync_and_rename(unfinished, folder)
    return str(folder)


def _flatten_params(tree: Params) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep='/')


def _find_checkpoint(path: str) -> epath.Path:
    """Returns `path` if it is a checkpoint, or the newest checkpoint in the folder `path`."""
    if '://' in path:
        raise UserError(f'{path} must be a local folder; copy it with, for example, gcloud storage cp -r')
    folder = model_dir.to_absolute_path(path)
    if _is_checkpoint(folder):
        return folder
    children = folder.iterdir() if folder.is_dir() else ()
    steps = {int(name[1]): child for child in children if (name := _STEP_FOLDER.fullmatch(child.name))}
    complete = [step for step in sorted(steps) if _is_checkpoint(steps[step])]
    if complete:
        return steps[complete[-1]]
    raise UserError(
        f'{folder} does not contain a T5X checkpoint; use a folder checkpoint_<step>, or the MODEL_DIR of a T5X run'
    )


def _is_checkpoint(folder: epath.Path) -> bool:
    return (folder / _MSGPACK_FILE).is_file() or (folder / _ORBAX_FOLDER / '_METADATA').is_file()


def _open_msgpack_checkpoint(folder: epath.Path) -> _SavedParams:
    encoded = (folder / _MSGPACK_FILE).read_bytes()
    if encoded.startswith(b'model_checkpoint_path'):
        raise UserError(f'{folder} is a TensorFlow checkpoint of the original T5; convert it with T5X first')
    contents = serialization.msgpack_restore(encoded)
    if contents.get('version', 0) < _FORMAT_VERSION:
        raise UserError(
            f'{folder} must use version 3 (June 2021) of the T5X format, got version {contents.get("version", 0)}'
        )
    leaves = traverse_util.flatten_dict(contents['optimizer'], is_leaf=lambda _, node: _is_array_spec(node), sep='/')
    parameters = {name.removeprefix('target/'): leaf for name, leaf in leaves.items() if name.startswith('target/')}
    shapes = {
        name: tuple(leaf['metadata']['shape']) if isinstance(leaf, dict) else leaf.shape
        for name, leaf in parameters.items()
    }

    def read_arrays(names: Sequence[str]) -> dict[str, Array]:
        return {name: _read_array(folder, parameters[name]) for name in names}

    return _SavedParams(shapes, read_arrays, int(_read_array(folder, leaves['state/step'])))


def _is_array_spec(node: Any) -> bool:
    """Returns whether a dict is a TensorStore spec, which refers to an array in another file."""
    return isinstance(node, Mapping) and node.keys() >= {'driver', 'kvstore', 'metadata'}


def _read_array(folder: epath.Path, leaf: Any) -> Array:
    if not _is_array_spec(leaf):
        return np.asarray(leaf)
    # Before TensorStore 0.1.14, the path was not in kvstore.
    name = leaf['kvstore'].get('path') or leaf['path']
    array_folder = untrusted_files.resolve_path_inside(folder, name.rstrip('/'), str(folder / _MSGPACK_FILE))
    if leaf['driver'] != 'zarr':
        raise UserError(
            f'the driver of {array_folder.name} in {folder / _MSGPACK_FILE} must be zarr, got {leaf["driver"]!a:.60}'
        )
    array = ts.open({'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': str(array_folder)}}, open=True).result()
    shape = tuple(leaf['metadata']['shape'])
    if array.shape != shape:
        raise UserError(
            f'{array_folder} has shape {array.shape}, but {folder / _MSGPACK_FILE} requires {shape}; '
            'copy the checkpoint again'
        )
    return array.read().result()


def _write_array(folder: epath.Path, name: str, value: Array) -> dict[str, Any]:
    """Writes an array to a zarr folder next to the msgpack file, and returns its TensorStore spec."""
    file = name.replace('/', '.')
    rows = max(1, _CHUNK_BYTES // max(1, value[:1].nbytes)) if value.ndim else 1
    chunks = [min(rows, value.shape[0]), *value.shape[1:]] if value.ndim else []
    metadata = {'shape': list(value.shape), 'chunks': chunks, 'compressor': {'id': 'gzip', 'level': 1}}
    spec = {'driver': 'zarr', 'dtype': value.dtype.name, 'metadata': metadata}
    store = {'driver': 'file', 'path': str(folder / file)}
    ts.open({**spec, 'kvstore': store}, create=True).result().write(value).result()
    return {**spec, 'kvstore': {'driver': 'file', 'path': file}}


def _open_orbax_checkpoint(folder: epath.Path) -> _SavedParams:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata = reader.metadata(folder)
        tree = getattr(metadata, 'item_metadata', metadata).tree
    shapes = {name: tuple(leaf.shape) for name, leaf in _flatten_params(tree['target']).items()}

    def restore_arrays(flat: dict[str, Array]) -> dict[str, Array]:
        item = traverse_util.unflatten_dict(flat, sep='/')
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return _flatten_params(reader.restore(folder, args=args))

    def read_arrays(names: Sequence[str]) -> dict[str, Array]:
        arrays = restore_arrays({f'target/{name}': np.zeros(shapes[name], np.float32) for name in names})
        return {name: arrays[f'target/{name}'] for name in names}

    return _SavedParams(shapes, read_arrays, int(restore_arrays({'state/step': np.zeros((), np.int32)})['state/step']))


def _check_stored_array_size(
    folder: epath.Path, name: str, shape: tuple[int, ...], source: _ParamSource, saved: Shapes
) -> None:
    """Raises UserError if the stored arrays have the wrong size. Must be called before decompressing the arrays."""
    shapes = [saved[part] for part in source.names]
    copies = shapes[0][source.axis] if source.shared and source.axis is not None and shapes[0] else 1
    if sum(map(math.prod, shapes)) != math.prod(shape) * copies or copies > MAX_LAYERS:
        raise _shape_error(folder, name, (len(shapes), *shapes[0]) if source.per_layer else shapes[0], shape)


def _shape_error(folder: epath.Path, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> UserError:
    return UserError(
        f'{folder} does not fit this model: {name} has shape {shape} in the checkpoint and {expected} in the model; '
        'use the same architecture and size'
    )


def _find_param_sources(shapes: Shapes, saved: Shapes) -> dict[str, _ParamSource]:
    """Maps each remixer_t5x parameter to the arrays in a checkpoint of T5X's network.

    `shapes` contains the shapes of the remixer_t5x parameters, and `saved` those of the arrays in the checkpoint.
    Raises UserError if T5X's network has no equivalent of a parameter.
    """
    scanned = any(name.startswith('encoder/encoder/') for name in saved)
    axis = None
    if scanned:
        # Stacked norm scales are [features, layers] by default (axis 1), or [layers, features] (axis 0).
        layers = {name.split('/')[0]: shape[0] for name, shape in shapes.items() if _LAYER_PARAM.fullmatch(name)}
        norms = {name: shape for name, shape in saved.items() if len(shape) == 2 and name.endswith('/scale')}
        axis = int(all(shape[1] == layers.get(name.split('/')[0]) for name, shape in norms.items()))

    def find_param_source(name: str) -> _ParamSource:
        whole = _OUTSIDE_LAYERS.get(name)
        if whole is None:
            stack, rest = _find_t5x_param_name(name, 'use models/t5_1_1.gin or models/t5_1_0.gin')
            if scanned:
                return _ParamSource([f'{stack}/{stack}/{rest}'], axis=axis)
            return _ParamSource([f'{stack}/layers_{index}/{rest}' for index in range(shapes[name][0])], per_layer=True)
        stack, _, rest = whole.partition('/')
        if whole not in saved and f'{stack}/{stack}/{rest}' in saved:
            return _ParamSource([f'{stack}/{stack}/{rest}'], axis=axis, shared=True)
        return _ParamSource([whole])

    return {name: find_param_source(name) for name in shapes}


def _convert_to_t5x_params(flat: Mapping[str, Array]) -> dict[str, Array]:
    """Renames parameters to the names of T5X's network, and splits stacked layers into separate arrays."""
    arrays: dict[str, Array] = {}
    for name, value in flat.items():
        if name in _OUTSIDE_LAYERS:
            arrays[_OUTSIDE_LAYERS[name]] = value
            continue
        stack, rest = _find_t5x_param_name(name, KEEP_NAMES_ADVICE)
        arrays |= {f'{stack}/layers_{index}/{rest}': layer for index, layer in enumerate(value)}
    return arrays


def _find_t5x_param_name(name: str, advice: str) -> tuple[str, str]:
    """Returns a parameter's stack and name in a layer of T5X's network. Raises UserError if there is no equivalent."""
    match = _LAYER_PARAM.fullmatch(name)
    if match is None or match[2] not in _SUBLAYERS[match[1]]:
        raise UserError(f"T5X's network has no parameter that corresponds to {name}; {advice}")
    return match[1], f'{_SUBLAYERS[match[1]][match[2]]}/{match[3]}'
