"""Finds a checkpoint of another run and reads its parameters, into a model that may be on another mesh."""

import difflib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from remixer_t5x.checkpoints import durable, manager, saved_arrays
from remixer_t5x.devices import collectives
from remixer_t5x.devices.partition import Partitioner, unbox
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from remixer_t5x.run_folder import model_dir, object_store


def abstract_params(model: Any, batch_shapes: Any, partitioner: Partitioner) -> Any:
    """Shapes and shardings of the float32 parameters, for `restore_params`. Does not compute any array."""
    boxed = interface.param_shapes(model, batch_shapes)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding),
        unbox(boxed),
        partitioner.param_shardings(boxed),
    )


def find_step(path: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> epath.Path:
    """The folder of one checkpoint, from a MODEL_DIR or its `checkpoints` (then the newest step), or from one step's
    folder. Errors call the path `setting`.
    """
    given = model_dir.absolute(path)
    with object_store.reading(given):
        for folder in (given, given / model_dir.CHECKPOINTS):
            if is_complete(folder):
                return folder
            steps = steps_in(folder)
            if steps:
                return folder / str(steps[-1])
    raise UserError(f'{setting} {given} does not contain a checkpoint; {_nearest_checkpoint(given)}')


def steps_in(folder: epath.Path) -> list[int]:
    """Steps of the complete checkpoints directly in `folder`, oldest first."""
    with object_store.reading(folder):
        if not folder.is_dir():
            return []
        names = [child.name for child in folder.iterdir() if durable.is_step(child.name) and is_complete(child)]
    return sorted(map(int, names))


def is_complete(step: epath.Path) -> bool:
    """Whether the folder `step` is a checkpoint. Orbax is asked, because a folder in a bucket has its name before it is
    complete.
    """
    return (step / 'state').exists() and ocp.utils.is_checkpoint_finalized(step)


def _nearest_checkpoint(given: epath.Path) -> str:
    """What to type instead of `given`: a checkpoint with a similar name, or one in the folder above."""
    neighbours = steps_in(given.parent)
    if neighbours and durable.is_step(given.name):
        nearest = min(neighbours, key=lambda step: abs(step - int(given.name)))
        return f'the nearest that exists is {given.parent / str(nearest)}'
    others = [child for child in given.parent.iterdir() if child.is_dir()] if given.parent.is_dir() else []
    holding = {child.name: child for child in others if steps_in(child) or steps_in(child / model_dir.CHECKPOINTS)}
    close = difflib.get_close_matches(given.name, holding, n=1, cutoff=0.0)
    if close:
        return f'the nearest that does is {holding[close[0]]}'
    above = given.parent
    if above != given and (neighbours or steps_in(above / model_dir.CHECKPOINTS)):
        return f'the nearest that does is {above}'
    return 'give the MODEL_DIR of a run that saved one, or one of the folders in its `checkpoints`'


def opened(path: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> saved_arrays.Saved:
    """The parameters of another run's checkpoint by name; `path` as in `find_step`. Reads no array.

    Raises UserError if `path` has no checkpoint, if it is damaged, or if the base of its adapters is not where it was.
    """
    step = find_step(path, setting)
    manager.verify(step)
    if collectives.several():
        listed = (step / durable.LIST).exists()
        collectives.check_same({f'the checkpoint {step}': saved_arrays.fingerprint(step) if listed else 'unlisted'})
    record = saved_arrays.read_record(step)
    if saved_arrays.BASE not in record:
        return saved_arrays.Saved(step, record)
    place = saved_arrays.base_path(step)
    base = find_step(str(place), f'the base of the adapters in {step.parent.parent}, by its {saved_arrays.BASE_FILE},')
    if saved_arrays.fingerprint(base) != record[saved_arrays.BASE]:
        raise UserError(
            f'{base} is not the checkpoint that {step} adds to; write the path of that one into '
            f'{step.parent.parent / saved_arrays.BASE_FILE}'
        )
    manager.verify(base)
    # One level: `convert --to_adapters` compares whole parameters.
    return saved_arrays.Saved(step, record, saved_arrays.Saved(base, saved_arrays.read_record(base)))


def read_record(step: epath.Path) -> dict[str, Any]:
    """The record of the run in the checkpoint at `step`; does not read arrays."""
    return saved_arrays.read_record(step)


def check_vocabulary(saved: saved_arrays.Saved, vocabulary: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> None:
    """Raises UserError if the checkpoint was trained with another vocabulary than that with the record `vocabulary`."""
    if saved.record.get('vocabulary') != vocabulary:
        raise UserError(
            f'{setting} {saved.step} was trained with vocabulary {saved.record.get("vocabulary")} and this '
            f'run has {vocabulary}; give the vocabulary it was trained with'
        )


def restore_params(
    path: str,
    abstract_params: Any,
    vocabulary: str | None = None,
    setting: str = 'INITIAL_CHECKPOINT_PATH',
) -> Any:
    """Only the parameters of another run's checkpoint, in the shapes and shardings of `abstract_params`: their average,
    if its optimizer kept one (`parameter_averages`). Adapters are merged, unless `abstract_params` has them.

    Raises UserError if `path` has no checkpoint, has another vocabulary or other shapes than this run, or is damaged;
    the error calls the path `setting`.
    """
    saved = opened(path, setting)
    if vocabulary is not None:
        check_vocabulary(saved, vocabulary, setting)
    wanted = traverse_util.flatten_dict(abstract_params, sep='/')
    manager.check_fit(saved.step, saved.shapes_for(wanted), {name: leaf.shape for name, leaf in wanted.items()})
    return traverse_util.unflatten_dict(saved.read(wanted), sep='/')
