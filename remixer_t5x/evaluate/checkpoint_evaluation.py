"""Computes task metrics and leaderboard predictions for several checkpoints. Reads each example only once."""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from etils import epath

from remixer_t5x import ranges
from remixer_t5x.checkpoints import saved_params
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.devices import collectives, partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import best, results, task_examples
from remixer_t5x.evaluate.task_evaluation import TaskEvaluation, TaskEvaluator, TaskReport
from remixer_t5x.run_folder import model_dir

# Name of the folder for evaluation results in MODEL_DIR.
EVAL_FOLDER = 'eval'


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints to evaluate.

    `path` is a checkpoint, a MODEL_DIR (selects the newest checkpoint), or a comma-separated list of these. If `follow`
    is not None, each new checkpoint of a MODEL_DIR is evaluated until step `until`, or until no checkpoint appears for
    `follow` seconds.
    """

    path: str
    follow: ranges.NonNegative | None = None
    until: ranges.Count | None = None

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    def check(self) -> None:
        """Raises UserError if `path` contains no checkpoint. Call this method before reading examples."""
        if self.follow is None:
            saved_params.find_checkpoints(self.path)

    def find(self, done: Collection[int]) -> Iterator[epath.Path]:
        """Yields the same checkpoint folders on every process. Skips steps in `done` if `follow` is set."""
        if self.follow is None:
            folders = iter(saved_params.find_checkpoints(self.path))
        else:
            folders = saved_params.follow_checkpoints(self.path, self.follow, self.until, done)
        # The first process selects the checkpoint, because processes may see a new checkpoint at different times.
        folders = folders if jax.process_index() == 0 else iter(())
        while folder := collectives.broadcast(str(next(folders, ''))):
            yield epath.Path(folder)


@dataclasses.dataclass(frozen=True)
class CheckpointEvaluation:
    """The settings of `remixer-t5x evaluate`.

    Attributes:
        tasks: the tasks whose metrics are computed; if `tasks.split` is None, only leaderboard files are written.
        output_dir: folder for the results; None uses the folder `eval` in the MODEL_DIR of each checkpoint.
        submission_dir: folder for the leaderboard files; None writes no leaderboard files.
        submission_split: the split whose predictions are written to the leaderboard files.
    """

    model: Any
    partitioner: partition.Partitioner
    checkpoints: Checkpoints
    tasks: TaskEvaluation
    output_dir: str | None = None
    submission_dir: str | None = None
    submission_split: str = 'test'

    def results_folder(self, checkpoint: epath.Path) -> str:
        """Returns `output_dir`, or the folder `eval` in the MODEL_DIR that contains `checkpoint`."""
        parent = checkpoint.parent
        if parent.name == model_dir.CHECKPOINTS:
            parent = parent.parent
        elif parent.parent.name == best.BEST_FOLDER:
            parent = parent.parent.parent
        return self.output_dir or str(parent / EVAL_FOLDER)


class Evaluator:
    """Evaluates checkpoints of one model on examples that are read only once.

    `task_evaluator` is None if no split is evaluated, and `submission_evaluator` is None if no leaderboard files are
    written. `notes` are messages about skipped tasks and truncated texts.
    """

    def __init__(self, settings: CheckpointEvaluation, has_leaderboard: Callable[[str], bool]):
        """Reads the examples.

        Raises UserError if neither metrics nor submissions are requested, or if no task to submit has a leaderboard.
        """
        tasks, model, partitioner = settings.tasks, settings.model, settings.partitioner
        self._settings = settings
        self.task_evaluator = TaskEvaluator(tasks, model, partitioner) if tasks.split is not None else None
        self.submission_evaluator = (
            self._create_submission_evaluator(has_leaderboard) if settings.submission_dir else None
        )
        readers = [reader for reader in (self.task_evaluator, self.submission_evaluator) if reader]
        if not readers:
            raise UserError('EVAL_SPLIT or SUBMISSION_DIR must be set, got None for both; pass --split=validation')
        self.notes = [note for reader in readers for note in reader.notes]
        self._vocabulary = task_vocabulary.vocabulary_record(readers[0].vocabulary)
        lengths, size = tasks.decoding.feature_lengths, tasks.decoding.batch_size
        shapes = batch_formats.batch_shapes(model.model_type, lengths, size)
        self._abstract = saved_params.abstract_params(model, shapes, partitioner)

    def _create_submission_evaluator(self, has_leaderboard: Callable[[str], bool]) -> TaskEvaluator:
        """Returns an evaluator for all examples of the tasks with a leaderboard."""
        settings, tasks = self._settings, self._settings.tasks
        split = settings.submission_split
        tasks_with_split, _ = task_examples.find_tasks(tasks.mixture_or_task_name, split, tasks.tasks)
        submitted = [task for task in tasks_with_split if has_leaderboard(task.name)]
        if not submitted:
            names = ', '.join(task.name for task in tasks_with_split)
            raise UserError(f'SUBMISSION_DIR requires GLUE or SuperGLUE tasks, got {names}; omit SUBMISSION_DIR')
        submission = dataclasses.replace(tasks, mixture_or_task_name=submitted, tasks=None, split=split, examples=None)
        return TaskEvaluator(submission, settings.model, settings.partitioner)

    def evaluated_steps(self) -> set[int]:
        """Returns the steps that an earlier command has evaluated, or an empty set if `follow` is None."""
        checkpoints = self._settings.checkpoints
        if checkpoints.follow is None or self.task_evaluator is None:
            return set()
        folder = self._settings.results_folder(model_dir.absolute_path(checkpoints.path) / '0')
        return results.evaluated_steps(folder, self.task_evaluator.examples_hashes)

    def restore(self, folder: epath.Path) -> Any:
        """Restores the parameters of a checkpoint. Returns None if `follow` is set and the run has removed it."""
        may_disappear = self._settings.checkpoints.follow is not None
        if may_disappear and collectives.broadcast(_is_removed(folder)):
            return None
        try:
            return saved_params.restore_params(str(folder), self._abstract, self._vocabulary, 'CHECKPOINT_PATH')
        except UserError:
            # With several processes, raise the error, because other processes may have read the checkpoint.
            if may_disappear and jax.process_count() == 1 and _is_removed(folder):
                return None
            raise


def write_reports(
    evaluator: TaskEvaluator | None, params: Any, folder: epath.Path, outlet: results.Results | None
) -> list[TaskReport]:
    """Evaluates `params` of the checkpoint `folder`. Returns the reports. If `outlet` is not None, also writes them."""
    reports = []
    for report in evaluator(params) if evaluator else ():
        reports.append(report)
        if outlet is not None:
            outlet.write(report, int(folder.name), folder)
    return reports


def _is_removed(folder: epath.Path) -> bool:
    return not saved_params.is_complete_checkpoint(folder)
