"""The checkpoints of a run: saved when due and after the last step, and restored for a rewind."""

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
from remixer_t5x.optim.train_state import TrainState
from remixer_t5x.run_folder import metrics
from remixer_t5x.train import bad_steps, preemption, settings
from remixer_t5x.train.early_stopping import Patience
from remixer_t5x.train.run_log import RunLog
from remixer_t5x.train.start import Current

# Seconds to wait for a pending checkpoint if one of several processes fails.
CLOSING_SECONDS = 20.0


class Saver:
    """Saves the state, the position of `batches` and the unfinished window; `go_back` restores the newest of them.

    `record` describes the run, `abstract` its state. Raises UserError if a write fails, unless
    `recovery.on_save_failure` continues and another checkpoint will follow, before step `last_step`.
    """

    def __init__(
        self,
        recovery: settings.Recovery,
        last_step: int,
        checkpoints: Checkpoints,
        batches: Prefetcher,
        guard: bad_steps.BadSteps,
        record: Mapping[str, Any],
        abstract: TrainState,
        log: RunLog,
    ):
        self._recovery, self._last_step = recovery, last_step
        self._checkpoints, self._batches, self._guard = checkpoints, batches, guard
        self._record, self._abstract, self._log = record, abstract, log
        self._has_said_time = False

    def __call__(self, now: Current, is_last: bool = False) -> None:
        self._guard.params(now.step, now.state.params)
        with self._may_fail():
            # For the previous write, which this write would wait for in any case.
            self._checkpoints.wait()
        self._say_time()
        record = {
            **self._record,
            'window': now.window.totals(),
            'patience': now.patience.record(),
            'write_seconds': self._checkpoints.write_seconds,
        }
        with self._may_fail(not is_last and now.step < self._last_step):
            self._flush_log()
            self._checkpoints.save(now.step, now.state, self._batches.position(), record)
            now.saved = now.step

    def _flush_log(self) -> None:
        # A resumed run does not write the records again that its checkpoint covers.
        try:
            self._log.flush()
        except UserError as error:
            raise SaveFailed(str(error)) from error

    def first(self, now: Current) -> None:
        """Saves the state that the run starts from if a rewind could need it."""
        if self._recovery.on_bad_step == settings.REWIND and now.saved is None:
            self(now)

    def last(self, now: Current) -> None:
        """Saves the last state unless a checkpoint has it. Returns once it is on disk."""
        if now.saved != now.step:
            with contextlib.suppress(bad_steps.Rewind):
                self(now, is_last=True)
        self._checkpoints.wait()

    def check(self) -> None:
        """Handles a background write that has failed, and says once how long a write takes."""
        with self._may_fail():
            self._checkpoints.check_for_errors()
        self._say_time()

    def _say_time(self) -> None:
        seconds = self._checkpoints.write_seconds
        if seconds is not None and not self._has_said_time:
            self._has_said_time = True
            self._log.say(preemption.time_to_save(self._abstract, seconds, self._recovery.preemption_notice))

    def go_back(self, now: Current, reason: bad_steps.Rewind) -> None:
        """Returns to the state and the log of the last checkpoint; batches continue after the bad batch."""
        self._checkpoints.wait()
        step = collectives.broadcast(self._checkpoints.latest_step())
        times = self._guard.rewound(step)
        self._log.say(
            f'{reason}: back to step {step} (time {times} of {bad_steps.MOST_REWINDS}), without the batches since then'
        )
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
        """Reports a failed write and continues, if the user asks for that and another write will follow."""
        try:
            yield
        except SaveFailed as error:
            if not may or self._recovery.on_save_failure != settings.GO_ON:
                raise
            self._log.say(f'warning: {error}; training continues (ON_SAVE_FAILURE)')
            self._checkpoints.reopen()


@contextlib.contextmanager
def opened(path: epath.Path, keep: int | None) -> Iterator[Checkpoints]:
    """The checkpoints of MODEL_DIR. The end of the block waits for a pending write."""
    checkpoints = Checkpoints(path, keep)
    try:
        yield checkpoints
    except BaseException:
        # The first error is more useful than a second error during cleanup.
        closing = threading.Thread(target=_close_quietly, args=(checkpoints,), daemon=True)
        closing.start()
        # With several processes this waits for the other processes, which may wait for this one elsewhere.
        closing.join(None if jax.process_count() == 1 else CLOSING_SECONDS)
        raise
    checkpoints.close()


def _close_quietly(checkpoints: Checkpoints) -> None:
    with contextlib.suppress(Exception):
        checkpoints.close()
