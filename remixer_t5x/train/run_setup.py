"""Prepares the data, MODEL_DIR and the state of a run before its first step."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.checkpoints import checkpoint_manager, compatibility, durable_folders, saved_params
from remixer_t5x.data import fingerprint, pipeline, prefetch, task_batches, task_vocabulary
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError, suggest_similar_name
from remixer_t5x.evaluate import checkpoint_ranking, task_evaluation
from remixer_t5x.models import interface
from remixer_t5x.run_folder import model_dir, object_store
from remixer_t5x.train import compilation, run_state
from remixer_t5x.train.settings import PREVIOUS, Run

# Maximum number of batches between two captured data positions. A resumed run reads and skips at most this number of
# batches.
MAX_REREAD_BATCHES = 100


class RunData:
    """The training and evaluation data of a run.

    Attributes:
        record: a description of the data, stored in each checkpoint for `compatibility.check_record_compatible`.
        place: function that transfers the rows of this process to the devices.
        loss_kind: the `kind` of the held-out loss in metrics.jsonl; empty if the run does not compute it.
        evaluated: a hash that identifies the examples of the held-out loss in a run without task metrics.
        notes: warnings to print.
    """

    def __init__(self, run: Run):
        """Reads and parses the training texts and trains the vocabulary, unless both are cached.

        Raises UserError if the data cannot be read, or if the vocabulary or LENGTH_BUCKETS does not fit the model.
        """
        model, partitioner = run.step_config.model, run.step_config.partitioner
        dataset, evaluation, tasks = run.dataset, run.evaluation, run.tasks
        if dataset.length_buckets and interface.requires_fixed_length(model):
            raise UserError(
                'LENGTH_BUCKETS must be () for a model whose outputs depend on the padded length, such as FNet, got '
                f"{tuple(dataset.length_buckets)}; pass --gin.LENGTH_BUCKETS='()'"
            )
        prepared = pipeline.prepare_data(dataset, model.vocab_size)
        self._dataset, self.vocabulary = prepared.config, prepared.vocabulary
        self._partitioner, self._evaluation = partitioner, evaluation
        self.place = partitioner.shard_batch
        self.record = {
            **prepared.record,
            'batch_size': dataset.batch_size,
            'pack': dataset.pack,
            'feature_lengths': dict(dataset.task_feature_lengths),
            'seed': dataset.seed,
            'split': dataset.split,
            'hosts': jax.process_count(),
        }
        if dataset.length_buckets:
            self.record['length_buckets'] = list(dataset.length_buckets)
        self.loss_kind = evaluation.name if evaluation else ''
        self.evaluated: str | None = None
        records = {'training': prepared.record}
        if evaluation is not None and tasks is None:
            held_out, steps = evaluation.dataset, evaluation.steps
            records['evaluation'] = pipeline.prepare_data(held_out, model.vocab_size).record
            described = records['evaluation'], held_out.split, steps and steps * held_out.batch_size
            self.evaluated = fingerprint.compute_short_hash(repr(described))
        collectives.check_same_on_processes(
            {f'the {part} for {use}': records[use][part] for use in records for part in ('vocabulary', 'data')}
        )
        self.evaluator: task_evaluation.TaskEvaluator | None = None
        if tasks is not None:
            # The constructor reads the examples, and checks that they are equal in all processes.
            self.evaluator = task_evaluation.TaskEvaluator(tasks, model, partitioner)
            _check_evaluation_vocabulary(self.evaluator, self.record['vocabulary'])
            _check_metrics(run.folder.best_metrics, self.evaluator)
            self.record['examples_hashes'] = self.evaluator.examples_hashes
            evaluated, split = self.evaluator.seqio_tasks, self.evaluator.split
            self.record['evaluation_data'] = fingerprint.fingerprint_tasks(evaluated, split)
        self.notes = [*self.evaluator.notes] if self.evaluator else []
        if not dataset.save_position:
            self.notes.append(
                'warning: the data position is not saved (SAVE_DATA_POSITION=False), so a resumed run reads the data '
                'from the beginning, in a different order'
            )
        # Limit the tf.data threads on CPUs, because the train step needs most of the cores.
        self._threads = task_batches.count_tf_data_threads(jax.default_backend())

    def get_first_data_position(self) -> prefetch.DataPosition:
        """Returns the data position at the start of a new run. Resumed runs keep their number of data streams."""
        return prefetch.DataPosition.create_at_start(self._dataset.count_streams(self._partitioner.get_data_shard()[1]))

    def get_resumed_data_position(self, saved: prefetch.DataPosition, step: int) -> prefetch.DataPosition:
        """Returns the data position saved in the checkpoint of `step`. Raises UserError if it was not saved."""
        if not self._dataset.save_position:
            return prefetch.DataPosition.from_states(saved.batches, dict.fromkeys(saved.states, b''))
        if not saved.has_stream_states:
            raise UserError(
                f'SAVE_DATA_POSITION must be False, because the checkpoint of step {step} contains no data position, '
                'got True; pass --gin.SAVE_DATA_POSITION=False, or use a new MODEL_DIR'
            )
        return saved

    def open_batches(self, start: prefetch.DataPosition, checkpoint_period: int) -> prefetch.Prefetcher:
        """Opens the training data at the position `start`. Returns a context manager that prefetches the batches."""
        dataset = pipeline.reseed_resumed_config(self._dataset, start.batches)
        source = task_batches.TrainBatches(
            dataset, *self._partitioner.get_data_shard(), self._threads, len(start.states)
        )
        period = min(checkpoint_period, MAX_REREAD_BATCHES)
        return prefetch.Prefetcher(source, self.place, start, capture_period=period)

    def open_held_out_batches(self) -> dict[str, task_batches.EvalBatches]:
        """Opens the held-out batches. Maps each `kind` of held-out loss record in metrics.jsonl to its batches.

        If the run computes task metrics, there is one loss per task. Otherwise, there is a loss of the whole split and,
        for a mixture, also of each task.
        """
        split = self._evaluation
        if split is None:
            return {}
        parts = (
            split.create_task_evaluations(self.evaluator.seqio_tasks)
            if self.evaluator
            else (split, *split.split_by_task())
        )
        return {part.name: part.open_batches(self._partitioner.get_data_shard(), self._threads) for part in parts}


def _check_evaluation_vocabulary(evaluator: task_evaluation.TaskEvaluator, expected: str) -> None:
    evaluated = task_vocabulary.get_vocabulary_record(evaluator.vocabulary)
    if evaluated != expected:
        raise UserError(
            f'EVAL_MIXTURE_OR_TASK_NAME must have the vocabulary of MIXTURE_OR_TASK_NAME, {expected}, got {evaluated} '
            f'for {evaluator.seqio_tasks[0].name}; register its tasks with the vocabulary of the training task'
        )


def _check_metrics(best_metrics: checkpoint_ranking.BestMetrics, evaluator: task_evaluation.TaskEvaluator) -> None:
    """Raises UserError if a metric cannot be computed, or if BEST_METRICS does not fit the tasks, before training."""
    names = [task.name for task in evaluator.seqio_tasks]
    for name in best_metrics if isinstance(best_metrics, Mapping) else ():
        if name not in names:
            raise UserError(
                f'BEST_METRICS must map tasks that the run evaluates ({", ".join(names)}) to metrics, got {name!r}'
                f'{suggest_similar_name(name, names)}'
            )
    for name, metrics in evaluator.compute_target_metrics().items():
        checkpoint_ranking.select_ranking_metric(name, metrics, best_metrics)


def create_shared_model_dir(path: str) -> epath.Path:
    """Creates MODEL_DIR in the first process. Raises UserError if another process cannot see the folder."""
    is_first = jax.process_index() == 0
    folder = model_dir.create_model_dir(path) if is_first else model_dir.to_absolute_path(path)
    if jax.process_count() == 1:
        return folder
    # Use a random file name, because a local folder with the same path may contain a file from an earlier run.
    marker = folder / f'.{collectives.broadcast(secrets.token_hex(8))}'
    if is_first:
        marker.write_text('')
    collectives.barrier()
    is_shared = marker.exists()
    collectives.barrier()
    if is_first:
        marker.unlink()
    if not is_shared:
        raise UserError(
            f'MODEL_DIR must be a folder that all machines share (NFS or gs://), got {folder}, which is a different '
            'folder on the machine of process 0'
        )
    return folder


def write_run_files(
    path: epath.Path, config_text: str, vocabulary: Any, is_new: bool, warn: Callable[[str], None]
) -> None:
    """Writes the configuration and vocabulary to MODEL_DIR, so that the model can be used without its training data."""
    model_dir.write_config(path, config_text)
    folder = path / task_vocabulary.VOCABULARY_FOLDER
    if is_new or not task_vocabulary.get_saved_vocabulary_flags(path):
        with object_store.wrap_write_errors(folder):
            if not task_vocabulary.save_vocabulary(vocabulary, folder):
                warn(f'VOCABULARY is a {type(vocabulary).__name__}, which cannot be saved in MODEL_DIR; keep its files')


def restore_or_create_state(
    run: Run,
    checkpoints: checkpoint_manager.RunCheckpoints,
    programs: compilation.CompiledPrograms,
    data: RunData,
    record: Mapping[str, Any],
) -> tuple[run_state.RunState, list[str]]:
    """Restores the state from the newest checkpoint, or creates the state at step 0 if there is no checkpoint.

    Returns the state and a list of notes for the user. Raises UserError if the newest checkpoint is damaged or
    incompatible with `record`, the description of this run, or if the initial parameters do not fit the model.
    """
    notes: list[str] = []
    patience = run_state.EarlyStopping(run.periods.stop_after_evaluations)
    while (step := collectives.broadcast(checkpoints.latest_step())) is not None:
        folder = checkpoints.folder / str(step)
        try:
            saved_params.verify_checkpoint_files(folder)
            if not (folder / 'data').exists():
                raise UserError(
                    f'the checkpoint at {folder} was not saved by a training run and contains only parameters; '
                    f'{compatibility.RESET_ADVICE}'
                )
            saved_record = saved_params.read_record(folder)
            compatibility.check_record_compatible(saved_record, record)
            changed = compatibility.describe_config_changes(saved_record.get('config', ''), record['config'])
            state = run_state.restore_state(checkpoints, step, programs.plan.abstract, saved_record, patience, changed)
        except durable_folders.DamagedCheckpointError as error:
            notes.append(_move_damaged_checkpoint(run.recovery.restore, checkpoints, step, error))
            continue
        state.position = data.get_resumed_data_position(state.position, step)
        if changed:
            notes.append(f'changed since the checkpoint: {changed}')
        return state, notes
    train_state, creation_notes = programs.create_initial_state(data.vocabulary)
    return run_state.RunState(
        train_state, position=data.get_first_data_position(), patience=patience
    ), notes + creation_notes


def _move_damaged_checkpoint(
    restore: str,
    checkpoints: checkpoint_manager.RunCheckpoints,
    step: int,
    error: durable_folders.DamagedCheckpointError,
) -> str:
    """Moves a damaged checkpoint away, and returns a user message. Raises UserError unless `restore` is PREVIOUS."""
    if restore != PREVIOUS:
        others = [other for other in checkpoints.list_complete_steps() if other != step]
        advice = (
            f'pass --restore=previous to continue from step {others[-1]}'
            if others
            else 'there is no other checkpoint: use a new MODEL_DIR, or pass --restore=previous to start from scratch'
        )
        raise UserError(f'{error}; {advice}') from error
    folder = collectives.broadcast(str(checkpoints.move_damaged_checkpoint(step)) if jax.process_index() == 0 else None)
    checkpoints.reopen()
    return f'{error}; it was moved to {folder}'
