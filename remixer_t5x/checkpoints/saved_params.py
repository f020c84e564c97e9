"""Finds a checkpoint of another run and reads its parameters, into a model that may be on another mesh."""

import difflib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from remixer_t5x import untrusted_files
from remixer_t5x.checkpoints import durable, manager
from remixer_t5x.devices.partition import Partitioner, unbox
from remixer_t5x.errors import UserError
from remixer_t5x.optimization import parameter_averages
from remixer_t5x.run_folder import model_dir, object_store


def abstract_params(model: Any, batch_shapes: Any, partitioner: Partitioner) -> Any:
    """Shapes and shardings of the float32 parameters, for `restore_params`. Does not compute any array."""
    boxed = jax.eval_shape(lambda rng: model.init(rng, batch_shapes), jax.random.key(0))
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


def read_record(step: epath.Path) -> dict[str, Any]:
    """The record of the run in the checkpoint at `step`; does not read arrays."""
    with manager.user_errors(step, 'read'):
        return untrusted_files.read_object(step / 'run' / 'metadata', manager.UNREADABLE)


def shapes(path: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of another run's checkpoint by name, such as `encoder/run_0/layer/...`."""
    return manager.saved_shapes(find_step(path, setting) / 'state', 'params')


def restore_params(
    path: str,
    abstract_params: Any,
    vocabulary: str | None = None,
    setting: str = 'INITIAL_CHECKPOINT_PATH',
    others: bool = False,
) -> Any:
    """Only the parameters of another run's checkpoint, in the shapes and shardings of `abstract_params`: their average,
    if its optimizer kept one (`parameter_averages`). With `others` the checkpoint may have more parameters than those.

    Raises UserError if `path` has no checkpoint, has another vocabulary or other shapes than this run, or is damaged;
    the error calls the path `setting`.
    """
    step = find_step(path, setting)
    manager.verify(step)
    run = read_record(step)
    if vocabulary is not None and run.get('vocabulary') != vocabulary:
        raise UserError(
            f'{setting} {step} was trained with vocabulary {run.get("vocabulary")} and this '
            f'run has {vocabulary}; give the vocabulary it was trained with'
        )
    manager.check_shapes(step / 'state', abstract_params, part='params', others=others)
    item = parameter_averages.saved_as(abstract_params, manager.saved_shapes(step / 'state'))
    with manager.user_errors(step, 'read'), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        params = parameter_averages.from_saved(
            reader.restore(
                step / 'state', args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            )
        )
    manager.check_finite(step, params)
    return params
