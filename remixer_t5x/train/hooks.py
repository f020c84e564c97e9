"""Defines hooks that the training loop calls periodically: for held-out loss, task metrics and profiles."""

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.data import fingerprint, task_batches
from remixer_t5x.evaluate import checkpoint_ranking, held_out_loss, task_evaluation
from remixer_t5x.evaluate.task_evaluation import TaskEvaluator, TaskReport
from remixer_t5x.optim.train_state import TrainState
from remixer_t5x.run_folder import object_store
from remixer_t5x.train.run_log import RunLog
from remixer_t5x.train.run_state import RunState

PROFILED_STEPS = 3
# A function that maps a train state to the parameters to evaluate: the averaged or the latest parameters.
ParamsSelector = Callable[[TrainState], Any]


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function that the training loop calls every `period` steps, or never if `period` is None.

    If `at_end` is true, the function is also called after the last step; `at_start` determines whether it is called
    before the first step of a new run. `progress.ActivityTimer` attributes the duration of the call to `activity`; None
    attributes it to training. `prepare` is called once after the first step of a process, so that errors appear early
    without delaying the start.
    """

    period: int | None
    call: Callable[[RunState], None]
    at_end: bool = True
    at_start: bool = False
    activity: str | None = None
    prepare: Callable[[], object] | None = None

    def is_due(self, step: int, last: int) -> bool:
        if step == 0:
            return self.at_start
        return self.period is not None and (step % self.period == 0 or (self.at_end and step == last))


@dataclasses.dataclass
class LossEvaluationHook:
    """Logs the metrics of `held_out_loss.evaluate_loss` for a split and for each task in the split.

    `open_batches` maps the `kind` of each loss record to the batches of the split or task. `early_stopping` is the
    `kind` of the loss that early stopping monitors; None if early stopping does not monitor a loss. `evaluated`
    identifies the examples of this loss.
    """

    open_batches: Callable[[], Mapping[str, task_batches.EvalBatches]]
    eval_step: held_out_loss.EvalStep
    place: Callable[[Any], Any]
    log: RunLog
    params_of: ParamsSelector
    early_stopping: str | None = None
    evaluated: str | None = None

    @functools.cached_property
    def held_out_batches(self) -> Mapping[str, task_batches.EvalBatches]:
        """The held-out batches, which are opened only once, because opening often takes longer than an evaluation."""
        return self.open_batches()

    def __call__(self, state: RunState) -> None:
        params, losses = self.params_of(state.train_state), {}
        for name, batches in self.held_out_batches.items():
            begun = time.perf_counter()
            numbers = held_out_loss.evaluate_loss(params, batches, self.eval_step, self.place, name)
            self.log.log_evaluation(name, state.step, numbers, time.perf_counter() - begun)
            losses[name] = numbers['loss']
            task = name.partition('/')[2]
            # The targets of classifiers and other heads are not tokens, and have no constant loss.
            of_tokens = 'constant_loss' in numbers
            accuracy = 'token accuracy' if of_tokens else 'accuracy'
            self.log.print(
                f'step {state.step} · {f"{task} · " if task else ""}held-out loss {numbers["loss"]:.4f}'
                + (f' (best constant prediction {numbers["constant_loss"]:.4f})' if of_tokens else '')
                + (f' · perplexity {numbers["perplexity"]:.2f}' if of_tokens else '')
                + (f' · {accuracy} {100 * numbers["accuracy"]:.1f}%' if 'accuracy' in numbers else '')
                + (f' · {numbers["bits_per_byte"]:.3f} bits per byte' if 'bits_per_byte' in numbers else '')
            )
        # Update early stopping last, because an interrupted evaluation is repeated.
        if self.early_stopping is not None:
            state.patience.add_evaluation(state.step, -losses[self.early_stopping], self.evaluated)


@dataclasses.dataclass
class TaskEvaluationHook:
    """Logs each task's metrics and the average over tasks, and saves the best parameters so far.

    Calls `before_batch` before each batch. Early stopping monitors the average. For each task, prints the model's
    answers to the first `shown` examples.
    """

    evaluator: TaskEvaluator
    best_checkpoints: checkpoint_ranking.BestCheckpoints
    log: RunLog
    params_of: ParamsSelector
    before_batch: Callable[[], None]
    shown: int = 0

    def __call__(self, state: RunState) -> None:
        scores: dict[str, float] = {}
        evaluated: list[tuple[str, ...]] = []
        params = self.params_of(state.train_state)
        for report in self.evaluator(params, self.before_batch):
            self._log_report(state, params, report)
            if (metric := self.best_checkpoints.select_metric(report)) is not None:
                scores[report.task] = checkpoint_ranking.compute_signed_score(*metric)
                evaluated.append((report.task, metric[0], report.settings_hash))
        if not scores:
            return
        mean = checkpoint_ranking.compute_mean_score(scores)
        settings_hash = fingerprint.compute_short_hash(repr(evaluated))
        if len(scores) > 1:
            name = checkpoint_ranking.AVERAGE_TASK
            average = TaskReport(name, self.evaluator.split, {name: mean}, (), 0.0, settings_hash=settings_hash)
            self._log_report(state, params, average)
        state.patience.add_evaluation(state.step, mean, settings_hash)

    def _log_report(self, state: RunState, params: Any, report: TaskReport) -> None:
        self.log.log_evaluation(f'eval/{report.task}', state.step, report.metrics, report.seconds)
        for line in task_evaluation.format_answers(report, self.shown):
            self.log.print(line)
        is_best = False
        with self.log.tolerate_write_errors():
            is_best = self.best_checkpoints.save_if_best(report, state.step, params)
        text = task_evaluation.format_metrics(report.metrics) + (' · the best so far' if is_best else '')
        self.log.print(f'step {state.step} · {report.task} · {text}')


class Profiler:
    """Writes a trace of PROFILED_STEPS steps for TensorBoard's profiler to `folder` when `start_trace` is called.

    JAX writes traces only to local disks. If `folder` is in a bucket, the trace is uploaded afterwards.
    """

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._traced_steps = range(0)
        self._local: epath.Path | None = None

    def start_trace(self, state: RunState) -> None:
        if not self._traced_steps:
            if object_store.is_remote(self._folder):
                self._local = epath.Path(tempfile.mkdtemp())
            jax.profiler.start_trace(str(self._local or self._folder))
            self._traced_steps = range(state.step, state.step + PROFILED_STEPS)

    def stop_trace_if_due(self, step: int, result: Any) -> None:
        """Ends the trace after its last step, or after a rewind. First waits until `result` of the step is computed."""
        if self._traced_steps and step not in self._traced_steps:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        if self._traced_steps:
            jax.profiler.stop_trace()
            self._traced_steps = range(0)
            if self._local is not None:
                self._upload_trace(self._local)

    def _upload_trace(self, traced: epath.Path) -> None:
        for file in pathlib.Path(traced).rglob('*'):
            if file.is_file():
                target = self._folder / file.relative_to(traced)
                with object_store.wrap_write_errors(target):
                    target.write_bytes(file.read_bytes())
        traced.rmtree()
