"""`remixer-t5x eval`: checkpoints judged by the metrics of tasks; gin builds the arguments (configs/runs/eval.gin)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath
from rich import box
from rich.console import Console
from rich.table import Table

from remixer_t5x.checkpoints import saved_params, watch
from remixer_t5x.data import pipeline
from remixer_t5x.devices import collectives, partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluation import best, results, task_examples
from remixer_t5x.evaluation.task_evaluation import Report, TaskEvaluation, TaskEvaluator
from remixer_t5x.run_folder import model_dir

# The folder of an evaluation in the MODEL_DIR of the run.
EVAL = 'eval'
_PIPE_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """What is evaluated.

    `path`: a checkpoint, a MODEL_DIR (its newest), or several separated by commas. `follow` evaluates every checkpoint
    of one MODEL_DIR as it appears, until step `until` or so many seconds without a new one; None does not.
    """

    path: str
    follow: float | None = None
    until: int | None = None

    def __post_init__(self) -> None:
        if self.follow is not None and (not isinstance(self.follow, int | float) or self.follow < 0):
            raise UserError(f'FOLLOW is {self.follow!r}; it takes seconds without a new checkpoint, or None')

    def __call__(self, done: Collection[int]) -> Iterator[epath.Path]:
        """Their folders; when following, those of the steps in `done` are passed over."""
        if self.follow is None:
            yield from watch.find_all(self.path)
        else:
            yield from watch.follow(self.path, self.follow, self.until, done)


@dataclasses.dataclass(frozen=True)
class Submission:
    """Files for a leaderboard: `write(folder, task, rows)` makes the file of a task and says what people should know.

    `folder` None makes none. `knows(task)` says whether the leaderboard has the task. `split` is what it judges.
    """

    folder: str | None
    write: Callable[[str, str, Sequence[Mapping[str, Any]]], str]
    knows: Callable[[str], bool]
    split: str = 'test'


def run(
    model: Any,
    partitioner: partition.Partitioner,
    checkpoints: Checkpoints,
    tasks: TaskEvaluation,
    submission: Submission,
    output_dir: str | None = None,
) -> None:
    """Evaluates each checkpoint, prints a table for each, and writes metrics and predictions.

    Args:
        model: the model that was trained.
        partitioner: where parameters go.
        checkpoints: which ones.
        tasks: what they are judged on; a split of None leaves that out, for submission files alone.
        submission: whether files for a leaderboard are written too.
        output_dir: where results go, None for the folder `eval` beside `checkpoints`.
    """
    if checkpoints.follow is None:
        # Reading examples takes longer than a look at the folders.
        watch.find_all(checkpoints.path)
    session = _Session(model, partitioner, tasks, submission)
    # Of the first process alone, which writes for all.
    outlets: dict[str, results.Results] = {}
    try:
        for folder in _in_step(checkpoints(_done(checkpoints, output_dir, session))):
            params = session.restore(folder, skip_removed=checkpoints.follow is not None)
            if params is None:
                continue
            place = output_dir or str(_run_folder(folder) / EVAL)
            if place not in outlets and jax.process_index() == 0:
                outlets[place] = results.Results(place)
            session.evaluate(params, folder, outlets.get(place))
        for outlet in outlets.values():
            session.say(f'metrics      {outlet.folder / model_dir.METRICS}')
            session.say(f'predictions  {outlet.folder / results.PREDICTIONS}')
    finally:
        for outlet in outlets.values():
            outlet.close()


class _Session:
    """One model with the examples it is judged on, read once for all checkpoints."""

    def __init__(self, model: Any, partitioner: partition.Partitioner, tasks: TaskEvaluation, submission: Submission):
        self._submission = submission
        self._console = Console(
            file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=True
        )
        self.judge = TaskEvaluator(tasks, model, partitioner) if tasks.split is not None else None
        self._for_files = self._submitted(model, partitioner, tasks) if submission.folder else None
        reader = self.judge or self._for_files
        if reader is None:
            raise UserError('EVAL_SPLIT is None and there is no SUBMISSION_DIR, so nothing is evaluated; give one')
        self._vocabulary = pipeline.vocabulary_record(reader.vocabulary)
        lengths, size = tasks.decoding.feature_lengths, tasks.decoding.batch_size
        shapes = {
            'encoder_input_tokens': (size, lengths['inputs']),
            'decoder_target_tokens': (size, lengths['targets']),
        }
        self._abstract = saved_params.abstract_params(model, shapes, partitioner)
        for one in (self.judge, self._for_files):
            for note in one.notes if one else ():
                self.say(note)

    def _submitted(self, model: Any, partitioner: partition.Partitioner, tasks: TaskEvaluation) -> TaskEvaluator:
        """The tasks of the mixture that have a leaderboard, all examples of their split."""
        split = self._submission.split
        found, _ = task_examples.tasks_of(tasks.mixture_or_task_name, split, tasks.tasks)
        known = [task for task in found if self._submission.knows(task.name)]
        if not known:
            names = ', '.join(task.name for task in found)
            raise UserError(f'{names} cannot be submitted: there is no leaderboard; give tasks of GLUE or SuperGLUE')
        return TaskEvaluator(
            dataclasses.replace(tasks, mixture_or_task_name=known, tasks=None, split=split, examples=None),
            model,
            partitioner,
        )

    def restore(self, folder: epath.Path, skip_removed: bool) -> Any:
        """The parameters; None where the training run has removed them meanwhile and `skip_removed`."""
        if not (skip_removed and collectives.broadcast(_is_removed(folder))):
            try:
                return saved_params.restore_params(str(folder), self._abstract, self._vocabulary, watch.SETTING)
            except UserError:
                # Several processes would not all have come to the same point of reading.
                if not (skip_removed and jax.process_count() == 1 and _is_removed(folder)):
                    raise
        self.say(f'step {folder.name} was removed before its turn; KEEP_CHECKPOINTS keeps more')
        return None

    def evaluate(self, params: Any, folder: epath.Path, outlet: results.Results | None) -> None:
        """Judges the parameters of `folder`; only the process with an outlet writes."""
        step = int(folder.name)
        if self.judge is not None:
            reports = []
            for report in self.judge(params):
                reports.append(report)
                if outlet is not None:
                    outlet.write(report, step, folder)
            self._print(_table(reports, f'step {step}, {reports[0].split}'))
        if self._for_files is not None:
            for report in self._for_files(params):
                if outlet is not None:
                    outlet.write(report, step, folder)
                    self.say(self._submission.write(self._submission.folder or '', report.task, report.rows))

    def say(self, text: str) -> None:
        if jax.process_index() == 0:
            self._console.print(text, markup=False)
            sys.stdout.flush()

    def _print(self, table: Table) -> None:
        if jax.process_index() == 0:
            # Written by us, because rich would end the process itself when the reader of a pipe has left.
            with self._console.capture() as captured:
                self._console.print(table)
            sys.stdout.write(captured.get())
            sys.stdout.flush()


def _in_step(folders: Iterator[epath.Path]) -> Iterator[epath.Path]:
    """The folders that the first process finds, on every process: each for itself would see them at other moments."""
    own = folders if jax.process_index() == 0 else iter(())
    while folder := collectives.broadcast(str(next(own, ''))):
        yield epath.Path(folder)


def _is_removed(folder: epath.Path) -> bool:
    return not (folder / 'state').exists()


def _done(checkpoints: Checkpoints, output_dir: str | None, session: _Session) -> set[int]:
    """Steps that an earlier command, following the same folder, has evaluated."""
    if checkpoints.follow is None or session.judge is None:
        return set()
    place = output_dir or str(_run_folder(model_dir.absolute(checkpoints.path) / '0') / EVAL)
    return results.done(place, session.judge.split, session.judge.tasks)


def _run_folder(folder: epath.Path) -> epath.Path:
    """MODEL_DIR of the checkpoint in `folder`: above `checkpoints`, or above `best/<task>`."""
    parent = folder.parent
    if parent.name == model_dir.CHECKPOINTS:
        return parent.parent
    return parent.parent.parent if parent.parent.name == best.BEST else parent


def _table(reports: Sequence[Report], title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify='left')
    table.add_column('task', no_wrap=True)
    table.add_column('examples', justify='right')
    table.add_column('metric', no_wrap=True)
    table.add_column('value', justify='right')
    table.add_column('seconds', justify='right')
    for report in reports:
        head = (report.task, f'{len(report.rows):,}')
        metrics = list(report.metrics.items()) or [('no labels', float('nan'))]
        for number, (name, value) in enumerate(metrics):
            first = number == 0
            cells = (f'{value:.2f}' if report.metrics else '', f'{report.seconds:.1f}' if first else '')
            table.add_row(*(head if first else ('', '')), name, *cells)
    return table
