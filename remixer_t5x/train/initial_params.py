"""Loads the parameters that a run begins with from INITIAL_CHECKPOINT_PATH; others are fresh where the models differ.

Parameters may have other names in the checkpoint (INITIAL_CHECKPOINT_MAP), and its vocabulary may be another one
(INITIAL_VOCABULARY): then each row of an embedding comes from the row of the same piece. Parameters with a row (or
column) for each id have the logical axis `vocab`. Rows of pieces that the other vocabulary lacks stay fresh.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

SETTING = 'INITIAL_CHECKPOINT_MAP'
_LAYERS = re.compile(r'(.*)\[(\d+):(\d+)\]')
# The table shows this many parts of each kind, the largest.
MOST_SHOWN = 12
Shapes = Mapping[str, tuple[int, ...]]
Targets = Mapping[str, jax.ShapeDtypeStruct]


class Source(NamedTuple):
    """The name of an array in a checkpoint, and the layers to take, all if None."""

    name: str
    layers: tuple[int, int] | None = None

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the layers that are taken from an array of this shape."""
        if self.layers is None:
            return shape
        first, last = self.layers
        return (max(0, min(last, shape[0]) - first), *shape[1:])


Sources = dict[str, Source | None]


def load(
    folder: Folder,
    plan: train_state.StatePlan,
    vocabulary: Any,
    create: Callable[[], train_state.TrainState],
    may_be_fresh: Sequence[str] = (),
) -> tuple[Any, str]:
    """Loads the parameters, and returns them with a table of their sources.

    All come from the checkpoint, except for those that FRESH_PARAMETERS and INITIAL_CHECKPOINT_MAP name, adapters that
    the checkpoint lacks, and those that the model allows to be fresh if the checkpoint lacks them or has other shapes
    (a classifier's head). With INITIAL_VOCABULARY, rows of the embedding come from the rows of the same pieces.

    Args:
        folder: the checkpoint and the names of its parameters.
        plan: the state to fill.
        vocabulary: the vocabulary of the run.
        create: returns a random state.
        may_be_fresh: `Model.fresh_parameters`.

    Raises UserError if other parameters differ, or if a setting names none.
    """
    saved = saved_params.open_checkpoint(str(folder.initial_checkpoint_path))
    targets = traverse_util.flatten_dict(plan.abstract.params, sep='/')
    rows = _rows(folder, plan, saved, vocabulary)
    shapes = saved.shapes_for(targets)
    sources = find_sources(targets, folder.checkpoint_map or {}, folder.fresh_parameters)
    _mark_fresh(sources, targets, shapes, may_be_fresh)
    _check(sources, targets, shapes, saved, rows.keys())
    fresh = {name for name in targets if sources[name] is None}
    created: Mapping[str, jax.Array] = {}
    if fresh or rows:
        created = traverse_util.flatten_dict(create().params, sep='/')
    taken = _read(sources, targets, saved, rows, created)
    params = {name: taken[name] if name in taken else created[name] for name in targets}
    description = _describe(folder, sources, targets, shapes, {name: matches for name, (_, matches) in rows.items()})
    return traverse_util.unflatten_dict(params, sep='/'), description


def _rows(
    folder: Folder, plan: train_state.StatePlan, saved: SavedParams, vocabulary: Any
) -> dict[str, tuple[int, Any]]:
    """Returns the axis of ids and `match_pieces` of each parameter with a row for each id; {} with one vocabulary."""
    other = folder.initial_vocabulary
    if other is None:
        saved_params.check_vocabulary(saved, task_vocabulary.record(vocabulary))
        return {}
    saved_params.check_vocabulary(saved, task_vocabulary.record(other), 'with INITIAL_VOCABULARY, the checkpoint')
    matches = match_pieces(vocabulary, other)
    specs = traverse_util.flatten_dict(nn.get_partition_spec(plan.boxed_params), sep='/')
    id_axes = {name: id_axis(tuple(spec)) for name, spec in specs.items()}
    return {name: (axis, matches) for name, axis in id_axes.items() if axis is not None}


def _mark_fresh(sources: Sources, targets: Targets, saved: Mapping[str, Any], heads: Sequence[str]) -> None:
    """Marks parameters as fresh that no setting has to name: adapters, and a head that does not fit."""
    head = [name for name in targets if name.split('/')[0] in heads]
    unfit = any((source := sources[name]) and saved.get(source.name) != targets[name].shape for name in head)
    for name in targets:
        source = sources[name]
        lacks = source is not None and source.name not in saved
        if (unfit and name in head) or (lacks and lora.is_adapter(name)):
            sources[name] = None


def _check(sources: Sources, targets: Targets, saved: Mapping[str, Any], checkpoint: SavedParams, rows: Any) -> None:
    """Raises UserError if an array is missing, has another shape, or is left although no setting names it."""
    expected, available = {}, {}
    for name, source in sources.items():
        if source is None:
            continue
        if source.name != name and source.name not in saved:
            raise UserError(
                f'{SETTING} takes {name} from {source.name}, which {checkpoint.step} lacks; '
                f'its arrays have names like {next(iter(saved))}'
            )
        expected[name] = targets[name].shape
        if source.name in saved:
            shape = source.shape_of(saved[source.name])
            available[name] = (
                targets[name].shape if name in rows and _differ_by_one_axis(shape, expected[name]) else shape
            )
    same_names = all(source == Source(name) or lora.is_adapter(name) for name, source in sources.items())
    left = {name: shape for name, shape in saved.items() if name not in _source_names(sources)}
    saved_params.check_fit(checkpoint.step, {**available, **(left if same_names else {})}, expected)


def _differ_by_one_axis(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and sum(a != b for a, b in zip(shape, other, strict=True)) <= 1


def _source_names(sources: Sources) -> set[str]:
    return {source.name for source in sources.values() if source is not None}


def _read(
    sources: Sources, targets: Targets, saved: SavedParams, rows: Mapping[str, Any], created: Mapping[str, Any]
) -> Any:
    """Reads the arrays that come from the checkpoint, by their names in the model."""
    taken = {name: source for name, source in sources.items() if source is not None}
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for name, source in taken.items():
        leaf, shape = targets[name], saved.shapes[source.name]
        if name in rows:
            shapes[source.name] = _row_shape(leaf, shape, rows[name][0])
        else:
            shapes[source.name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)
    arrays = saved.read(shapes)
    uses = [source.name for source in taken.values()]
    params = {}
    for name, source in taken.items():
        array = arrays[source.name]
        if source.layers is not None:
            params[name] = jax.jit(lambda a, b=source.layers: a[slice(*b)], out_shardings=targets[name].sharding)(array)
        elif name in rows:
            axis, matches = rows[name]
            params[name] = rows_by_piece(created[name], array, matches, axis)
        else:
            # The step donates its state, in which a buffer must not occur twice.
            params[name] = array.copy() if uses.count(source.name) > 1 else array
    return params


def _describe(
    folder: Folder, sources: Sources, targets: Targets, saved: Mapping[str, Any], rows: Mapping[str, Any]
) -> str:
    taken = {name: leaf.shape for name, leaf in targets.items() if sources[name] is not None}
    fresh = {name: leaf.shape for name, leaf in targets.items() if name not in taken}
    left = {name: shape for name, shape in saved.items() if name not in _source_names(sources)}
    lines = [f'parameters of {folder.initial_checkpoint_path}']
    if fresh or left or rows or any(source and source.name != name for name, source in sources.items()):
        lines += _table(taken, fresh, left)
    for name, matches in rows.items():
        known = int((matches >= 0).sum())
        lines.append(f'  {name}: {known:,} of {len(matches):,} pieces have a row there, the others are fresh')
    return '\n'.join(lines)


def find_sources(
    names: Mapping[str, Any], renamed: Mapping[str, str | None], fresh: str | None = None
) -> dict[str, Source | None]:
    """Finds the source of each parameter of the model; None for a fresh one.

    INITIAL_CHECKPOINT_MAP has regular expressions for whole names of the model's parameters. The first that matches
    decides: its value is the name in the checkpoint, which may repeat groups (`\\1`), or None for a fresh parameter.
    `NAME[4:8]` takes these layers of a stacked array, for stacks with other runs. Other parameters keep their names.

    Raises UserError if an expression is not regular, or matches no parameter.
    """
    if fresh is not None and not any(fresh in name for name in names):
        raise UserError(
            f'FRESH_PARAMETERS must be a part of a parameter name, got {fresh!r}; names are like {next(iter(names))}'
        )
    rules = {pattern: _compile_rule(pattern, to) for pattern, to in renamed.items()}
    used: set[str] = set()
    sources: dict[str, Source | None] = {}
    for name in names:
        sources[name] = None if fresh is not None and fresh in name else Source(name)
        matches = ((pattern, rule.fullmatch(name)) for pattern, rule in rules.items() if sources[name] is not None)
        pattern, match = next(((pattern, match) for pattern, match in matches if match), ('', None))
        if match:
            used.add(pattern)
            sources[name] = _parse_source(match, renamed[pattern])
    for pattern in renamed:
        if pattern not in used:
            raise UserError(
                f'{SETTING} has {pattern!r}, which matches no parameter beyond those of the lines before it; it must '
                f'match whole names, such as {next(iter(names))}'
            )
    return sources


def _compile_rule(pattern: Any, to: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str) or not (to is None or isinstance(to, str)):
        raise UserError(
            f'{SETTING} must map regular expressions to names in the checkpoint, or to None for fresh parameters, as '
            f"in {{'.*/hyper_mixer/.*': None}}, got {pattern!r}: {to!r}"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f'{SETTING} has {pattern!r}, which is not a regular expression ({error})') from error


def _parse_source(match: re.Match[str], to: str | None) -> Source | None:
    if to is None:
        return None
    layers = _LAYERS.fullmatch(to)
    try:
        name = match.expand(layers[1] if layers else to)
    except re.error as error:
        raise UserError(f'{SETTING} has {to!r}, which does not fit its expression ({error})') from error
    return Source(name, (int(layers[2]), int(layers[3])) if layers else None)


def match_pieces(vocabulary: Any, other: Any) -> np.ndarray:
    """Returns the id of the same piece in `other` for each id of `vocabulary`, [ids] int32, -1 without one."""
    ids = {piece: index for index, piece in enumerate(task_vocabulary.list_pieces(other)) if piece}
    return np.asarray([ids.get(piece, -1) for piece in task_vocabulary.list_pieces(vocabulary)], np.int32)


def id_axis(names: tuple[str | None, ...]) -> int | None:
    """Returns the axis of a parameter with these logical axes that has one row for each id, if any."""
    return names.index(axes.VOCAB) if axes.VOCAB in names else None


def _row_shape(target: jax.ShapeDtypeStruct, shape: tuple[int, ...], axis: int) -> jax.ShapeDtypeStruct:
    """Returns how to read an array of the other model: unsharded along its ids, whose number may not divide."""
    spec = [*target.sharding.spec, *[None] * (len(shape) - len(target.sharding.spec))]
    spec[axis] = None
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=NamedSharding(target.sharding.mesh, PartitionSpec(*spec)))


def rows_by_piece(fresh: jax.Array, other: jax.Array, matches: np.ndarray, axis: int) -> jax.Array:
    """Replaces rows of `fresh` along `axis` by the rows of `other` at `matches`; others stay fresh."""
    index = np.full(fresh.shape[axis], -1, np.int32)
    index[: len(matches)] = np.where(matches < other.shape[axis], matches, -1)[: len(index)]
    is_known = (index >= 0).reshape([-1 if place == axis else 1 for place in range(fresh.ndim)])

    def choose(fresh, other):
        return jnp.where(is_known, jnp.take(other, np.maximum(index, 0), axis=axis), fresh)

    return jax.jit(choose, out_shardings=fresh.sharding)(fresh, other)


def _table(taken: Shapes, fresh: Shapes, left: Shapes) -> Iterator[str]:
    """Yields a line for each part of the model: taken, fresh or left, its name, arrays and parameters.

    A part is the shortest prefix of names that arrays of one kind share with no array of another kind.
    """
    kinds = {'taken': taken, 'fresh': fresh, 'left': left}
    everything = {name for shapes in kinds.values() for name in shapes}
    for kind, shapes in kinds.items():
        # `left` has names of the checkpoint, the others names of the model.
        sizes_of: dict[str, list[int]] = {}
        for name, prefix in shortest_prefixes(shapes.keys(), everything - shapes.keys()).items():
            sizes_of.setdefault(prefix, []).append(math.prod(shapes[name]))
        ordered = sorted(sizes_of.items(), key=lambda item: -sum(item[1]))
        for prefix, sizes in ordered[:MOST_SHOWN]:
            yield _table_row(kind, prefix, len(sizes), sum(sizes))
        if rest := ordered[MOST_SHOWN:]:
            arrays = sum(len(sizes) for _, sizes in rest)
            yield _table_row(kind, f'{len(rest)} more parts', arrays, sum(sum(sizes) for _, sizes in rest))


def shortest_prefixes(names: Collection[str], others: Collection[str]) -> dict[str, str]:
    """Finds for each of `names` the shortest prefix, such as `encoder/run_0`, that none of `others` has."""
    known = {'/'.join(parts[:depth]) for parts in (name.split('/') for name in others) for depth in range(len(parts))}
    prefixes = {}
    for name in names:
        parts = name.split('/')
        candidates = ('/'.join(parts[:depth]) for depth in range(1, len(parts) + 1))
        prefixes[name] = next((prefix for prefix in candidates if prefix not in known), name)
    return prefixes


def _table_row(kind: str, prefix: str, arrays: int, size: int) -> str:
    return f'  {kind:<5}  {prefix:<44}  {arrays:>4} {"array " if arrays == 1 else "arrays"}  {size:>14,} parameters'
