"""Saves the checkpoints of a run, and handles bad steps: stops, skips, or rewinds to the last checkpoint."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.checkpoints.manager import Checkpoints, SaveFailed
from remixer_t5x.data.prefetch import Prefetcher
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.optim import train_state
from remixer_t5x.optim.train_state import TrainState
from remixer_t5x.run_folder import metrics
from remixer_t5x.train import preemption, settings
from remixer_t5x.train.current import Current, Patience
from remixer_t5x.train.run_log import RunLog
from remixer_t5x.train.settings import REWIND, SKIP, STOP

# Seconds to wait for a pending checkpoint if one of several processes fails.
CLOSING_SECONDS = 20.0
# After more bad steps in a row, or rewinds to one checkpoint, the run cannot recover.
MAX_SKIPPED_IN_A_ROW = 20
MAX_REWINDS = 5


class Rewind(Exception):
    """Raised if the run must go back to its last checkpoint; the text says why."""


class BadSteps:
    """Handles steps whose loss or gradient is not finite, or whose loss is a spike.

    The step itself left parameters and optimizer unchanged (`train_step`). `step` checks the previous step, whose
    metrics have arrived, so that the device never waits for the host; `now` waits for the newest step. `policy` is
    settings.Recovery's `on_bad_step`. Both raise UserError if the run has to stop, or Rewind.
    """

    def __init__(self, policy: str, checkpoints: Checkpoints):
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
            self._handle('the loss or its gradient is not finite', step)
        elif float(step_metrics.get('spike', 0.0)) > 0:
            self._handle('the loss is a spike (SPIKE_FACTOR)', step)
        else:
            self._in_a_row = 0

    def params(self, number: int, params: Any) -> None:
        """Handles parameters that are not finite, which a finite gradient can cause and no skipped step repairs."""
        self.now()
        if not bool(train_state.all_finite(params)):
            text = 'a parameter is not finite'
            if self._policy == REWIND:
                raise Rewind(f'{text} at step {number}')
            self._stop(text, number)

    def rewound(self, step: int) -> int:
        """Counts a rewind to the checkpoint of `step`, and returns their number. Raises UserError after MAX_REWINDS."""
        self._unread = None
        self._rewinds[step] = self._rewinds.get(step, 0) + 1
        if self._rewinds[step] > MAX_REWINDS:
            self._stop(f'the run went back to step {step} {MAX_REWINDS} times and does not get past it', step)
        return self._rewinds[step]

    def _handle(self, text: str, step: int) -> None:
        self._in_a_row += 1
        if self._policy == REWIND:
            raise Rewind(f'{text} at step {step}')
        if self._policy != SKIP:
            self._stop(text, step)
        if self._in_a_row > MAX_SKIPPED_IN_A_ROW:
            self._stop(f'{MAX_SKIPPED_IN_A_ROW} steps in a row were skipped: {text}', step)

    def _stop(self, text: str, step: int) -> None:
        saved = self._checkpoints.latest_step()
        checkpoint = 'no checkpoint was saved yet'
        if saved is not None:
            checkpoint = f'the last good checkpoint is step {saved} in {self._checkpoints.folder}'
        other = ', or set ON_BAD_STEP to "skip" or "rewind"' if self._policy == STOP else ''
        raise UserError(
            f'{text} at step {step}; {checkpoint}; lower the learning rate or lengthen its warmup, and look at the '
            f'data near that step{other}'
        )


class Saver:
    """Saves the state, the position of `batches` and the unfinished window; `go_back` restores the newest checkpoint.

    `record` describes the run, `abstract` its state. Raises UserError if a write fails, unless
    `recovery.on_save_failure` continues and another checkpoint will follow, before step `last_step`.
    """

    def __init__(
        self,
        recovery: settings.Recovery,
        last_step: int,
        checkpoints: Checkpoints,
        batches: Prefetcher,
        guard: BadSteps,
        record: Mapping[str, Any],
        abstract: TrainState,
        log: RunLog,
    ):
        self._recovery, self._last_step = recovery, last_step
        self._checkpoints, self._batches, self._guard = checkpoints, batches, guard
        self._record, self._abstract, self._log = record, abstract, log
        self._has_reported_time = False

    def __call__(self, now: Current, is_last: bool = False) -> None:
        self._guard.params(now.step, now.state.params)
        with self._may_fail():
            # This write would wait for the previous write in any case.
            self._checkpoints.wait()
        self._report_time()
        record = {
            **self._record,
            'window': now.window.totals(),
            'patience': now.patience.record(),
            'write_seconds': self._checkpoints.write_seconds,
        }
        with self._may_fail(not is_last and now.step < self._last_step):
            try:
                # A resumed run does not write again the records that its checkpoint covers.
                self._log.flush()
                position = self._batches.position()
            except UserError as error:
                raise SaveFailed(str(error)) from error
            self._checkpoints.save(now.step, now.state, position, record)
            now.saved = now.step

    def first(self, now: Current) -> None:
        """Saves the initial state if a rewind could need it."""
        if self._recovery.on_bad_step == REWIND and now.saved is None:
            self(now)

    def last(self, now: Current) -> None:
        """Saves the last state unless a checkpoint has it. Returns once it is on disk."""
        if now.saved != now.step:
            with contextlib.suppress(Rewind):
                self(now, is_last=True)
        self._checkpoints.wait()

    def check(self) -> None:
        """Handles a failed write in the background, and reports once how long a write takes."""
        with self._may_fail():
            self._checkpoints.check_for_errors()
        self._report_time()

    def _report_time(self) -> None:
        seconds = self._checkpoints.write_seconds
        if seconds is not None and not self._has_reported_time:
            self._has_reported_time = True
            self._log.say(preemption.time_to_save(self._abstract, seconds, self._recovery.preemption_notice))

    def go_back(self, now: Current, reason: Rewind) -> None:
        """Returns to the state and the log of the last checkpoint; batches continue after the bad batch."""
        self._checkpoints.wait()
        step = collectives.broadcast(self._checkpoints.latest_step())
        times = self._guard.rewound(step)
        self._log.say(f'{reason}: back to step {step} (time {times} of {MAX_REWINDS}), without the batches since then')
        # Both states together may not fit into the device's memory.
        del now.state
        now.state, _ = self._checkpoints.restore(step, self._abstract)
        saved = self._checkpoints.run(step)
        now.window = metrics.Window(saved['window'])
        now.patience = Patience.restored(now.patience.most, saved.get('patience'))
        now.step = now.saved = step
        self._log.restart(step)

    @contextlib.contextmanager
    def _may_fail(self, may: bool = True) -> Iterator[None]:
        """Reports a failed write and continues with ON_SAVE_FAILURE = 'go_on', if another write follows.

        Several processes stop: the others wait for the part of this process.
        """
        try:
            yield
        except SaveFailed as error:
            if not may or self._recovery.on_save_failure != settings.GO_ON or jax.process_count() > 1:
                raise
            self._log.say(f'warning: {error}; training continues (ON_SAVE_FAILURE)')
            self._checkpoints.reopen()


@contextlib.contextmanager
def opened(path: epath.Path, keep: int | None) -> Iterator[Checkpoints]:
    """Opens the checkpoints of MODEL_DIR. The end of the block waits for a pending write."""
    checkpoints = Checkpoints(path, keep)
    try:
        yield checkpoints
    except BaseException:
        # The first error is more useful than a second error during cleanup.
        closing = threading.Thread(target=_close_quietly, args=(checkpoints,), daemon=True)
        closing.start()
        # Closing waits for the other processes, which may wait for this one elsewhere.
        closing.join(None if jax.process_count() == 1 else CLOSING_SECONDS)
        raise
    checkpoints.close()


def _close_quietly(checkpoints: Checkpoints) -> None:
    with contextlib.suppress(Exception):
        checkpoints.close()
