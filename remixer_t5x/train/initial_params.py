"""Loads the initial parameters of a run from INITIAL_CHECKPOINT_PATH, which may be the checkpoint of a different model.

INITIAL_CHECKPOINT_MAP maps parameters to different names in the checkpoint. If the checkpoint has a different
vocabulary (INITIAL_VOCABULARY), each row of a parameter with the logical axis `vocab` is copied from the checkpoint's
row for the same vocabulary piece. Rows for pieces that the checkpoint's vocabulary lacks are initialized randomly.
"""

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from remixer_t5x import axes
from remixer_t5x.checkpoints import saved_params
from remixer_t5x.checkpoints.saved_params import SavedParams
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.models import lora
from remixer_t5x.optim import train_state
from remixer_t5x.train.settings import Folder

MAP_SETTING = 'INITIAL_CHECKPOINT_MAP'
_LAYER_RANGE_PATTERN = re.compile(r'(.*)\[(\d+):(\d+)\]')
Targets = Mapping[str, jax.ShapeDtypeStruct]


class ParamSource(NamedTuple):
    """The source of a parameter: the name of an array in the checkpoint, and the layers to read (None reads all)."""

    name: str
    layers: tuple[int, int] | None = None

    def slice_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of `array[layers]` for an array of shape `shape`."""
        if self.layers is None:
            return shape
        first, last = self.layers
        return (max(0, min(last, shape[0]) - first), *shape[1:])


Sources = dict[str, ParamSource | None]


def load_initial_params(
    folder: Folder,
    plan: train_state.TrainStatePlan,
    vocabulary: Any,
    create: Callable[[], train_state.TrainState],
    may_be_fresh: Sequence[str] = (),
) -> tuple[Any, str]:
    """Loads the initial parameters. Returns the parameters and a description of their sources.

    All parameters are loaded from the checkpoint, except for parameters excluded by FRESH_PARAMETERS or
    INITIAL_CHECKPOINT_MAP, adapters that are not in the checkpoint, and a head (`may_be_fresh`) that is missing or has
    different shapes in the checkpoint.

    `create` returns a randomly initialized train state. `may_be_fresh` contains the names of the head's modules
    (`Model.fresh_parameters`). Raises UserError if the checkpoint lacks a parameter or has a different shape for it, or
    if a setting matches no parameter.
    """
    saved = saved_params.open_checkpoint(str(folder.initial_checkpoint_path))
    targets = traverse_util.flatten_dict(plan.abstract.params, sep='/')
    rows = _match_vocabulary_rows(folder, plan, saved, vocabulary)
    shapes = saved.select_shapes(targets)
    sources = find_param_sources(targets, folder.checkpoint_map or {}, folder.fresh_parameters)
    _mark_fresh_params(sources, targets, shapes, may_be_fresh)
    _check_param_sources(sources, targets, shapes, saved, rows)
    fresh = {name for name in targets if sources[name] is None}
    created: Mapping[str, jax.Array] = {}
    if fresh or rows:
        created = traverse_util.flatten_dict(create().params, sep='/')
    loaded = _read_param_sources(sources, targets, saved, rows, created)
    params = {name: loaded[name] if name in loaded else created[name] for name in targets}
    return traverse_util.unflatten_dict(params, sep='/'), _describe_param_sources(folder, sources, shapes, rows)


def _match_vocabulary_rows(
    folder: Folder, plan: train_state.TrainStatePlan, saved: SavedParams, vocabulary: Any
) -> dict[str, tuple[int, Any]]:
    """Maps each parameter with a vocabulary axis to the index of this axis and the checkpoint's token id for each row.

    Returns {} without INITIAL_VOCABULARY, after checking that the checkpoint has the same vocabulary as the run.
    """
    other = folder.initial_vocabulary
    if other is None:
        saved_params.check_same_vocabulary(saved, task_vocabulary.get_vocabulary_record(vocabulary))
        return {}
    saved_params.check_same_vocabulary(
        saved, task_vocabulary.get_vocabulary_record(other), 'with INITIAL_VOCABULARY, the checkpoint'
    )
    ids = {piece: index for index, piece in enumerate(task_vocabulary.list_pieces(other)) if piece}
    matches: np.ndarray = np.asarray(
        [ids.get(piece, -1) for piece in task_vocabulary.list_pieces(vocabulary)], np.int32
    )
    specs = traverse_util.flatten_dict(nn.get_partition_spec(plan.boxed_params), sep='/')
    return {name: (tuple(spec).index(axes.VOCAB), matches) for name, spec in specs.items() if axes.VOCAB in tuple(spec)}


def _mark_fresh_params(sources: Sources, targets: Targets, saved: Mapping[str, Any], heads: Sequence[str]) -> None:
    """Marks missing adapters, and a head that has different shapes in the checkpoint, for random initialization."""
    head = [name for name in targets if name.split('/')[0] in heads]
    head_differs = any((source := sources[name]) and saved.get(source.name) != targets[name].shape for name in head)
    for name in targets:
        source = sources[name]
        is_missing = source is not None and source.name not in saved
        if (head_differs and name in head) or (is_missing and lora.is_adapter(name)):
            sources[name] = None


def _check_param_sources(
    sources: Sources, targets: Targets, saved: Mapping[str, Any], checkpoint: SavedParams, rows: Mapping[str, Any]
) -> None:
    """Raises UserError if the checkpoint lacks an array, has a different shape for it, or has an unexpected array."""
    expected, available = {}, {}
    for name, source in sources.items():
        if source is None:
            continue
        if source.name != name and source.name not in saved:
            raise UserError(
                f'{MAP_SETTING} maps {name} to {source.name}, which is not in {checkpoint.step}; '
                f'its arrays have names like {next(iter(saved))}'
            )
        expected[name] = targets[name].shape
        if source.name in saved:
            shape = source.slice_shape(saved[source.name])
            if name in rows and len(shape) == len(expected[name]):
                # Ignore the size of the vocabulary axis, which may differ.
                axis = rows[name][0]
                shape = (*shape[:axis], expected[name][axis], *shape[axis + 1 :])
            available[name] = shape
    same_names = all(source == ParamSource(name) or lora.is_adapter(name) for name, source in sources.items())
    unused = {name: shape for name, shape in saved.items() if name not in _get_source_names(sources)}
    saved_params.check_shapes_fit_model(checkpoint.step, {**available, **(unused if same_names else {})}, expected)


def _get_source_names(sources: Sources) -> set[str]:
    return {source.name for source in sources.values() if source is not None}


def _read_param_sources(
    sources: Sources, targets: Targets, saved: SavedParams, rows: Mapping[str, Any], created: Mapping[str, Any]
) -> Any:
    """Reads arrays from the checkpoint, and returns them by the names of the model's parameters."""
    loaded = {name: source for name, source in sources.items() if source is not None}
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for name, source in loaded.items():
        leaf, shape = targets[name], saved.shapes[source.name]
        if name in rows:
            # Do not shard the vocabulary axis if the vocabularies differ, because its size in the checkpoint may not be
            # divisible by the number of shards.
            spec = [*leaf.sharding.spec, *[None] * (len(shape) - len(leaf.sharding.spec))]
            spec[rows[name][0]] = None
            sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
            shapes[source.name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
        else:
            shapes[source.name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)
    arrays = saved.read(shapes)
    uses = [source.name for source in loaded.values()]
    params = {}
    for name, source in loaded.items():
        array = arrays[source.name]
        if source.layers is not None:
            params[name] = jax.jit(lambda a, b=source.layers: a[slice(*b)], out_shardings=targets[name].sharding)(array)
        elif name in rows:
            axis, matches = rows[name]
            params[name] = _copy_matched_rows(created[name], array, matches, axis)
        else:
            # Copy arrays that several parameters use, because a donated train state must not contain a buffer twice.
            params[name] = array.copy() if uses.count(source.name) > 1 else array
    return params


def _describe_param_sources(folder: Folder, sources: Sources, saved: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    """Counts the loaded arrays, and lists the modules of fresh arrays and of arrays that only the checkpoint has."""
    fresh = [name for name, source in sources.items() if source is None]
    unused = [name for name in saved if name not in _get_source_names(sources)]
    lines = [f'parameters of {folder.initial_checkpoint_path}: {len(sources) - len(fresh)} arrays are loaded']
    for status, names in (('fresh', fresh), ('unused', unused)):
        modules = collections.Counter('/'.join(name.split('/')[:4]) for name in names)
        lines += [f'  {status:<6}  {module} ({count} arrays)' for module, count in modules.items()]
    for name, (_, matches) in rows.items():
        known = int((matches >= 0).sum())
        lines.append(f'  {name}: {known:,} of {len(matches):,} pieces are in the checkpoint; the others are fresh')
    return '\n'.join(lines)


def find_param_sources(
    names: Mapping[str, Any], renamed: Mapping[str, str | None], fresh: str | None = None
) -> dict[str, ParamSource | None]:
    """Maps each parameter name to the parameter's source, or to None if the parameter is initialized randomly.

    `renamed` (INITIAL_CHECKPOINT_MAP) maps regular expressions for full parameter names to names in the checkpoint, or
    to None for random initialization. The first matching expression applies. A name in the checkpoint may refer to
    groups of the expression (`\\1`), and `NAME[4:8]` selects layers of a stacked array. A parameter that matches no
    expression has the same name in the checkpoint.

    Raises UserError if an expression is invalid or matches no parameter.
    """
    if fresh is not None and not any(fresh in name for name in names):
        raise UserError(
            f'FRESH_PARAMETERS must be a substring of a parameter name, got {fresh!r}; a parameter name is, for '
            f'example, {next(iter(names))}'
        )
    for pattern in renamed:
        lora.check_regex(MAP_SETTING, pattern, "{'.*/hyper_mixer/.*': None}")
    used: set[str] = set()
    sources: dict[str, ParamSource | None] = {}
    for name in names:
        sources[name] = None if fresh is not None and fresh in name else ParamSource(name)
        for pattern, to in renamed.items():
            match = re.fullmatch(pattern, name)
            if match and sources[name] is not None:
                used.add(pattern)
                sources[name] = None if to is None else _parse_param_source(match, to)
                break
    for pattern in renamed:
        if pattern not in used:
            raise UserError(
                f'each entry of {MAP_SETTING} must match a parameter that no earlier entry matches, got {pattern!r}; '
                f'match full names, such as {next(iter(names))}'
            )
    return sources


def _parse_param_source(match: re.Match[str], to: str) -> ParamSource:
    layers = _LAYER_RANGE_PATTERN.fullmatch(to)
    try:
        name = match.expand(layers[1] if layers else to)
    except re.error as error:
        raise UserError(f'{MAP_SETTING} must have valid replacements as values, got {to!r} ({error})') from error
    return ParamSource(name, (int(layers[2]), int(layers[3])) if layers else None)


def _copy_matched_rows(fresh: jax.Array, other: jax.Array, matches: np.ndarray, axis: int) -> jax.Array:
    """Replaces row i of `fresh` along `axis` with row `matches[i]` of `other`, unless `matches[i]` is -1."""
    index = np.full(fresh.shape[axis], -1, np.int32)
    index[: len(matches)] = np.where(matches < other.shape[axis], matches, -1)[: len(index)]
    is_known = (index >= 0).reshape([-1 if dimension == axis else 1 for dimension in range(fresh.ndim)])

    def replace_matched_rows(fresh, other):
        return jnp.where(is_known, jnp.take(other, np.maximum(index, 0), axis=axis), fresh)

    return jax.jit(replace_matched_rows, out_shardings=fresh.sharding)(fresh, other)
