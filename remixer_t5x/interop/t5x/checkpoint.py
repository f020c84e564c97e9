"""Checkpoints of T5X, read and written without T5X.

`checkpoint_<step>` is one of two things. T5X's own format is a msgpack file `checkpoint` of {'version', 'optimizer'}
whose arrays are TensorStore specs that point to zarr folders next to it. Published checkpoints have this format and
every T5X reads it, so `write` writes it. Newer T5X saves with Orbax, into `state`. Both have the parameters in
`target`, with the names of the trained module: our names, under configs/t5x, or the names of T5X's network (`names`).
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

from remixer_t5x import safe_paths, temporary
from remixer_t5x.checkpoints import saved_params
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.family import MAX_LAYERS
from remixer_t5x.interop.t5x import names as t5x_names
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.run_folder import model_dir

Params = Any
Array = np.ndarray

_FILE = 'checkpoint'
_STATE = 'state'
_VERSION = 3
_CHUNK_BYTES = 2**26
_STEP_FOLDER = re.compile(r'checkpoint_(\d+)')


class _Saved(NamedTuple):
    """The parameters in a checkpoint: their shapes by name, how to read some of them, and the step."""

    shapes: t5x_names.Shapes
    read: Callable[[Sequence[str]], dict[str, Array]]
    step: int


def read(path: str, abstract: Params) -> tuple[Params, int]:
    """The parameters of a T5X checkpoint with our names and shapes, and its step.

    Args:
        path: a folder `checkpoint_<step>`, or T5X's MODEL_DIR, whose newest checkpoint is read.
        abstract: tree of ShapeDtypeStruct of the model's parameters; layers are stacked.

    Returns:
        A tree like `abstract`, numpy float32, and the step.

    Raises:
        UserError: there is no checkpoint, it cannot be read, or it has another architecture or size.
    """
    folder = _find(path)
    safe_paths.check_inside(folder)
    expected = {name: tuple(leaf.shape) for name, leaf in _flatten(abstract).items()}
    with saved_params.user_errors(folder, 'read'):
        saved = _open_orbax(folder / _STATE) if (folder / _STATE).is_dir() else _open_msgpack(folder)
        is_ours = any('/run_0/' in name for name in saved.shapes)
        sources = t5x_names.own_sources(expected) if is_ours else t5x_names.network_sources(expected, saved.shapes)
        _check_names(folder, sources, saved.shapes)
        arrays = {}
        for name, source in sources.items():
            _check_size(folder, name, expected[name], source, saved.shapes)
            arrays[name] = source.gather(saved.read(source.names), expected[name])
            if arrays[name].shape != expected[name]:
                raise _shape_error(folder, name, arrays[name].shape, expected[name])
    return traverse_util.unflatten_dict(arrays, sep='/'), saved.step


def write(path: str, params: Params, step: int, model: Seq2Seq, own_names: bool = False) -> str:
    """Writes `params` as `checkpoint_<step>` into the folder `path`, in T5X's own format, without optimizer state.

    Args:
        path: T5X's MODEL_DIR; created if it does not exist.
        params: numpy float32, our names, layers stacked.
        step: number of updates done.
        model: the model of these parameters.
        own_names: True keeps our names, for any model under configs/t5x; False uses the names of T5X's network.

    Returns:
        The folder that was written.

    Raises:
        UserError: the folder exists or cannot be written, or T5X's network cannot express the model.
    """
    flat = {name: np.asarray(leaf) for name, leaf in _flatten(params).items()}
    arrays = flat if own_names else t5x_names.to_network(flat, model)
    folder = model_dir.absolute(path) / f'checkpoint_{step}'
    if folder.exists():
        raise UserError(f'{folder} exists already; give another folder, or remove it')
    unfinished = folder.parent / f'{folder.name}.tmp'
    with saved_params.user_errors(folder, 'written'):
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        target = traverse_util.unflatten_dict(
            {name: _write_array(unfinished, f'target/{name}', value) for name, value in arrays.items()}, sep='/'
        )
        state = {'step': np.asarray(step, np.int32)}
        contents = {'version': _VERSION, 'optimizer': {'target': target, 'state': state}}
        (unfinished / _FILE).write_bytes(serialization.msgpack_serialize(contents))
        temporary.commit(unfinished, folder)
    return str(folder)


def _flatten(tree: Params) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep='/')


def _find(path: str) -> epath.Path:
    """The folder of one checkpoint; the newest if `path` contains several."""
    if '://' in path:
        raise UserError(
            f'{path} is not a folder of this machine; copy it here first (gcloud storage cp -r), and give that'
        )
    folder = model_dir.absolute(path)
    if _is_checkpoint(folder):
        return folder
    children = folder.iterdir() if folder.is_dir() else ()
    steps = {int(name[1]): child for child in children if (name := _STEP_FOLDER.fullmatch(child.name))}
    complete = [step for step in sorted(steps) if _is_checkpoint(steps[step])]
    if complete:
        return steps[complete[-1]]
    raise UserError(
        f'{folder} does not contain a T5X checkpoint; give a folder checkpoint_<step>, or the MODEL_DIR of a T5X run'
    )


def _is_checkpoint(folder: epath.Path) -> bool:
    return (folder / _FILE).is_file() or (folder / _STATE / '_METADATA').is_file()


def _open_msgpack(folder: epath.Path) -> _Saved:
    encoded = (folder / _FILE).read_bytes()
    if encoded.startswith(b'model_checkpoint_path'):
        raise UserError(f'{folder} is a TensorFlow checkpoint of the first T5; convert it with T5X first')
    contents = serialization.msgpack_restore(encoded)
    if contents.get('version', 0) < _VERSION:
        raise UserError(
            f'{folder} has version {contents.get("version", 0)} of the format; version 3 (June 2021) is needed'
        )
    leaves = traverse_util.flatten_dict(contents['optimizer'], is_leaf=lambda _, node: _is_spec(node), sep='/')
    parameters = {name.removeprefix('target/'): leaf for name, leaf in leaves.items() if name.startswith('target/')}

    shapes = {
        name: tuple(leaf['metadata']['shape']) if isinstance(leaf, dict) else leaf.shape
        for name, leaf in parameters.items()
    }

    def read_arrays(names: Sequence[str]) -> dict[str, Array]:
        return {name: _read_leaf(folder, parameters[name]) for name in names}

    return _Saved(shapes, read_arrays, int(_read_leaf(folder, leaves['state/step'])))


def _is_spec(node: Any) -> bool:
    """Whether a dict is the spec of an array in another file."""
    return isinstance(node, Mapping) and node.keys() >= {'driver', 'kvstore', 'metadata'}


def _read_leaf(folder: epath.Path, leaf: Any) -> Array:
    if not _is_spec(leaf):
        return np.asarray(leaf)
    # The checkpoint was written to a bucket or a local disk. Before TensorStore 0.1.14 the path was outside of kvstore.
    name = leaf['kvstore'].get('path') or leaf['path']
    place = safe_paths.inside(folder, name.rstrip('/'), str(folder / _FILE))
    if leaf['driver'] != 'zarr':
        raise UserError(f'{folder / _FILE} says that {place.name} is {leaf["driver"]!a:.60}; allowed is zarr')
    array = ts.open({'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': str(place)}}, open=True).result()
    shape = tuple(leaf['metadata']['shape'])
    if array.shape != shape:
        raise UserError(f'{place} has shape {array.shape}, and {shape} by {folder / _FILE}; copy the checkpoint again')
    return array.read().result()


def _write_array(folder: epath.Path, name: str, value: Array) -> dict[str, Any]:
    """Writes one array next to the msgpack file and returns the spec that the file has in its place."""
    file = name.replace('/', '.')
    rows = max(1, _CHUNK_BYTES // max(1, value[:1].nbytes)) if value.ndim else 1
    chunks = [min(rows, value.shape[0]), *value.shape[1:]] if value.ndim else []
    metadata = {'shape': list(value.shape), 'chunks': chunks, 'compressor': {'id': 'gzip', 'level': 1}}
    spec = {'driver': 'zarr', 'dtype': value.dtype.name, 'metadata': metadata}
    store = {'driver': 'file', 'path': str(folder / file)}
    ts.open({**spec, 'kvstore': store}, create=True).result().write(value).result()
    return {**spec, 'kvstore': {'driver': 'file', 'path': file}}


def _open_orbax(folder: epath.Path) -> _Saved:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata = reader.metadata(folder)
        tree = getattr(metadata, 'item_metadata', metadata).tree
    shapes = {name: tuple(leaf.shape) for name, leaf in _flatten(tree['target']).items()}

    def restore(flat: dict[str, Array]) -> dict[str, Array]:
        item = traverse_util.unflatten_dict(flat, sep='/')
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return _flatten(reader.restore(folder, args=args))

    def read_arrays(names: Sequence[str]) -> dict[str, Array]:
        arrays = restore({f'target/{name}': np.zeros(shapes[name], np.float32) for name in names})
        return {name: arrays[f'target/{name}'] for name in names}

    return _Saved(shapes, read_arrays, int(restore({'state/step': np.zeros((), np.int32)})['state/step']))


def _check_names(folder: epath.Path, sources: Mapping[str, t5x_names.Source], saved: t5x_names.Shapes) -> None:
    """Raises UserError unless the checkpoint has exactly the parameters of the model."""
    needed = {name for source in sources.values() for name in source.names}
    missing, extra = sorted(needed - saved.keys()), sorted(saved.keys() - needed)
    if missing or extra:
        parts = [f'it has no {missing[0]} ({len(missing)} such)'] if missing else []
        parts += [f'the model has no {extra[0]} ({len(extra)} such)'] if extra else []
        raise UserError(
            f'{folder} does not fit this model: {", ".join(parts)}; give the model and size that was trained'
        )


def _check_size(
    folder: epath.Path, name: str, shape: tuple[int, ...], source: t5x_names.Source, saved: t5x_names.Shapes
) -> None:
    """Runs before an array is read, because a few bytes can describe an array of zeros of any size."""
    shapes = [saved[part] for part in source.names]
    copies = shapes[0][source.axis] if source.shared and source.axis is not None and shapes[0] else 1
    if sum(map(math.prod, shapes)) != math.prod(shape) * copies or copies > MAX_LAYERS:
        raise _shape_error(folder, name, (len(shapes), *shapes[0]) if source.apart else shapes[0], shape)


def _shape_error(folder: epath.Path, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> UserError:
    return UserError(
        f'{folder} does not fit this model: {name} has shape {shape} there and {expected} here; '
        'give the model and size that was trained'
    )
