"""Judges checkpoints by the metrics of tasks, and predicts test sets for leaderboards; reads each example once."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from etils import epath

from remixer_t5x import ranges
from remixer_t5x.checkpoints import saved_params, watch
from remixer_t5x.data import frames, task_vocabulary
from remixer_t5x.devices import collectives, partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import best, results, task_examples
from remixer_t5x.evaluate.task_evaluation import Report, TaskEvaluation, TaskEvaluator
from remixer_t5x.run_folder import model_dir

# The folder of an evaluation in the MODEL_DIR of the run.
EVAL = 'eval'


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints to evaluate.

    `path`: a checkpoint, a MODEL_DIR (its newest), or several separated by commas. `follow` evaluates every checkpoint
    of one MODEL_DIR as it appears, until step `until` or until `follow` seconds pass without a new checkpoint; None
    does not follow.
    """

    path: str
    follow: ranges.NonNegative | None = None
    until: ranges.Count | None = None

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    def check(self) -> None:
        """Raises UserError if there is no such checkpoint, before examples are read."""
        if self.follow is None:
            watch.find_all(self.path)

    def find(self, done: Collection[int]) -> Iterator[epath.Path]:
        """Their folders, the same on every process; when following, without the steps in `done`."""
        if self.follow is None:
            found = iter(watch.find_all(self.path))
        else:
            found = iter(watch.follow(self.path, self.follow, self.until, done))
        # The first process decides: each for itself would see checkpoints appear at other moments.
        own = found if jax.process_index() == 0 else iter(())
        while folder := collectives.broadcast(str(next(own, ''))):
            yield epath.Path(folder)


@dataclasses.dataclass(frozen=True)
class CheckpointEvaluation:
    """One evaluation of a model's checkpoints.

    `tasks`: what they are judged on; a split of None leaves that out, for submission files alone. `output_dir`: where
    results go, None for the folder `eval` of each run. `submission_dir`: where files for leaderboards go, of the split
    `submission_split`; None makes none.
    """

    model: Any
    partitioner: partition.Partitioner
    checkpoints: Checkpoints
    tasks: TaskEvaluation
    output_dir: str | None = None
    submission_dir: str | None = None
    submission_split: str = 'test'

    def folder_of_results(self, checkpoint: epath.Path) -> str:
        return self.output_dir or str(_run_folder(checkpoint) / EVAL)


class Evaluator:
    """A model with the examples it is judged on, read once for all checkpoints.

    Attributes:
        judge: for the metrics of tasks, None where no split is given.
        submitted: for leaderboards, None where no files are asked for.
        notes: what people should know about the examples.
    """

    def __init__(self, settings: CheckpointEvaluation, has_leaderboard: Callable[[str], bool]):
        """Reads the examples. Raises UserError where there is nothing to do, or no leaderboard for the tasks."""
        tasks, model, partitioner = settings.tasks, settings.model, settings.partitioner
        self._settings = settings
        self.judge = TaskEvaluator(tasks, model, partitioner) if tasks.split is not None else None
        self.submitted = self._submitted(has_leaderboard) if settings.submission_dir else None
        readers = [reader for reader in (self.judge, self.submitted) if reader]
        if not readers:
            raise UserError('EVAL_SPLIT is None and there is no SUBMISSION_DIR, so nothing is evaluated; give one')
        self.notes = [note for reader in readers for note in reader.notes]
        self._vocabulary = task_vocabulary.record(readers[0].vocabulary)
        lengths, size = tasks.decoding.feature_lengths, tasks.decoding.batch_size
        shapes = frames.batch_shapes(model.frame, lengths, size)
        self._abstract = saved_params.abstract_params(model, shapes, partitioner)

    def _submitted(self, has_leaderboard: Callable[[str], bool]) -> TaskEvaluator:
        """The tasks of the mixture that have a leaderboard, all examples of their split."""
        settings, tasks = self._settings, self._settings.tasks
        split = settings.submission_split
        found, _ = task_examples.tasks_of(tasks.mixture_or_task_name, split, tasks.tasks)
        known = [task for task in found if has_leaderboard(task.name)]
        if not known:
            names = ', '.join(task.name for task in found)
            raise UserError(f'{names} cannot be submitted: there is no leaderboard; give tasks of GLUE or SuperGLUE')
        whole = dataclasses.replace(tasks, mixture_or_task_name=known, tasks=None, split=split, examples=None)
        return TaskEvaluator(whole, settings.model, settings.partitioner)

    def done(self) -> set[int]:
        """Steps that an earlier command, following the same folder, has evaluated."""
        checkpoints = self._settings.checkpoints
        if checkpoints.follow is None or self.judge is None:
            return set()
        place = self._settings.folder_of_results(model_dir.absolute(checkpoints.path) / '0')
        return results.done(place, self.judge.split, self.judge.tasks)

    def restore(self, folder: epath.Path) -> Any:
        """The parameters; None where, while following, the training run has removed them meanwhile."""
        may_go = self._settings.checkpoints.follow is not None
        if may_go and collectives.broadcast(_is_removed(folder)):
            return None
        try:
            return saved_params.restore_params(str(folder), self._abstract, self._vocabulary, watch.SETTING)
        except UserError:
            # Several processes would not all have come to the same point of reading.
            if may_go and jax.process_count() == 1 and _is_removed(folder):
                return None
            raise

    def evaluate(self, params: Any, folder: epath.Path, outlet: results.Results | None) -> Sequence[Report]:
        """Judges the parameters of `folder` by tasks' metrics; writes them to `outlet`, if any."""
        return self._reports(self.judge, params, folder, outlet)

    def predict_submissions(self, params: Any, folder: epath.Path, outlet: results.Results | None) -> Sequence[Report]:
        """Predicts what leaderboards judge; writes the predictions to `outlet`, if any."""
        return self._reports(self.submitted, params, folder, outlet)

    def _reports(
        self, evaluator: TaskEvaluator | None, params: Any, folder: epath.Path, outlet: results.Results | None
    ) -> list[Report]:
        reports = []
        for report in evaluator(params) if evaluator else ():
            reports.append(report)
            if outlet is not None:
                outlet.write(report, int(folder.name), folder)
        return reports


def _is_removed(folder: epath.Path) -> bool:
    return not saved_params.is_complete(folder)


def _run_folder(folder: epath.Path) -> epath.Path:
    """MODEL_DIR of the checkpoint in `folder`: above `checkpoints`, or above `best/<task>`."""
    parent = folder.parent
    if parent.name == model_dir.CHECKPOINTS:
        return parent.parent
    return parent.parent.parent if parent.parent.name == best.BEST else parent
