"""Logs the metrics of a run to metrics.jsonl, the trackers and the terminal."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from remixer_t5x.checkpoints import compatibility
from remixer_t5x.optim import trainable
from remixer_t5x.optim.train_state import TrainStatePlan
from remixer_t5x.run_folder import metrics, model_dir, object_store, trackers
from remixer_t5x.train import progress
from remixer_t5x.train.settings import StepConfig


class RunLog:
    """Writes metrics to metrics.jsonl and the trackers, and prints progress. Only the first process writes and prints.

    Removes the records of steps after `step` from metrics.jsonl, because this process repeats these steps. Unless
    `is_evaluated`, also removes the evaluations of `step`. If `tolerates_failures` is true, the run continues if a file
    cannot be written. `path` is the absolute path of MODEL_DIR.
    """

    def __init__(
        self,
        path: epath.Path,
        *,
        step: int,
        last_step: int,
        cost: progress.StepCost,
        tolerates_failures: bool,
        show: bool,
        timeline: progress.ActivityTimer | None = None,
        is_evaluated: bool = True,
    ):
        self.path, self._step, self._last_step, self._cost = path, step, last_step, cost
        self.is_new = step == 0 and not is_evaluated
        self._restored_step = -1 if self.is_new else step
        self._tolerates_failures = tolerates_failures
        self.timeline = timeline or progress.ActivityTimer()
        self._is_first_process = jax.process_index() == 0
        self._warned: set[str] = set()
        self._prints = show and self._is_first_process
        self._records: metrics.JsonlWriter | None = None
        # `start` opens the trackers. If the run is already finished, `start` is not called.
        self._trackers = trackers.BackgroundTrackers((), trackers.TrackedRun(path, self._restored_step, {}), self.print)
        self._open_records(self._restored_step, is_evaluated)
        self.clock = progress.SpeedMeter(cost, step, self.timeline)

    def rewind_records(self, step: int, is_evaluated: bool) -> None:
        """Restarts the clock. Removes records after `step` and, unless `is_evaluated`, the evaluations of `step`."""
        with self.tolerate_write_errors():
            self.flush()
        self._open_records(step, is_evaluated)
        self.clock = progress.SpeedMeter(self._cost, step, self.timeline)
        self._trackers.rewind(step)

    def _open_records(self, step: int, is_evaluated: bool) -> None:
        if self._is_first_process:
            self._records = metrics.JsonlWriter(self.path / model_dir.METRICS, step, is_evaluated)

    def start(
        self,
        step_config: StepConfig,
        plan: TrainStatePlan,
        used_trackers: Sequence[trackers.Tracker],
        config: str,
        notes: Sequence[str],
    ) -> None:
        """Opens the trackers with the settings in `config`, and prints the model size, the devices and `notes`."""
        if self._is_first_process:
            tracked = trackers.TrackedRun(self.path, self._restored_step, compatibility.parse_bindings(config))
            self._trackers = trackers.BackgroundTrackers(used_trackers, tracked, self.print)
        optimizer, parameters = step_config.optimizer, _count_parameters(plan.abstract.params)
        mesh = ' x '.join(f'{name} {size}' for name, size in step_config.partitioner.mesh.shape.items())
        self.print(f'{parameters:,} parameters · {jax.devices()[0].device_kind} · mesh {mesh}')
        if optimizer.trainable is not None:
            trained = _count_parameters(trainable.split_params(plan.abstract.params, optimizer.trainable)[0])
            leaves = jax.tree.leaves(plan.abstract.opt_state)
            memory = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 2**20
            share = 100 * trained / parameters
            self.print(f'{trained:,} of them are trained ({share:.2f}%) · optimizer state {memory:,.2f} MiB')
        for note in notes:
            self.print(note)
        start = f'resuming at step {self._step}' if self._step else 'starting at step 0'
        self.print(f'{self.path}: {start} of {self._last_step}; the first step compiles')

    def print(self, text: str) -> None:
        if self._prints:
            # Flush the output, because lines written to a pipe would otherwise stay in the buffer until it is full.
            print(text, flush=True)

    def log_train_metrics(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs `numbers`, the mean metrics of the steps since the last log, and the speed of these steps."""
        timing = self.clock.measure_speed(step)
        self._write_record(metrics.TRAIN_KIND, step, numbers, timing)
        self.print(progress.format_progress(step, self._last_step, numbers, timing))

    def log_evaluation(self, kind: str, step: int, numbers: Mapping[str, float], seconds: float) -> None:
        self._write_record(kind, step, numbers, {'seconds': seconds})

    def _write_record(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        self._trackers.write(kind, step, numbers, timing)
        with self.tolerate_write_errors():
            if self._records is not None:
                self._records.write(kind, step, numbers, timing)

    @contextlib.contextmanager
    def tolerate_write_errors(self) -> Iterator[None]:
        """Prints one warning per file that cannot be written. If `tolerates_failures` is false, raises WriteError."""
        try:
            yield
        except object_store.WriteError as error:
            if not self._tolerates_failures:
                raise
            if str(error) not in self._warned:
                self._warned.add(str(error))
                self.print(f'warning: {error}; training continues (ON_SAVE_FAILURE)')

    def flush(self) -> None:
        """Waits until all records are stored. Raises UserError if a record cannot be written."""
        if self._records is not None:
            self._records.flush()

    def close(self) -> None:
        # Ignore a failed upload, because the error that ended the run is more useful; every checkpoint flushes the log.
        with contextlib.suppress(object_store.WriteError):
            self.flush()
        self._trackers.close()


def _count_parameters(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))
