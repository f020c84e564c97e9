"""Computes task metrics and leaderboard predictions for several checkpoints. Reads each example only once.

Writes the results of an evaluation: `metrics.jsonl`, TensorBoard files, and predictions with targets. `metrics.jsonl`
contains one object per task and checkpoint: `kind` ('<split>/<task>'), `step`, `checkpoint`, `examples_hash`,
`settings_hash`, the metrics, and `timing`. Repeated evaluations append lines.
`predictions/<task>-<split>-<step>.jsonl` contains the rows of a `TaskReport`. If the run or an earlier evaluation used
different examples, the task name ends with the beginning of the examples' hash, as in `own_pairs@1a2b3c4d`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x import ranges, untrusted_files
from remixer_t5x.checkpoints import checkpoint_paths, durable_folders, saved_params
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.devices import collectives, partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import checkpoint_ranking, task_examples
from remixer_t5x.evaluate.task_evaluation import TaskEvaluation, TaskEvaluator, TaskReport
from remixer_t5x.run_folder import metrics, model_dir, object_store

# Name of the folder for evaluation results in MODEL_DIR.
EVAL_FOLDER = 'eval'
PREDICTIONS = 'predictions'


@dataclasses.dataclass(frozen=True)
class CheckpointEvaluation:
    """The settings of `remixer-t5x eval`.

    Attributes:
        checkpoint_path: a checkpoint, a MODEL_DIR (whose newest checkpoint is evaluated), or a comma-separated list of
            these.
        tasks: the tasks whose metrics are computed; if `tasks.split` is None, only leaderboard files are written.
        follow: if not None, each new checkpoint of a MODEL_DIR is evaluated until step `until`, or until no checkpoint
            appears for this number of seconds.
        output_dir: folder for the results; None uses the folder `eval` in the MODEL_DIR of each checkpoint.
        submission_dir: folder for the leaderboard files of a single checkpoint; None writes no leaderboard files.
        submission_split: the split whose predictions are written to the leaderboard files.
    """

    model: Any
    partitioner: partition.Partitioner
    checkpoint_path: str
    tasks: TaskEvaluation
    follow: ranges.NonNegative | None = None
    until: ranges.Count | None = None
    output_dir: str | None = None
    submission_dir: ranges.LocalPath | None = None
    submission_split: str = 'test'

    def __post_init__(self) -> None:
        ranges.check_fields(self)
        if self.submission_dir and (self.follow is not None or ',' in self.checkpoint_path):
            raise UserError('SUBMISSION_DIR requires a single checkpoint; pass one --checkpoint, without --follow')

    def find_checkpoint_folders(self, evaluated: Collection[int]) -> Iterator[epath.Path]:
        """Yields the same checkpoint folders on every process. Skips steps in `evaluated` if `follow` is set."""
        if self.follow is None:
            folders = iter(checkpoint_paths.find_checkpoints(self.checkpoint_path))
        else:
            folders = checkpoint_paths.follow_checkpoints(self.checkpoint_path, self.follow, self.until, evaluated)
        # The first process selects the checkpoint, because processes may see a new checkpoint at different times.
        folders = folders if jax.process_index() == 0 else iter(())
        while folder := collectives.broadcast(str(next(folders, ''))):
            yield epath.Path(folder)

    def get_results_folder(self, checkpoint: epath.Path) -> str:
        """Returns `output_dir`, or the folder `eval` in the MODEL_DIR that contains `checkpoint`."""
        parent = checkpoint.parent
        if parent.name == model_dir.CHECKPOINTS:
            parent = parent.parent
        elif parent.parent.name == checkpoint_ranking.BEST_FOLDER:
            parent = parent.parent.parent
        return self.output_dir or str(parent / EVAL_FOLDER)


class CheckpointEvaluator:
    """Evaluates checkpoints of one model on examples that are read only once.

    `task_evaluator` is None if no split is evaluated, and `submission_evaluator` is None if no leaderboard files are
    written. `notes` are messages about skipped tasks and truncated texts.
    """

    def __init__(self, settings: CheckpointEvaluation, get_leaderboard_file: Callable[[str], str | None]):
        """Reads the examples.

        `get_leaderboard_file` returns the name of a task's leaderboard file, or None if the task has no leaderboard.

        Raises UserError if neither metrics nor submissions are requested, or if no task to submit has a leaderboard.
        """
        tasks, model, partitioner = settings.tasks, settings.model, settings.partitioner
        self._settings = settings
        self.task_evaluator = TaskEvaluator(tasks, model, partitioner) if tasks.split is not None else None
        self.submission_evaluator = (
            self._create_submission_evaluator(get_leaderboard_file) if settings.submission_dir else None
        )
        readers = [reader for reader in (self.task_evaluator, self.submission_evaluator) if reader]
        if not readers:
            raise UserError('EVAL_SPLIT or SUBMISSION_DIR must be set, got None for both; pass --split=validation')
        self.notes = [note for reader in readers for note in reader.notes]
        self._vocabulary = task_vocabulary.get_vocabulary_record(readers[0].vocabulary)
        lengths, size = tasks.decoding.feature_lengths, tasks.decoding.batch_size
        shapes = batch_formats.get_batch_shapes(model.model_type, lengths, size)
        self._abstract = saved_params.get_abstract_params(model, shapes, partitioner)

    def _create_submission_evaluator(self, get_leaderboard_file: Callable[[str], str | None]) -> TaskEvaluator:
        """Returns an evaluator for all examples of the tasks with a leaderboard."""
        settings, tasks = self._settings, self._settings.tasks
        split = settings.submission_split
        tasks_with_split, _ = task_examples.find_tasks(tasks.mixture_or_task_name, split, tasks.tasks)
        submitted = [task for task in tasks_with_split if get_leaderboard_file(task.name)]
        if not submitted:
            names = ', '.join(task.name for task in tasks_with_split)
            raise UserError(f'SUBMISSION_DIR requires GLUE or SuperGLUE tasks, got {names}; omit SUBMISSION_DIR')
        submission = dataclasses.replace(tasks, mixture_or_task_name=submitted, tasks=None, split=split, examples=None)
        return TaskEvaluator(submission, settings.model, settings.partitioner)

    def read_evaluated_steps(self, suffix: str = '') -> set[int]:
        """With `follow`, returns the steps that an earlier command has evaluated with the same settings.

        `suffix` is appended to the name of the results folder.
        """
        if self._settings.follow is None or self.task_evaluator is None:
            return set()
        folder = self._settings.get_results_folder(model_dir.to_absolute_path(self._settings.checkpoint_path) / '0')
        return read_evaluated_steps(folder + suffix, self.task_evaluator.settings_hashes)

    def restore_params(self, folder: epath.Path) -> Any:
        """Restores the parameters of a checkpoint. With `follow`, returns None if the checkpoint was removed."""
        may_disappear = self._settings.follow is not None
        if may_disappear and collectives.broadcast(not checkpoint_paths.is_complete_checkpoint(folder)):
            return None
        try:
            return saved_params.restore_params(str(folder), self._abstract, self._vocabulary, 'CHECKPOINT_PATH')
        except checkpoint_paths.CheckpointRemovedError:
            # With several processes, raise the error, because other processes may have read the checkpoint.
            if may_disappear and jax.process_count() == 1:
                return None
            raise


class ReportWriter:
    """Writes task reports to a folder, which is created if it does not exist. Raises UserError if writing fails.

    `examples_hashes` contains hashes of the examples that the training run evaluated, from
    `TaskEvaluator.examples_hashes`. `notes` lists the results that were renamed because their examples differ.
    """

    def __init__(self, folder: str, examples_hashes: Mapping[str, str] | None = None):
        self.folder, self.notes = model_dir.to_absolute_path(folder), list[str]()
        # Import lazily, because importing tensorboardX takes half a second.
        from remixer_t5x.run_folder import tensorboard

        with object_store.wrap_write_errors(self.folder):
            (self.folder / PREDICTIONS).mkdir(parents=True, exist_ok=True)
            self._tensorboard = tensorboard.TensorBoardWriter(self.folder / model_dir.TENSORBOARD, None)
        # A result keeps its name only if the examples are those of the first record of the same kind.
        records = metrics.read_records(self.folder / model_dir.METRICS)[::-1]
        self._hashes: dict[str, str] = {record['kind']: record.get('examples_hash', '') for record in records}
        self._hashes.update(examples_hashes or {})

    def write(self, report: TaskReport, step: int, checkpoint: epath.Path) -> epath.Path:
        """Writes a report and returns the path of the file with its predictions."""
        name, digest = report.task, report.examples_hash
        if (self._hashes.setdefault(f'{report.split}/{name}', digest) or digest) != digest:
            name = f'{name}@{digest[:8]}'
            self.notes.append(
                f'{report.task} was evaluated on other examples than in the run or earlier; its results are in {name}'
            )
        kind = f'{report.split}/{name}'
        record = {'kind': kind, 'step': step, 'checkpoint': str(checkpoint), 'examples_hash': digest}
        record['settings_hash'] = report.settings_hash
        numbers = {metric: value if math.isfinite(value) else None for metric, value in report.metrics.items()}
        predictions = self.folder / PREDICTIONS / f'{name}-{report.split}-{step}.jsonl'
        # Write predictions first, so that every task listed in metrics.jsonl has predictions.
        write_jsonl(predictions, report.rows)
        path = self.folder / model_dir.METRICS
        with object_store.wrap_write_errors(self.folder):
            # Start a new line, because a killed evaluation may have left an incomplete last line.
            start = '\n' if path.exists() and path.read_bytes()[-1:] not in (b'', b'\n') else ''
            with path.open('a') as file:
                file.write(start + json.dumps({**record, **numbers, 'timing': {'seconds': report.seconds}}) + '\n')
            self._tensorboard.write(kind, step, report.metrics, {'seconds': report.seconds})
        return predictions

    def close(self) -> None:
        with object_store.wrap_write_errors(self.folder):
            self._tensorboard.close()


def evaluate_and_write_reports(
    evaluator: TaskEvaluator | None, params: Any, folder: epath.Path, outlet: ReportWriter | None
) -> list[TaskReport]:
    """Evaluates `params` of the checkpoint `folder`; returns the reports and, if `outlet` is not None, writes them."""
    reports = []
    for report in evaluator(params) if evaluator else ():
        reports.append(report)
        if outlet is not None:
            outlet.write(report, durable_folders.get_step(folder), folder)
    return reports


def read_evaluated_steps(folder: str, settings_hashes: Mapping[str, str]) -> set[int]:
    """Returns the steps for which `folder` contains results of all tasks with these hashes."""
    steps: dict[str, set[int]] = {kind: set() for kind in settings_hashes}
    for record in metrics.read_records(model_dir.to_absolute_path(folder) / model_dir.METRICS):
        kind = record['kind'].partition('@')[0]
        if kind in steps and record.get('settings_hash') == settings_hashes[kind]:
            steps[kind].add(record['step'])
    return set.intersection(*steps.values())


def write_jsonl(path: epath.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Atomically writes a file with one JSON object per line."""
    with object_store.wrap_write_errors(path):
        object_store.write_atomically(path, ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows))


def read_predictions(path: str) -> list[dict[str, Any]]:
    """Reads predictions written by `write_jsonl` or `remixer-t5x infer`.

    Raises UserError with the line number if a line is not a prediction.
    """
    advice = 'use a file that eval or infer has written'
    rows = []
    with untrusted_files.convert_to_user_errors(path, advice):
        # Accept -inf, the score of an impossible text, although it is not valid JSON.
        for line in untrusted_files.read_json_lines(model_dir.to_absolute_path(path), odd_numbers=True):
            row = line.value if isinstance(line.value, dict) else {}
            has_texts = isinstance(row.get('prediction'), str) and isinstance(row.get('input', ''), str)
            has_numbers = isinstance(row.get('score'), int | float | None) and isinstance(row.get('index'), int | None)
            if has_texts and has_numbers:
                rows.append(row)
            elif not line.is_blank:
                raise UserError(f'{path} line {line.number}: {line.error or "it is not a prediction"}; {advice}')
    return rows
