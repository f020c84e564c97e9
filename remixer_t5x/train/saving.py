"""The state of a run between its steps, its checkpoints, and bad steps: stop, skip, or rewind to a checkpoint."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.checkpoints import manager
from remixer_t5x.data import prefetch
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.optim import train_state
from remixer_t5x.run_folder import metrics
from remixer_t5x.train.run_log import RunLog
from remixer_t5x.train.settings import REWIND, SKIP, STOP

# Seconds to wait for a pending checkpoint if one of several processes fails.
CLOSING_SECONDS = 20.0
# After more bad steps in a row, or rewinds to one checkpoint, the run cannot recover.
MAX_SKIPPED_IN_A_ROW = 20
MAX_REWINDS = 5


@dataclasses.dataclass
class Patience:
    """Counts the evaluations since the best, and ends a run whose evaluations stop improving.

    The count is a part of the checkpoint, so a resumed run ends at the same step as an uninterrupted run.

    Attributes:
        most: number of evaluations in a row without a better one that ends the run; None never ends it.
        best: the highest value so far; None before the first.
        step: the step of that value.
        since: evaluations since then.
    """

    most: int | None = None
    best: float | None = None
    step: int = 0
    since: int = 0

    def record(self) -> dict[str, Any]:
        """Returns the count as JSON for a checkpoint."""
        return {'best': self.best, 'step': self.step, 'since': self.since}

    def observe(self, step: int, value: float) -> None:
        """Counts the evaluation of `step`; a higher `value` is better, NaN never."""
        value = collectives.broadcast(value)
        if value == value and (self.best is None or value > self.best):
            self.best, self.step, self.since = value, step, 0
        else:
            self.since += 1

    @property
    def is_over(self) -> bool:
        return self.most is not None and self.since >= self.most

    def reason(self) -> str:
        """Describes why the run is over."""
        return (
            f'no better evaluation than that of step {self.step} in the {self.since} since then '
            f'(STOP_AFTER_EVALUATIONS = {self.most})'
        )


@dataclasses.dataclass
class Current:
    """The state of a run between two steps, which steps and hooks change.

    Attributes:
        state: the train state after `step` updates. There must be no other reference to it, because a step donates its
            buffers.
        step: number of updates.
        window: metrics since the last log.
        saved: step of the newest checkpoint; None without a checkpoint.
        position: position in the data at which this process started.
        patience: the count of evaluations since the best.
    """

    state: train_state.TrainState
    step: int = 0
    window: metrics.MetricsWindow = dataclasses.field(default_factory=metrics.MetricsWindow)
    saved: int | None = None
    position: prefetch.Position = dataclasses.field(default_factory=prefetch.Position)
    patience: Patience = dataclasses.field(default_factory=Patience)


def restore(
    checkpoints: manager.Checkpoints, step: int, abstract: train_state.TrainState, patience: int | None
) -> Current:
    """Restores what `Saver` saved at `step` into the shapes and shardings of `abstract`.

    `patience` is `Patience.most`. Raises UserError or durable.DamagedCheckpoint.
    """
    saved = checkpoints.read_record(step)
    state, position = checkpoints.restore(step, abstract)
    counts = Patience(patience, **(saved.get('patience') or {}))
    return Current(state, step, metrics.MetricsWindow(saved['window']), step, position, counts)


class Rewind(Exception):
    """Raised if the run must go back to its last checkpoint; the text says why."""


class BadSteps:
    """Handles steps whose loss or gradient is not finite, or whose loss is a spike.

    The step itself left parameters and optimizer unchanged (`train_step`). `step` checks the previous step, whose
    metrics have arrived, so that the device never waits for the host; `now` waits for the newest step. `policy` is
    settings.Recovery's `on_bad_step`. Both raise UserError if the run has to stop, or Rewind.
    """

    def __init__(self, policy: str, checkpoints: manager.Checkpoints):
        self._policy, self._checkpoints = policy, checkpoints
        self._unread: tuple[int, Mapping[str, jax.Array]] | None = None
        self._in_a_row = 0
        self._rewinds: dict[int, int] = {}

    def step(self, number: int, step_metrics: Mapping[str, jax.Array]) -> None:
        """Stores the metrics of step `number`, and handles the previous step."""
        self.now()
        self._unread = (number, step_metrics)

    def now(self) -> None:
        """Handles the newest step."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        step, step_metrics = unread
        if float(step_metrics['nonfinite']) > 0:
            problem = 'the loss or its gradient is not finite'
        elif float(step_metrics.get('spike', 0.0)) > 0:
            problem = 'the loss is a spike (SPIKE_FACTOR)'
        else:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._policy != SKIP:
            self._rewind_or_stop(problem, step)
        if self._in_a_row > MAX_SKIPPED_IN_A_ROW:
            self._stop(f'{MAX_SKIPPED_IN_A_ROW} steps in a row were skipped: {problem}', step)

    def check_params(self, step: int, params: Any) -> None:
        """Handles parameters that are not finite, which a finite gradient can cause and no skipped step repairs."""
        self.now()
        if not bool(train_state.all_finite(params)):
            self._rewind_or_stop('a parameter is not finite', step)

    def count_rewind(self, step: int) -> int:
        """Counts a rewind to the checkpoint of `step`, and returns their number. Raises UserError after MAX_REWINDS."""
        self._unread = None
        self._rewinds[step] = self._rewinds.get(step, 0) + 1
        if self._rewinds[step] > MAX_REWINDS:
            self._stop(f'the run went back to step {step} {MAX_REWINDS} times and does not get past it', step)
        return self._rewinds[step]

    def _rewind_or_stop(self, problem: str, step: int) -> None:
        if self._policy == REWIND:
            raise Rewind(f'{problem} at step {step}')
        self._stop(problem, step)

    def _stop(self, problem: str, step: int) -> None:
        saved = self._checkpoints.latest_step()
        checkpoint = 'no checkpoint was saved yet'
        if saved is not None:
            checkpoint = f'the last good checkpoint is step {saved} in {self._checkpoints.folder}'
        other = ', or set ON_BAD_STEP to "skip" or "rewind"' if self._policy == STOP else ''
        raise UserError(
            f'{problem} at step {step}; {checkpoint}; lower the learning rate or lengthen its warmup, and look at the '
            f'data near that step{other}'
        )


class Saver:
    """Saves the state, the position of `batches` and the unfinished window; `go_back` restores the newest checkpoint.

    `record` describes the run, `abstract` its state. A failed write raises UserError, unless `goes_on` and another
    checkpoint will follow, before step `last_step`. With `saves_first`, a rewind may need the initial state.
    """

    def __init__(
        self,
        last_step: int,
        goes_on: bool,
        saves_first: bool,
        checkpoints: manager.Checkpoints,
        batches: prefetch.Prefetcher,
        guard: BadSteps,
        record: Mapping[str, Any],
        abstract: train_state.TrainState,
        log: RunLog,
    ):
        self._last_step, self._goes_on, self._saves_first = last_step, goes_on, saves_first
        self._checkpoints, self._batches, self._guard = checkpoints, batches, guard
        self._record, self._abstract, self._log = record, abstract, log

    def __call__(self, now: Current, is_last: bool = False) -> None:
        self._guard.check_params(now.step, now.state.params)
        with self._may_fail():
            # This write would wait for the previous write in any case.
            self._checkpoints.wait()
        record = {**self._record, 'window': now.window.totals(), 'patience': now.patience.record()}
        with self._may_fail(not is_last and now.step < self._last_step):
            try:
                # A resumed run does not write the records again that its checkpoint covers.
                self._log.flush()
                position = self._batches.position()
            except UserError as error:
                raise manager.SaveFailed(str(error)) from error
            self._checkpoints.save(now.step, now.state, position, record)
            now.saved = now.step

    def first(self, now: Current) -> None:
        """Saves the initial state if a rewind could need it."""
        if self._saves_first and now.saved is None:
            self(now)

    def last(self, now: Current) -> None:
        """Saves the last state unless a checkpoint has it. Returns once it is on disk."""
        if now.saved != now.step:
            with contextlib.suppress(Rewind):
                self(now, is_last=True)
        self._checkpoints.wait()

    def check(self) -> None:
        """Handles a failed write in the background."""
        with self._may_fail():
            self._checkpoints.check_for_errors()

    def go_back(self, now: Current, reason: Rewind) -> None:
        """Returns to the state and the log of the last checkpoint; batches continue after the bad batch."""
        self._checkpoints.wait()
        step = collectives.broadcast(self._checkpoints.latest_step())
        times = self._guard.count_rewind(step)
        self._log.say(f'{reason}: back to step {step} (time {times} of {MAX_REWINDS}), without the batches since then')
        # Both states together may not fit into the device's memory.
        del now.state
        restored = restore(self._checkpoints, step, self._abstract, now.patience.most)
        now.state, now.window, now.patience = restored.state, restored.window, restored.patience
        now.step = now.saved = step
        self._log.restart(step)

    @contextlib.contextmanager
    def _may_fail(self, may: bool = True) -> Iterator[None]:
        """Reports a failed write and continues with ON_SAVE_FAILURE = 'go_on', if another write follows.

        Several processes stop: the others wait for the part of this process.
        """
        try:
            yield
        except manager.SaveFailed as error:
            if not may or not self._goes_on or jax.process_count() > 1:
                raise
            self._log.say(f'warning: {error}; training continues (ON_SAVE_FAILURE)')
            self._checkpoints.reopen()


@contextlib.contextmanager
def opened(path: epath.Path, keep: int | None) -> Iterator[manager.Checkpoints]:
    """Opens the checkpoints of MODEL_DIR. The end of the block waits for a pending write."""
    checkpoints = manager.Checkpoints(path, keep)
    try:
        yield checkpoints
    except BaseException:

        def close() -> None:
            # The first error is more useful than an error of closing.
            with contextlib.suppress(Exception):
                checkpoints.close()

        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        # Closing waits for the other processes, which may wait for this one elsewhere.
        closing.join(None if jax.process_count() == 1 else CLOSING_SECONDS)
        raise
    checkpoints.close()
