"""Writes the numbers of a run to metrics.jsonl, its trackers, and the screen."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from remixer_t5x.checkpoints import config_changes
from remixer_t5x.evaluate import best
from remixer_t5x.optim import trainable
from remixer_t5x.optim.train_state import StatePlan
from remixer_t5x.run_folder import metrics, model_dir, object_store
from remixer_t5x.run_folder.trackers import TrackedRun, Tracker
from remixer_t5x.run_folder.tracking import Tracking
from remixer_t5x.train import goodput, learning_rate, progress
from remixer_t5x.train.goodput import Timeline
from remixer_t5x.train.settings import Learner


class RunLog:
    """Files and the screen of the first process; the other processes write and print nothing.

    Drops lines of earlier processes about steps after `step`, because this run takes those steps again.

    Args:
        path: MODEL_DIR.
        step: the step that the run starts from.
        last_step: the step that it trains to.
        work: what one step costs; `clock` measures the speed of steps with it.
        goes_on: whether the run continues if a file cannot be written.
        show: whether to print.
        timeline: where the time of this process goes.
        config_text: what trackers learn of the run's settings.
        is_new: the run has no checkpoint; drops all lines of earlier processes.
    """

    def __init__(
        self,
        path: epath.Path,
        step: int,
        last_step: int,
        work: progress.Work,
        goes_on: bool,
        show: bool,
        timeline: Timeline | None = None,
        config_text: str = '',
        is_new: bool = False,
    ):
        self._path, self._last_step, self._work, self._goes_on = path, last_step, work, goes_on
        self.timeline = timeline or Timeline()
        self._first = jax.process_index() == 0
        self._warned: set[str] = set()
        self._line = progress.ProgressLine(last_step, step, quiet=not (show and self._first))
        self._lines: metrics.JsonlWriter | None = None
        self._open(step, is_new)
        # Opened at the start, because a run that is finished already tracks nothing.
        self._tracked = TrackedRun(path, step, config_changes.bindings(config_text))
        self._tracking = Tracking((), self._tracked, self.say)

    def restart(self, step: int) -> None:
        """Drops what was logged after `step`, and measures time from now on."""
        self._open(step)
        self._tracking.rewind(step)

    def _open(self, step: int, is_new: bool = False) -> None:
        with self.may_fail():
            self.flush(closing=True)
        if self._first:
            lines = self._lines = metrics.JsonlWriter(self._path / model_dir.METRICS, -1 if is_new else step)
            if lines.rejected:
                number, reason = lines.rejected[0]
                self.say(
                    f'{model_dir.METRICS} had {len(lines.rejected)} lines that are not records (line {number}: '
                    f'{reason}); they are dropped, and the file as it was is {metrics.AS_FOUND}'
                )
        self.clock = progress.Clock(self._work, step)

    def start(
        self,
        learner: Learner,
        trackers: Sequence[Tracker],
        plan: StatePlan,
        notes: tuple[str, ...],
        message: str,
    ) -> None:
        """Opens trackers, and prints what is trained, where, and from which step."""
        if self._first:
            self._tracking = Tracking(trackers, self._tracked, self.say)
        parameters, trained = _size(plan.abstract.params), learner.optimizer.trainable
        mesh = ' x '.join(f'{name} {size}' for name, size in learner.partitioner.mesh.shape.items())
        self.say(f'{parameters:,} parameters · {jax.devices()[0].device_kind} · mesh {mesh}')
        if trained is not None:
            own, state = _size(trainable.split(plan.abstract.params, trained)[0]), plan.abstract.opt_state
            memory = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / 2**20
            self.say(f'{own:,} of them are trained ({100 * own / parameters:.2f}%) · optimizer state {memory:,.2f} MiB')
        for note in (*learning_rate.notes(learner.optimizer, self._last_step), *notes):
            self.say(note)
        self.say(f'{self._path}: {message} of {self._last_step}; the first step compiles')

    def say(self, text: str) -> None:
        self._line.say(text)

    def step(self, step: int) -> None:
        """Shows that `step` was taken."""
        self._line.update(step)

    def train(self, step: int, numbers: Mapping[str, float]) -> None:
        """The means of the steps since the last log, with their speed."""
        timing = self.clock.lap(step)
        self._write('train', step, numbers, timing)
        self._line.log(step, numbers, timing)

    def evaluation(self, kind: str, step: int, numbers: Mapping[str, float], seconds: float) -> None:
        self._write(kind, step, numbers, {'seconds': seconds})

    def _write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        self._tracking.write(kind, step, numbers, timing)
        with self.may_fail():
            if self._lines is not None:
                self._lines.write(kind, step, numbers, timing)

    def add_files(self, report: Callable[[str], str] | None) -> None:
        """Gives the files of the run to trackers that keep files; `report(MODEL_DIR)` writes a report there first."""
        if not self._tracking.takes_files:
            return
        self._tracking.add_files(model_dir.CONFIG, 'config', self._path / model_dir.CONFIG)
        for task, found in best.best_checkpoints(str(self._path)).items():
            self._tracking.add_files(f'best-{task}', 'model', epath.Path(found['path']))
        if report is not None:
            try:
                self._tracking.add_files('report', 'report', epath.Path(report(str(self._path))))
            except Exception as error:
                # The run is complete, with or without a report.
                self.say(f'warning: trackers get no report: {error}')

    def spent(self, first: int, last: int) -> dict[str, float]:
        """Keeps in MODEL_DIR where the time of this process went, which took steps from `first` to `last`."""
        seconds = self.timeline.seconds()
        if self._first:
            try:
                goodput.add(self._path, first, last, seconds)
            except object_store.CannotWrite as error:
                self.say(f'warning: {error}')
        return seconds

    @contextlib.contextmanager
    def may_fail(self) -> Iterator[None]:
        """Warns once of each file that cannot be written and continues, if the user asks for that."""
        try:
            yield
        except object_store.CannotWrite as error:
            is_new = str(error) not in self._warned
            self._warned.add(str(error))
            if not self._goes_on:
                raise
            if is_new:
                self.say(f'warning: {error}; training continues (ON_SAVE_FAILURE)')

    def flush(self, closing: bool = False) -> None:
        """Returns once a checkpoint may rely on what was logged. Raises UserError if it cannot be written."""
        if self._lines is not None:
            self._lines.close() if closing else self._lines.flush()

    def close(self) -> None:
        self._line.close()
        try:
            self.flush(closing=True)
        except object_store.CannotWrite as error:
            # Not raised: what has ended the run is more useful.
            if str(error) not in self._warned:
                print(f'warning: {error}', file=sys.stderr)
        self._tracking.close()


def _size(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))
