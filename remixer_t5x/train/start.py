"""Prepares a run before its first step: checks, data, MODEL_DIR and state, in the order of `loop.train`."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from remixer_t5x.checkpoints import config_changes, durable, manager, saved_params
from remixer_t5x.data import pipeline, stream, task_batches, task_vocabulary
from remixer_t5x.data.prefetch import Position, Prefetcher
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.task_evaluation import TaskEvaluator
from remixer_t5x.optim import train_state
from remixer_t5x.run_folder import metrics, model_dir, object_store
from remixer_t5x.train import initial_params, preemption
from remixer_t5x.train.current import Current, Patience
from remixer_t5x.train.settings import PREVIOUS, Folder, Run

# Restoring a step between two captures of the data draws the batches since the capture again: at most this many.
MAX_BATCHES_DRAWN_AGAIN = 100
NO_POSITION = (
    'warning: the position in the data is not saved (SAVE_DATA_POSITION=False): a resumed run begins the data again, '
    'in another order'
)


def check(run: Run) -> None:
    """Raises UserError if the data has another frame than the model, or if batch sizes do not divide over devices.

    Does not read files.
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


class RunData:
    """The training and evaluation data of a run.

    The constructor parses text and trains a vocabulary, unless the cache has them. Raises UserError if data cannot be
    read or a vocabulary does not fit the model.

    Attributes:
        vocabulary: of the targets.
        record: the JSON record of the data in checkpoints, compared by `manager.check_compatible`.
        evaluator: computes the tasks' metrics; None for a run without tasks.
    """

    def __init__(self, run: Run):
        # Before the first TensorFlow operation.
        stream.hide_accelerators()
        learner, model = run.learner, run.learner.model
        prepared = pipeline.prepare(run.dataset, model.vocab_size)
        self._dataset, self.vocabulary = prepared.config, prepared.vocabulary
        self.record = {
            **prepared.record,
            'batch_size': run.dataset.batch_size,
            'pack': run.dataset.pack,
            'feature_lengths': dict(run.dataset.task_feature_lengths),
            'seed': run.dataset.seed,
            'hosts': jax.process_count(),
        }
        self._partitioner, self._held_out = learner.partitioner, run.evaluation
        self._capture_period = min(run.periods.checkpoint_period, MAX_BATCHES_DRAWN_AGAIN)
        records = {'training': prepared.record}
        if run.evaluation is not None and run.tasks is None:
            records['evaluation'] = pipeline.prepare(run.evaluation.dataset, model.vocab_size).record
        collectives.check_same(
            {
                f'the {part} for {use}': record[part]
                for use, record in records.items()
                for part in ('vocabulary', 'data')
            }
        )
        # The evaluator compares its examples between processes.
        self.evaluator = TaskEvaluator(run.tasks, model, learner.partitioner) if run.tasks else None
        # A train step on the CPU needs most of the cores.
        self._threads = task_batches.threads_beside(jax.default_backend())

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts a batch of this process's rows on the devices."""
        return self._partitioner.shard_batch(batch)

    def batches(self, start: Position) -> Prefetcher:
        """Opens the training batches from `start` on, on the devices; a context manager."""
        dataset = pipeline.resumed(self._dataset, start.batches)
        share = self._partitioner.data_shard()
        source = task_batches.TrainBatches(dataset, *share, self._threads, len(start.states))
        return Prefetcher(source, self.place, start, capture_period=self._capture_period)

    def held_out(self) -> dict[str, task_batches.EvalBatches]:
        """Opens the batches of the held-out loss, of the whole split and of each task, by name of their records."""
        whole = self._held_out
        if whole is None:
            return {}
        splits = whole.of_tasks(self.evaluator.seqio_tasks) if self.evaluator else (whole, *whole.by_task())
        return {split.name: split.batches(self._partitioner.data_shard(), self._threads) for split in splits}


def is_new(folder: Folder) -> bool:
    """Returns whether the run certainly starts with random parameters; does not look into a bucket."""
    checkpoints = model_dir.absolute(folder.model_dir) / model_dir.CHECKPOINTS
    return not folder.initial_checkpoint_path and '://' not in str(checkpoints) and not checkpoints.exists()


def claim(path: str) -> epath.Path:
    """Creates MODEL_DIR in the first process. Raises UserError if another process does not see it."""
    # A new name, because an old folder may exist on every disk.
    token = collectives.broadcast(secrets.token_hex(8))
    first = jax.process_index() == 0
    folder = model_dir.claim(path) if first else model_dir.absolute(path)
    if jax.process_count() > 1:
        marker = folder / f'.{token}'
        if first:
            marker.write_text('')
        collectives.broadcast('the folder exists')
        is_shared = marker.exists()
        collectives.barrier()
        if first:
            marker.unlink()
        if not is_shared:
            raise UserError(
                f'MODEL_DIR {folder} is another folder than on the machine of process 0; give one that all machines '
                'share, on NFS or gs://'
            )
    return folder


def save_vocabulary(path: epath.Path, vocabulary: Any, say: Callable[[str], None]) -> None:
    """Writes the vocabulary into MODEL_DIR, so that the trained model works without its training text."""
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
    """Restores the newest checkpoint, or creates a new state (with the parameters of INITIAL_CHECKPOINT_PATH).

    `vocabulary` is the run's, and `create` returns a random state. Returns the current state of the run, a message
    about it, and notes for the user. Raises UserError for a damaged checkpoint, unless `run.recovery` asks for the
    previous checkpoint.
    """
    notes: list[str] = [] if run.dataset.save_position else [NO_POSITION]
    while (latest := collectives.broadcast(checkpoints.latest_step())) is not None:
        try:
            now, restore_notes = _restore(run, checkpoints, latest, plan, record)
            return now, f'resuming at step {latest}', (*notes, *restore_notes)
        except durable.Damaged as error:
            notes.append(_set_aside(run.recovery.restore, checkpoints, latest, error))
    path = run.folder.initial_checkpoint_path
    if not path:
        state, message = create(), 'starting at step 0'
    else:
        fresh = getattr(run.learner.model, 'fresh_parameters', ())
        params, description = initial_params.load(run.folder, plan, vocabulary, create, fresh)
        state, message = plan.init_from_params(params, donate=True), 'starting at step 0'
        notes.append(description)
    # A resumed run keeps its number of streams.
    position = Position.start(run.dataset.streams or run.learner.partitioner.data_shard()[1])
    patience = Patience(run.periods.stop_after_evaluations)
    return Current(state, position=position, patience=patience), message, tuple(notes)


def _restore(
    run: Run, checkpoints: manager.Checkpoints, step: int, plan: train_state.StatePlan, record: Mapping[str, Any]
) -> tuple[Current, list[str]]:
    saved_params.verify(checkpoints.folder / str(step), listed=True)
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
    """Moves the checkpoint away with `--restore previous`, and returns a note; otherwise raises UserError."""
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
