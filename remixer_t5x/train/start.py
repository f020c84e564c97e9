"""Prepares a run before its first step: checks, data, MODEL_DIR and state, in the order of `loop.train`."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from remixer_t5x.checkpoints import changes, durable, manager, saved_params
from remixer_t5x.data import pipeline, prefetch, stream, task_batches, task_vocabulary
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import held_out_loss, task_evaluation
from remixer_t5x.optim import train_state
from remixer_t5x.run_folder import model_dir, object_store
from remixer_t5x.train import initial_params, saving
from remixer_t5x.train.settings import PREVIOUS, Folder, Learner

# Restoring a step between two captures of the data draws the batches since the capture again: at most this many.
MAX_BATCHES_DRAWN_AGAIN = 100
NO_POSITION = (
    'warning: the position in the data is not saved (SAVE_DATA_POSITION=False): a resumed run begins the data again, '
    'in another order'
)


class RunData:
    """The training and evaluation data of a run.

    The constructor parses text and trains a vocabulary, unless the cache has them. Raises UserError if data cannot be
    read or a vocabulary does not fit the model.

    Attributes:
        vocabulary: of the targets.
        record: the JSON record of the data in checkpoints, compared by `manager.check_compatible`.
        evaluator: computes the tasks' metrics; None for a run without tasks.
    """

    def __init__(
        self,
        learner: Learner,
        dataset: pipeline.DatasetConfig,
        evaluation: held_out_loss.Evaluation | None,
        tasks: task_evaluation.TaskEvaluation | None,
    ):
        # Before the first TensorFlow operation.
        stream.hide_accelerators()
        prepared = pipeline.prepare_data(dataset, learner.model.vocab_size)
        self._dataset, self.vocabulary = prepared.config, prepared.vocabulary
        self.record = {
            **prepared.record,
            'batch_size': dataset.batch_size,
            'pack': dataset.pack,
            'feature_lengths': dict(dataset.task_feature_lengths),
            'seed': dataset.seed,
            'hosts': jax.process_count(),
        }
        self._partitioner, self._held_out = learner.partitioner, evaluation
        records = {'training': prepared.record}
        if evaluation is not None and tasks is None:
            records['evaluation'] = pipeline.prepare_data(evaluation.dataset, learner.model.vocab_size).record
        collectives.check_same(
            {
                f'the {part} for {use}': record[part]
                for use, record in records.items()
                for part in ('vocabulary', 'data')
            }
        )
        # The evaluator compares its examples between processes.
        self.evaluator: task_evaluation.TaskEvaluator | None = None
        if tasks is not None:
            self.evaluator = task_evaluation.TaskEvaluator(tasks, learner.model, learner.partitioner)
        # A train step on the CPU needs most of the cores.
        self._threads = task_batches.threads_beside(jax.default_backend())

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts a batch of this process's rows on the devices."""
        return self._partitioner.shard_batch(batch)

    def first_position(self) -> prefetch.Position:
        """Returns the position before the first batch. A resumed run keeps its number of streams."""
        return prefetch.Position.start(self._dataset.streams or self._partitioner.data_shard()[1])

    def batches(self, start: prefetch.Position, checkpoint_period: int) -> prefetch.Prefetcher:
        """Opens the training batches from `start` on, on the devices; a context manager."""
        dataset = pipeline.resume_config(self._dataset, start.batches)
        source = task_batches.TrainBatches(dataset, *self._partitioner.data_shard(), self._threads, len(start.states))
        period = min(checkpoint_period, MAX_BATCHES_DRAWN_AGAIN)
        return prefetch.Prefetcher(source, self.place, start, capture_period=period)

    def held_out(self) -> dict[str, task_batches.EvalBatches]:
        """Opens the batches of the held-out loss, of the whole split and of each task, by name of their records."""
        whole = self._held_out
        if whole is None:
            return {}
        splits = whole.of_tasks(self.evaluator.seqio_tasks) if self.evaluator else (whole, *whole.by_task())
        return {split.name: split.batches(self._partitioner.data_shard(), self._threads) for split in splits}


def check(
    learner: Learner,
    dataset: pipeline.DatasetConfig,
    evaluation: held_out_loss.Evaluation | None,
    tasks: task_evaluation.TaskEvaluation | None,
) -> None:
    """Raises UserError if data and model have different types, or if batch sizes do not divide over devices.

    Does not read files.
    """
    model_type, check_batch_size = learner.model.model_type, learner.partitioner.check_batch_size
    for data in [dataset] if evaluation is None else [dataset, evaluation.dataset]:
        if data.model_type != model_type:
            raise UserError(
                f'MODEL_TYPE must be that of MODEL, {model_type!r}, got {data.model_type!r}; give '
                f"--gin_file=model_types/{model_type}.gin after the model's file, or --gin.MODEL_TYPE={model_type}"
            )
    check_batch_size(dataset.batch_size, learner.microbatches)
    if evaluation is not None:
        check_batch_size(evaluation.dataset.batch_size)
    if tasks is not None:
        check_batch_size(tasks.decoding.batch_size)


def is_new(folder: Folder) -> bool:
    """Returns whether the run certainly starts with random parameters; does not look into a bucket."""
    checkpoints = model_dir.absolute_path(folder.model_dir) / model_dir.CHECKPOINTS
    return not folder.initial_checkpoint_path and '://' not in str(checkpoints) and not checkpoints.exists()


def claim(path: str) -> epath.Path:
    """Creates MODEL_DIR in the first process. Raises UserError if another process does not see it."""
    # A new name, because an old folder may exist on every disk.
    token = collectives.broadcast(secrets.token_hex(8))
    first = jax.process_index() == 0
    folder = model_dir.claim(path) if first else model_dir.absolute_path(path)
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
                f'MODEL_DIR must be a folder that all machines share (NFS or gs://), got {folder}, which is another '
                'folder on the machine of process 0'
            )
    return folder


def write_files(path: epath.Path, config_text: str, vocabulary: Any, is_new: bool, say: Callable[[str], None]) -> None:
    """Writes the configuration and the vocabulary into MODEL_DIR, so that the model works without its training data."""
    model_dir.write_config(path, config_text)
    folder = path / task_vocabulary.FOLDER
    if is_new or not task_vocabulary.saved_flags(path):
        with object_store.wrap_write_errors(folder):
            if not task_vocabulary.save(vocabulary, folder):
                say(f'VOCABULARY is a {type(vocabulary).__name__}, which cannot be saved in MODEL_DIR; keep its files')


def resume(
    checkpoints: manager.Checkpoints,
    abstract: train_state.TrainState,
    record: Mapping[str, Any],
    which: str,
    save_position: bool,
    patience: int | None,
) -> tuple[saving.Current | None, list[str]]:
    """Restores the newest checkpoint; None if there is none.

    Args:
        checkpoints: those of MODEL_DIR.
        abstract: shapes and shardings of the state.
        record: the record of this run, which must fit that of the checkpoint.
        which: if 'previous', moves damaged checkpoints away and restores the newest one that is not damaged.
        save_position: whether checkpoints have positions in the data.
        patience: `saving.Patience.most`.

    Returns:
        The state of the run, and notes for the user. Raises UserError for a damaged checkpoint.
    """
    notes: list[str] = [] if save_position else [NO_POSITION]
    while (step := collectives.broadcast(checkpoints.latest_step())) is not None:
        try:
            saved_params.verify_files(checkpoints.folder / str(step), listed=True)
            saved = checkpoints.read_record(step)
            manager.check_compatible(saved, record)
            now = saving.restore(checkpoints, step, abstract, patience)
        except durable.DamagedCheckpoint as error:
            notes.append(_set_aside(which, checkpoints, step, error))
            continue
        if not save_position:
            now.position = now.position.begin_again()
        elif not now.position.is_saved:
            raise UserError(
                f'the checkpoint of step {step} has no saved data position, because its run had '
                'SAVE_DATA_POSITION=False; give that again, or a new MODEL_DIR'
            )
        if changed := changes.describe_config(saved.get('config', ''), record['config']):
            notes.append(f'changed since the checkpoint: {changed}')
        return now, notes
    return None, notes


def initial_state(
    folder: Folder,
    model: Any,
    plan: train_state.StatePlan,
    vocabulary: Any,
    create: Callable[[], train_state.TrainState],
) -> tuple[train_state.TrainState, list[str]]:
    """Creates the state at step 0 with `create()`, or with the parameters of INITIAL_CHECKPOINT_PATH, and notes."""
    if not folder.initial_checkpoint_path:
        return create(), []
    fresh = getattr(model, 'fresh_parameters', ())
    params, description = initial_params.load(folder, plan, vocabulary, create, fresh)
    return plan.init_from_params(params, donate=True), [description]


def _set_aside(which: str, checkpoints: manager.Checkpoints, step: int, error: durable.DamagedCheckpoint) -> str:
    """Moves the checkpoint away with `--restore previous`, and returns a note; otherwise raises UserError."""
    if which != PREVIOUS:
        others = [other for other in checkpoints.steps() if other != step]
        advice = (
            f'type --restore previous to continue from step {others[-1]}'
            if others
            else 'there is no other: give a new MODEL_DIR, or type --restore previous to start again'
        )
        raise UserError(f'{error}; {advice}') from error
    folder = collectives.broadcast(str(checkpoints.move_away(step)) if jax.process_index() == 0 else None)
    checkpoints.reopen()
    return f'{error}; it is in {folder} now'
