"""Saves and restores the state of a run. Handles bad steps by stopping the run, skipping the update or rewinding."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.checkpoints import checkpoint_manager, saved_params
from remixer_t5x.data import prefetch
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.optim.train_state import TrainState, all_finite
from remixer_t5x.run_folder import metrics
from remixer_t5x.train.run_log import RunLog
from remixer_t5x.train.settings import CONTINUE, REWIND, SKIP, STOP, Recovery

# Maximum number of seconds to wait for a pending checkpoint write if one of several processes fails.
CLOSING_SECONDS = 20.0
# Maximum number of consecutive skipped steps.
MAX_SKIPPED_IN_A_ROW = 20
# Maximum number of rewinds to the same checkpoint.
MAX_REWINDS = 5


@dataclasses.dataclass
class EarlyStopping:
    """Counts the evaluations since the best evaluation, for early stopping.

    Checkpoints contain the count, so a resumed run stops at the same step as an uninterrupted run. `limit` is the
    maximum number of consecutive evaluations without improvement, or None to disable early stopping; `best` is the
    highest value so far, reached at `step`; `since` is the number of evaluations after `step`; and `evaluated`
    identifies the examples and settings of the evaluations.
    """

    limit: int | None = None
    best: float | None = None
    step: int = 0
    since: int = 0
    evaluated: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {'best': self.best, 'step': self.step, 'since': self.since, 'evaluated': self.evaluated}

    def add_evaluation(self, step: int, value: float, evaluated: str | None = None) -> None:
        """Records the `value` of the evaluation at `step`, for which higher is better.

        A non-finite value is never the best. Before the first finite value, evaluations are not counted, because
        the correlation of constant predictions is NaN. If `evaluated` differs from the previous evaluation, earlier
        evaluations are ignored, because their values are not comparable.
        """
        if evaluated != self.evaluated and self.evaluated is not None:
            self.best, self.since = None, 0
        self.evaluated = evaluated
        if math.isfinite(value) and (self.best is None or value > self.best):
            self.best, self.step, self.since = value, step, 0
        elif self.best is not None:
            self.since += 1

    @property
    def is_exhausted(self) -> bool:
        return self.limit is not None and self.since >= self.limit

    def describe_early_stop(self) -> str:
        return (
            f'no better evaluation since step {self.step} ({self.since} without improvement, '
            f'STOP_AFTER_EVALUATIONS = {self.limit})'
        )


@dataclasses.dataclass
class RunState:
    """The state of a run between two steps, which the loop and its hooks update.

    Do not keep other references to `train_state`, because the train step donates its buffers. `is_evaluated` is False
    if the evaluations of `step` have not finished: in a new run, and in a run that a signal stopped during an
    evaluation. `window` contains the metrics of the steps since the last log, and `position` is the data position at
    which this process started. `saved_step` is the step of the newest checkpoint, or None.
    """

    train_state: TrainState
    step: int = 0
    is_evaluated: bool = False
    window: metrics.MetricsWindow = dataclasses.field(default_factory=metrics.MetricsWindow)
    saved_step: int | None = None
    position: prefetch.DataPosition = dataclasses.field(default_factory=prefetch.DataPosition)
    patience: EarlyStopping = dataclasses.field(default_factory=EarlyStopping)


def restore_state(
    checkpoints: checkpoint_manager.RunCheckpoints,
    step: int,
    abstract: TrainState,
    record: Mapping[str, Any],
    patience: EarlyStopping,
    changed: str = '',
) -> RunState:
    """Restores the state that `CheckpointSaver` saved at `step`, with the shapes and shardings of `abstract`.

    `record` is the checkpoint's run record, which includes the metrics window and the state of `patience`. `changed`
    lists the changed settings for error messages. Raises UserError if the checkpoint does not fit the model, and
    durable_folders.DamagedCheckpointError if it is damaged.
    """
    restored, position = checkpoints.restore(step, abstract, changed)
    patience = dataclasses.replace(patience, **(record.get('patience') or {}))
    window, is_evaluated = metrics.MetricsWindow(record['window']), record.get('is_evaluated', True)
    return RunState(restored, step, is_evaluated, window, step, position, patience)


class RewindRequested(Exception):
    """Signals that the run must return to its last checkpoint; the message contains the reason."""


class BadStepHandler:
    """Handles bad steps: steps in which the loss or gradient is not finite, or the loss spikes.

    In a bad step, the train step leaves the parameters and the optimizer state unchanged. `add_step_metrics` checks the
    metrics of the previous step, so that the device never waits for the host. The methods raise RewindRequested if the
    run must rewind, and UserError if it must stop. `policy` is the value of `Recovery.on_bad_step`.
    """

    def __init__(self, policy: str, checkpoints: checkpoint_manager.RunCheckpoints):
        self._policy, self._checkpoints = policy, checkpoints
        self._unchecked: tuple[int, Mapping[str, jax.Array]] | None = None
        self._in_a_row = 0
        self._rewinds: dict[int, int] = {}

    def add_step_metrics(self, step: int, step_metrics: Mapping[str, jax.Array]) -> None:
        """Checks the metrics of the previous step, and stores the metrics of the current step."""
        self.check_last_step()
        self._unchecked = (step, step_metrics)

    def check_last_step(self) -> None:
        """Waits for the metrics of the most recently added step, and checks them."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is None:
            return
        step, step_metrics = unchecked
        if float(step_metrics['nonfinite']) > 0:
            problem = 'the loss or its gradient is not finite'
        elif float(step_metrics.get('spike', 0.0)) > 0:
            problem = 'the loss spiked (SPIKE_FACTOR)'
        else:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._policy != SKIP:
            self._rewind_or_stop(problem, step)
        if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self._stop_run(f'{MAX_SKIPPED_IN_A_ROW} steps in a row were skipped: {problem}', step)

    def check_params_finite(self, step: int, params: Any) -> None:
        """Rewinds or stops the run if a parameter is not finite.

        A finite gradient can make a parameter infinite, and skipping later updates cannot undo this.
        """
        self.check_last_step()
        if not bool(all_finite(params)):
            self._rewind_or_stop('a parameter is not finite', step)

    def count_rewind(self, step: int) -> int:
        """Counts a rewind to step `step`, and returns the count. Raises UserError after MAX_REWINDS rewinds."""
        self._unchecked = None
        self._rewinds[step] = self._rewinds.get(step, 0) + 1
        if self._rewinds[step] > MAX_REWINDS:
            self._stop_run(f'the run was rewound to step {step} {MAX_REWINDS} times and failed again each time', step)
        return self._rewinds[step]

    def _rewind_or_stop(self, problem: str, step: int) -> None:
        if self._policy == REWIND:
            raise RewindRequested(f'{problem} at step {step}')
        self._stop_run(problem, step)

    def _stop_run(self, problem: str, step: int) -> None:
        latest = self._checkpoints.latest_step()
        checkpoint = 'no checkpoint has been saved yet'
        if latest is not None:
            checkpoint = f'the last good checkpoint is step {latest} in {self._checkpoints.folder}'
        other = ', or set ON_BAD_STEP to "skip" or "rewind"' if self._policy == STOP else ''
        raise UserError(
            f'{problem} at step {step}; {checkpoint}; lower the learning rate or lengthen its warmup, and look at the '
            f'data near that step{other}'
        )


@dataclasses.dataclass
class CheckpointSaver:
    """Saves checkpoints that contain the train state, the data position and the metrics since the last log.

    `record` is a description of the run that each checkpoint stores, and `abstract` contains the shapes and shardings
    of the train state. The log is flushed before each checkpoint is saved, and rewound when the run is rewound.
    """

    recovery: Recovery
    last_step: int
    checkpoints: checkpoint_manager.RunCheckpoints
    batches: prefetch.Prefetcher
    bad_steps: BadStepHandler
    record: Mapping[str, Any]
    abstract: TrainState
    log: RunLog

    def __call__(self, state: RunState, is_last: bool = False) -> None:
        """Starts saving the state. Raises UserError if this or the previous checkpoint cannot be written."""
        self.bad_steps.check_params_finite(state.step, state.train_state.params)
        with self._tolerate_save_failure():
            # Wait for the previous write here, although Orbax would also wait, to handle its failure separately.
            self.checkpoints.wait_until_finished()
        record = {
            **self.record,
            'window': state.window.compute_totals(),
            'patience': state.patience.to_json(),
            'is_evaluated': state.is_evaluated,
        }
        with self._tolerate_save_failure(another_follows=not is_last and state.step < self.last_step):
            try:
                # Flush the log first, because a resumed run does not repeat the records of steps before its checkpoint.
                self.log.flush()
                position = self.batches.get_position()
            except UserError as error:
                raise checkpoint_manager.CheckpointSaveError(str(error)) from error
            self.checkpoints.save(state.step, state.train_state, position, record)
            state.saved_step = state.step

    def save_initial_state(self, state: RunState) -> None:
        """Saves the initial state if the run might rewind to it."""
        if self.recovery.on_bad_step == REWIND and state.saved_step is None:
            self(state)

    def save_final_state(self, state: RunState) -> None:
        """Saves the final state if necessary, and waits until the checkpoint is on disk. Rewinds after a bad step."""
        if state.saved_step != state.step:
            try:
                self(state, is_last=True)
            except RewindRequested as reason:
                self.rewind_run(state, reason)
        self.checkpoints.wait_until_finished()

    def log_mean_metrics(self, state: RunState) -> None:
        """Logs the mean metrics of the steps since the last log, and handles failed checkpoint writes."""
        numbers = metrics.compute_means(state.window.compute_totals())
        state.window = metrics.MetricsWindow()
        self.log.log_train_metrics(state.step, numbers)
        with self._tolerate_save_failure():
            self.checkpoints.check_for_errors()

    def rewind_run(self, state: RunState, reason: RewindRequested) -> None:
        """Restores the newest checkpoint and rewinds the log. Training continues after the bad batch."""
        with self._tolerate_save_failure():
            self.checkpoints.wait_until_finished()
        step = collectives.broadcast(self.checkpoints.latest_step())
        if step is None:
            raise UserError(f'{reason}, but no earlier checkpoint could be written; free space in MODEL_DIR')
        count = self.bad_steps.count_rewind(step)
        self.log.print(
            f'{reason}: rewinding to step {step} ({count} of at most {MAX_REWINDS} times) and skipping these batches'
        )
        # Delete the old state first, because both states may not fit into device memory.
        del state.train_state
        record = saved_params.read_record(self.checkpoints.folder / str(step))
        restored = restore_state(self.checkpoints, step, self.abstract, record, state.patience)
        state.train_state, state.window, state.patience = restored.train_state, restored.window, restored.patience
        state.step = state.saved_step = step
        state.is_evaluated = restored.is_evaluated
        self.log.rewind_records(step, restored.is_evaluated)

    @contextlib.contextmanager
    def _tolerate_save_failure(self, another_follows: bool = True) -> Iterator[None]:
        """Raises an error for a failed write, or only warns if ON_SAVE_FAILURE is 'continue' and another write follows.

        With several processes, always raises the error, because the other processes wait for this process.
        """
        try:
            yield
        except checkpoint_manager.CheckpointSaveError as error:
            if not another_follows or self.recovery.on_save_failure != CONTINUE or jax.process_count() > 1:
                raise
            self.log.print(f'warning: {error}; training continues (ON_SAVE_FAILURE)')
            self.checkpoints.reopen()


@contextlib.contextmanager
def open_checkpoints(path: epath.Path, keep: int | None) -> Iterator[checkpoint_manager.RunCheckpoints]:
    """Opens the checkpoints of MODEL_DIR, and waits for pending writes at the end of the `with` block."""
    checkpoints = checkpoint_manager.RunCheckpoints(path, keep)
    try:
        yield checkpoints
    except BaseException:

        def close_checkpoints() -> None:
            # Ignore errors while closing, because the first error is more useful.
            with contextlib.suppress(Exception):
                checkpoints.close()

        closing = threading.Thread(target=close_checkpoints, daemon=True)
        closing.start()
        # Limit the time to wait, because other processes may be waiting for this process at another barrier.
        closing.join(None if jax.process_count() == 1 else CLOSING_SECONDS)
        raise
    checkpoints.close()
