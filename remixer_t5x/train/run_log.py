"""Writes the metrics of a run to metrics.jsonl, its trackers, and the screen."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from remixer_t5x.checkpoints import changes
from remixer_t5x.evaluate import best
from remixer_t5x.optim import trainable
from remixer_t5x.optim.optimizer import Optimizer
from remixer_t5x.optim.train_state import StatePlan
from remixer_t5x.run_folder import metrics, model_dir, object_store, trackers
from remixer_t5x.train import progress
from remixer_t5x.train.settings import Learner

# Steps at which the schedule is sampled; a longer schedule is smooth between them.
_SAMPLES = 1000


class RunLog:
    """Writes files and prints in the first process; the other processes write and print nothing.

    Drops lines of earlier processes about steps after `step`, because this run takes these steps again.

    Args:
        path: MODEL_DIR.
        step: the step that the run starts from.
        last_step: the step that it trains to.
        work: the cost of one step, from which `clock` computes the speed.
        goes_on: whether the run continues if a file cannot be written.
        show: whether to print.
        timeline: measures what this process spends its time on.
        is_new: whether the run has no checkpoint; drops all lines of earlier processes.
    """

    def __init__(
        self,
        path: epath.Path,
        step: int,
        last_step: int,
        work: progress.Work,
        goes_on: bool,
        show: bool,
        timeline: progress.Timeline | None = None,
        is_new: bool = False,
    ):
        self._path, self._step, self._last_step, self._work, self._goes_on = path, step, last_step, work, goes_on
        self.timeline = timeline or progress.Timeline()
        self._is_first_process = jax.process_index() == 0
        self._warned: set[str] = set()
        self._line = progress.ProgressLine(last_step, step, quiet=not (show and self._is_first_process))
        self._lines: metrics.JsonlWriter | None = None
        # Trackers are opened in `start`, because a run that is finished already tracks nothing.
        self._trackers = trackers.Tracking((), trackers.TrackedRun(path, step, {}), self.say)
        self._open(-1 if is_new else step)
        self.clock = progress.Clock(work, step)

    def restart(self, step: int) -> None:
        """Drops the lines after `step`, and measures time from now on."""
        with self.may_fail():
            self.flush(closing=True)
        self._open(step)
        self.clock = progress.Clock(self._work, step)
        self._trackers.rewind(step)

    def _open(self, step: int) -> None:
        if self._is_first_process:
            self._lines = metrics.JsonlWriter(self._path / model_dir.METRICS, step)

    def start(
        self, learner: Learner, used: Sequence[trackers.Tracker], config: str, plan: StatePlan, notes: Sequence[str]
    ) -> None:
        """Opens the trackers `used`, and prints the model, the devices, notes, and the first step.

        `config` is the operative gin, whose settings trackers show.
        """
        if self._is_first_process:
            tracked = trackers.TrackedRun(self._path, self._step, changes.parse_bindings(config))
            self._trackers = trackers.Tracking(used, tracked, self.say)
        parameters, trained = _size(plan.abstract.params), learner.optimizer.trainable
        mesh = ' x '.join(f'{name} {size}' for name, size in learner.partitioner.mesh.shape.items())
        self.say(f'{parameters:,} parameters · {jax.devices()[0].device_kind} · mesh {mesh}')
        if trained is not None:
            size, state = _size(trainable.split(plan.abstract.params, trained)[0]), plan.abstract.opt_state
            memory = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / 2**20
            share = 100 * size / parameters
            self.say(f'{size:,} of them are trained ({share:.2f}%) · optimizer state {memory:,.2f} MiB')
        for note in (*learning_rate_notes(learner.optimizer, self._last_step), *notes):
            self.say(note)
        begins = f'resuming at step {self._step}' if self._step else 'starting at step 0'
        self.say(f'{self._path}: {begins} of {self._last_step}; the first step compiles')

    def say(self, text: str) -> None:
        self._line.say(text)

    def step(self, step: int) -> None:
        """Shows the step on the progress line."""
        self._line.update(step)

    def train(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs the means of the steps since the last log, with their speed."""
        timing = self.clock.lap(step)
        self._write('train', step, numbers, timing)
        self._line.log(step, numbers, timing)

    def evaluation(self, kind: str, step: int, numbers: Mapping[str, float], seconds: float) -> None:
        self._write(kind, step, numbers, {'seconds': seconds})

    def _write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        self._trackers.write(kind, step, numbers, timing)
        with self.may_fail():
            if self._lines is not None:
                self._lines.write(kind, step, numbers, timing)

    def add_files(self, report: Callable[[str], str] | None) -> None:
        """Uploads the run's files to trackers that store files, after writing a report with `report(MODEL_DIR)`."""
        if not self._trackers.takes_files:
            return
        self._trackers.add_files(model_dir.CONFIG, 'config', self._path / model_dir.CONFIG)
        for task, record in best.best_checkpoints(str(self._path)).items():
            self._trackers.add_files(f'best-{task}', 'model', epath.Path(record['path']))
        if report is not None:
            try:
                self._trackers.add_files('report', 'report', epath.Path(report(str(self._path))))
            except Exception as error:
                # The run is complete, with or without a report.
                self.say(f'warning: the report cannot be written: {error}')

    def write_times(self, first: int, last: int) -> dict[str, float]:
        """Writes to MODEL_DIR what the time since step `first` was spent on, and returns seconds by name."""
        seconds = self.timeline.seconds()
        if self._is_first_process:
            try:
                progress.add_times(self._path, first, last, seconds)
            except object_store.CannotWrite as error:
                self.say(f'warning: {error}')
        return seconds

    @contextlib.contextmanager
    def may_fail(self) -> Iterator[None]:
        """Warns once of each file that cannot be written and continues, if `goes_on`; otherwise raises."""
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
        """Returns once all records are stored. Raises UserError if they cannot be written."""
        if self._lines is not None:
            self._lines.close() if closing else self._lines.flush()

    def close(self) -> None:
        self._line.close()
        try:
            self.flush(closing=True)
        except object_store.CannotWrite as error:
            # Not raised, because the error that ended the run is more useful.
            if str(error) not in self._warned:
                print(f'warning: {error}', file=sys.stderr)
        self._trackers.close()


def learning_rate_notes(optimizer: Optimizer, steps: int) -> Iterator[str]:
    """Yields a line with the start, peak and end of the learning rate, and a warning above `optimizer.highest_rate`.

    Yields nothing for an optimizer whose rate is not known.
    """
    if optimizer.learning_rate is None:
        return
    at = np.unique(np.linspace(0, steps - 1, min(steps, _SAMPLES)).round().astype(np.int32))
    rates = np.asarray(jax.jit(jax.vmap(optimizer.learning_rate))(at))
    peak = int(rates.argmax())
    parts = [f'{rates[0]:.3g} at step 1']
    if 0 < peak < len(at) - 1:
        parts.append(f'{rates[peak]:.3g} at step {at[peak] + 1:,}')
    if len(at) > 1:
        parts.append(f'{rates[-1]:.3g} at step {steps:,}')
    constant = rates.min() == rates.max()
    yield f'learning rate: {rates[0]:.3g}' if constant else f'learning rate: {", ".join(parts)}'
    highest = optimizer.highest_rate
    if highest is not None and rates[peak] > highest:
        yield (
            f'warning: the learning rate reaches {rates[peak]:.3g}. This optimizer changes a parameter by about that '
            f'fraction of its size at each step, and T5 is trained with 0.01 to 0.02; lower LEARNING_RATE to at most '
            f'{highest:g}'
        )


def _size(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))
