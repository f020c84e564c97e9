"""The parameters that a run begins with: those of INITIAL_CHECKPOINT_PATH, and fresh ones where the models differ."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util

from remixer_t5x.checkpoints import manager, saved_params
from remixer_t5x.checkpoints.saved_params import Saved
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.models import lora
from remixer_t5x.optim import train_state
from remixer_t5x.train.initial import piece_rows, renaming, taken_table
from remixer_t5x.train.settings import Folder

Wanted = Mapping[str, jax.ShapeDtypeStruct]
Sources = dict[str, renaming.Source | None]


def load(
    folder: Folder,
    plan: train_state.StatePlan,
    vocabulary: Any,
    create: Callable[[], train_state.TrainState],
    may_be_fresh: Sequence[str] = (),
) -> tuple[Any, str]:
    """The parameters, and a table of what they are.

    All come from the checkpoint, except for those that FRESH_PARAMETERS and INITIAL_CHECKPOINT_MAP name, adapters that
    the checkpoint lacks, and those that the model lets begin fresh if the checkpoint lacks them or has other shapes (a
    classifier's head). With INITIAL_VOCABULARY rows of the embedding come from the rows of the same pieces.

    Args:
        folder: the checkpoint and how its parameters are called.
        plan: the state to fill.
        vocabulary: the run's.
        create: makes a random state.
        may_be_fresh: `Model.fresh_parameters`.

    Raises UserError if other parameters differ, or if a setting names none.
    """
    saved = saved_params.opened(str(folder.initial_checkpoint_path))
    wanted = traverse_util.flatten_dict(plan.abstract.params, sep='/')
    rows = _rows(folder, plan, saved, vocabulary)
    shapes = saved.shapes_for(wanted)
    sources = renaming.sources(wanted, folder.checkpoint_map or {}, folder.fresh_parameters)
    _begin_fresh(sources, wanted, shapes, may_be_fresh)
    _check(sources, wanted, shapes, saved, rows.keys())
    fresh = {name for name in wanted if sources[name] is None}
    created: Mapping[str, jax.Array] = {}
    if fresh or rows:
        created = traverse_util.flatten_dict(create().params, sep='/')
    taken = _read(sources, wanted, saved, rows, created)
    params = {name: taken[name] if name in taken else created[name] for name in wanted}
    words = _words(folder, sources, wanted, shapes, {name: found for name, (_, found) in rows.items()})
    return traverse_util.unflatten_dict(params, sep='/'), words


def _rows(folder: Folder, plan: train_state.StatePlan, saved: Saved, vocabulary: Any) -> dict[str, tuple[int, Any]]:
    """For each parameter with a row for each id: its axis of ids and `piece_rows.matches`. None with one vocabulary."""
    other = folder.initial_vocabulary
    if other is None:
        saved_params.check_vocabulary(saved, task_vocabulary.record(vocabulary))
        return {}
    saved_params.check_vocabulary(saved, task_vocabulary.record(other), 'with INITIAL_VOCABULARY, the checkpoint')
    found = piece_rows.matches(vocabulary, other)
    specs = traverse_util.flatten_dict(nn.get_partition_spec(plan.boxed_params), sep='/')
    axes = {name: piece_rows.axis_of(tuple(spec)) for name, spec in specs.items()}
    return {name: (axis, found) for name, axis in axes.items() if axis is not None}


def _begin_fresh(sources: Sources, wanted: Wanted, saved: Mapping[str, Any], heads: Sequence[str]) -> None:
    """Marks as fresh what may be fresh without being named: adapters, and a head that does not fit."""
    own = [name for name in wanted if name.split('/')[0] in heads]
    unfit = any((source := sources[name]) and saved.get(source.name) != wanted[name].shape for name in own)
    for name in wanted:
        source = sources[name]
        lacks = source is not None and source.name not in saved
        if (unfit and name in own) or (lacks and lora.is_adapter(name)):
            sources[name] = None


def _check(sources: Sources, wanted: Wanted, saved: Mapping[str, Any], checkpoint: Saved, rows: Any) -> None:
    """Raises UserError if an array lacks or has another shape, or is left although nothing was said of it."""
    given, there = {}, {}
    for name, source in sources.items():
        if source is None:
            continue
        if source.name != name and source.name not in saved:
            raise UserError(
                f'{renaming.SETTING} takes {name} from {source.name}, which {checkpoint.step} lacks; '
                f'its arrays are like {next(iter(saved))}'
            )
        given[name] = wanted[name].shape
        if source.name in saved:
            shape = source.taken(saved[source.name])
            there[name] = wanted[name].shape if name in rows and _alike(shape, given[name]) else shape
    says_nothing = all(source == renaming.Source(name) or lora.is_adapter(name) for name, source in sources.items())
    left = {name: shape for name, shape in saved.items() if name not in _names(sources)}
    manager.check_fit(checkpoint.step, {**there, **(left if says_nothing else {})}, given)


def _alike(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and sum(a != b for a, b in zip(shape, other, strict=True)) <= 1


def _names(sources: Sources) -> set[str]:
    return {source.name for source in sources.values() if source is not None}


def _read(sources: Sources, wanted: Wanted, saved: Saved, rows: Mapping[str, Any], created: Mapping[str, Any]) -> Any:
    """The arrays that come from the checkpoint, by their names in the model."""
    taken = {name: source for name, source in sources.items() if source is not None}
    reading: dict[str, jax.ShapeDtypeStruct] = {}
    for name, source in taken.items():
        leaf, shape = wanted[name], saved.shapes[source.name]
        if name in rows:
            reading[source.name] = piece_rows.to_read(leaf, shape, rows[name][0])
        else:
            reading[source.name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)
    arrays = saved.read(reading)
    uses = [source.name for source in taken.values()]
    found = {}
    for name, source in taken.items():
        array = arrays[source.name]
        if source.layers is not None:
            found[name] = jax.jit(lambda a, b=source.layers: a[slice(*b)], out_shardings=wanted[name].sharding)(array)
        elif name in rows:
            axis, matches = rows[name]
            found[name] = piece_rows.rows_by_piece(created[name], array, matches, axis)
        else:
            # The step donates its state, in which no buffer may be twice.
            found[name] = array.copy() if uses.count(source.name) > 1 else array
    return found


def _words(folder: Folder, sources: Sources, wanted: Wanted, saved: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    taken = {name: leaf.shape for name, leaf in wanted.items() if sources[name] is not None}
    fresh = {name: leaf.shape for name, leaf in wanted.items() if name not in taken}
    left = {name: shape for name, shape in saved.items() if name not in _names(sources)}
    said = [f'parameters of {folder.initial_checkpoint_path}']
    if fresh or left or rows or any(source and source.name != name for name, source in sources.items()):
        said += taken_table.lines(taken, fresh, left)
    for name, found in rows.items():
        known = int((found >= 0).sum())
        said.append(f'  {name}: {known:,} of {len(found):,} pieces have a row there, the others are fresh')
    return '\n'.join(said)
