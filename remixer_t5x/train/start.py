"""The preparation of a run before its first step, in the order in which `loop.train` calls it."""

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.checkpoints import config_changes, durable, manager
from remixer_t5x.data import task_vocabulary
from remixer_t5x.data.prefetch import Position
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.optim import train_state
from remixer_t5x.run_folder import metrics, model_dir, object_store
from remixer_t5x.train import preemption
from remixer_t5x.train.early_stopping import Patience
from remixer_t5x.train.initial import initial_params
from remixer_t5x.train.settings import PREVIOUS, Folder, Run

NO_POSITION = (
    'warning: the position in the data is not saved (SAVE_DATA_POSITION=False): a resumed run begins the data again, '
    'in another order'
)


@dataclasses.dataclass
class Current:
    """The current state of a run; its steps and hooks change it.

    Attributes:
        state: the train state after `step` updates. No other reference to it may exist, because a step donates its
            buffers.
        step: number of updates.
        window: metrics since the last log.
        saved: the newest checkpoint's step; None if there is none.
        position: position in the data at which this process started.
        patience: evaluations since the best.
    """

    state: train_state.TrainState
    step: int = 0
    window: metrics.Window = dataclasses.field(default_factory=metrics.Window)
    saved: int | None = None
    position: Position = dataclasses.field(default_factory=Position)
    patience: Patience = dataclasses.field(default_factory=Patience)


def check(run: Run) -> None:
    """Raises UserError if the data is converted for another frame than the model's, or if batch sizes do not divide
    over the devices. Does not read files.
    """
    learner, frame = run.learner, run.learner.model.frame
    datasets = [run.dataset] if run.evaluation is None else [run.dataset, run.evaluation.dataset]
    for dataset in datasets:
        if dataset.frame != frame:
            raise UserError(
                f'FRAME is {dataset.frame!r} and MODEL has the frame {frame!r}; give --gin_file=frames/{frame}.gin '
                f"after the model's file, or --gin.FRAME={frame}"
            )
    learner.partitioner.check_batch_size(run.dataset.batch_size, learner.microbatches)
    if run.evaluation is not None:
        learner.partitioner.check_batch_size(run.evaluation.dataset.batch_size)
    if run.tasks is not None:
        learner.partitioner.check_batch_size(run.tasks.decoding.batch_size)


def is_new(folder: Folder) -> bool:
    """Whether a look into MODEL_DIR that takes no time says that the run starts with random parameters."""
    checkpoints = model_dir.absolute(folder.model_dir) / model_dir.CHECKPOINTS
    return not folder.initial_checkpoint_path and '://' not in str(checkpoints) and not checkpoints.exists()


def claim(path: str) -> epath.Path:
    """MODEL_DIR, which the first process creates. Raises UserError if another process does not see it."""
    # Writes a new name into a file, because an old folder may exist on every disk.
    token = collectives.broadcast(secrets.token_hex(8))
    first = jax.process_index() == 0
    folder = model_dir.claim(path) if first else model_dir.absolute(path)
    if jax.process_count() > 1:
        seen = folder / f'.{token}'
        if first:
            seen.write_text('')
        collectives.broadcast('the folder is there')
        found = seen.exists()
        collectives.barrier()
        if first:
            seen.unlink()
        if not found:
            raise UserError(
                f'MODEL_DIR {folder} is another folder here than on the machine of process 0; give one that all '
                'machines share, on NFS or gs://'
            )
    return folder


def save_vocabulary(path: epath.Path, vocabulary: Any, say: Callable[[str], None]) -> None:
    """Writes the vocabulary into MODEL_DIR, so that the trained model works without the text it was made from."""
    folder = path / task_vocabulary.FOLDER
    try:
        if not task_vocabulary.save(vocabulary, folder):
            say(f'VOCABULARY is a {type(vocabulary).__name__}, which cannot be saved in MODEL_DIR; keep its files')
    except object_store.errors() as error:
        raise UserError(f'{folder} cannot be written: {object_store.reason(error)}') from error


def begin(
    run: Run,
    plan: train_state.StatePlan,
    checkpoints: manager.Checkpoints,
    record: Mapping[str, Any],
    vocabulary: Any,
    create: Callable[[], train_state.TrainState],
) -> tuple[Current, str, tuple[str, ...]]:
    """The newest checkpoint's state if there is one, otherwise a new state (with the parameters of
    INITIAL_CHECKPOINT_PATH). `vocabulary` is the run's, and `create` makes a random state.

    Returns the current state of the run, a message about it, and notes for the user. Raises UserError for a damaged
    checkpoint, unless `run.recovery` asks for the previous checkpoint.
    """
    notes: list[str] = [] if run.dataset.save_position else [NO_POSITION]
    while (latest := collectives.broadcast(checkpoints.latest_step())) is not None:
        try:
            now, found = _restore(run, checkpoints, latest, plan, record)
            return now, f'resuming at step {latest}', (*notes, *found)
        except durable.Damaged as error:
            notes.append(_set_aside(run.recovery.restore, checkpoints, latest, error))
    path = run.folder.initial_checkpoint_path
    if not path:
        state, message = create(), 'starting at step 0'
    else:
        fresh = getattr(run.learner.model, 'fresh_parameters', ())
        params, words = initial_params.load(run.folder, plan, vocabulary, create, fresh)
        state, message = plan.init_from_params(params, donate=True), 'starting at step 0'
        notes.append(words)
    # A resumed run keeps its number of streams.
    position = Position.start(run.dataset.streams or run.learner.partitioner.data_shard()[1])
    patience = Patience(run.periods.stop_after_evaluations)
    return Current(state, position=position, patience=patience), message, tuple(notes)


def _restore(
    run: Run, checkpoints: manager.Checkpoints, step: int, plan: train_state.StatePlan, record: Mapping[str, Any]
) -> tuple[Current, list[str]]:
    manager.verify(checkpoints.folder / str(step), listed=True)
    saved = checkpoints.run(step)
    manager.check_compatible(saved, record)
    state, position = checkpoints.restore(step, plan.abstract)
    if not run.dataset.save_position:
        position = position.begin_again()
    elif not position.is_saved:
        raise UserError(
            f'the checkpoint of step {step} has no position in the data, because its run had SAVE_DATA_POSITION=False; '
            'give that again, or a new MODEL_DIR'
        )
    changed = config_changes.describe_changes(saved.get('config', ''), record['config'])
    notes = [f'changed since the checkpoint: {changed}'] if changed else []
    seconds = saved.get('write_seconds')
    if isinstance(seconds, int | float):
        notes.append(preemption.time_to_save(plan.abstract, seconds, run.recovery.preemption_notice))
    patience = Patience.restored(run.periods.stop_after_evaluations, saved.get('patience'))
    return Current(state, step, metrics.Window(saved['window']), step, position, patience), notes


def _set_aside(restore: str, checkpoints: manager.Checkpoints, step: int, error: durable.Damaged) -> str:
    """Moves the checkpoint away if the previous one is asked for, and returns a note; otherwise raises what to do."""
    if restore != PREVIOUS:
        others = [other for other in checkpoints.steps() if other != step]
        advice = (
            f'type --restore previous to continue from step {others[-1]}'
            if others
            else 'there is no other: give a new MODEL_DIR, or type --restore previous to start again'
        )
        raise UserError(f'{error}; {advice}') from error
    place = collectives.broadcast(str(checkpoints.set_aside(step)) if jax.process_index() == 0 else None)
    checkpoints.reopen()
    return f'{error}; it is in {place} now'
