"""Hooks, which the loop calls between steps, each at its own period: logs, evaluations, checkpoints, profiles."""

import dataclasses
import functools
import operator
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.data import task_batches
from remixer_t5x.evaluate import best, held_out_loss, task_evaluation, task_metrics
from remixer_t5x.evaluate.best import BestCheckpoints
from remixer_t5x.evaluate.task_evaluation import Report, TaskEvaluator
from remixer_t5x.optim.train_state import TrainState
from remixer_t5x.run_folder import metrics, object_store
from remixer_t5x.train.run_log import RunLog
from remixer_t5x.train.saving import Current, Saver

PROFILED_STEPS = 3
# Selects the parameters of a state to evaluate: an average, or the last ones.
ParamsOf = Callable[[TrainState], Any]
LAST_PARAMS: ParamsOf = operator.attrgetter('params')


@dataclasses.dataclass(frozen=True)
class Hook:
    """Calls `call(now)` every `period` steps, after the last step if `at_end`, and before the first if `at_start`.

    A period of None means never. The time of a call counts as `spent_on` (`progress.Timeline`), and not as training.
    `prepare()` is called once, after the first step of a process, so that its errors appear early without delaying the
    start.
    """

    period: int | None
    call: Callable[[Current], None]
    at_end: bool = True
    at_start: bool = False
    spent_on: str | None = None
    prepare: Callable[[], object] | None = None

    def due(self, step: int, last: int) -> bool:
        return self.period is not None and (step % self.period == 0 or (self.at_end and step == last))


class LogWindow:
    """Logs the means of the steps since the last log, and handles a checkpoint that could not be written."""

    def __init__(self, log: RunLog, saver: Saver):
        self._log, self._saver = log, saver

    def __call__(self, now: Current) -> None:
        numbers = metrics.means(now.window.totals())
        now.window = metrics.MetricsWindow()
        self._log.train(now.step, numbers)
        self._saver.check()


class EvaluateLoss:
    """Logs loss, perplexity and token accuracy of the batches that `open_batches` returns by name of their records.

    A name stands for a whole split or for one task of a mixture. The run's patience counts the loss named `decides`.
    `place` puts a batch on the devices. `params_of` selects the parameters of a state.
    """

    def __init__(
        self,
        open_batches: Callable[[], Mapping[str, task_batches.EvalBatches]],
        eval_step: held_out_loss.EvalStep,
        place: Callable[[Any], Any],
        log: RunLog,
        decides: str | None = None,
        params_of: ParamsOf = LAST_PARAMS,
    ):
        self._decides = decides
        # Opened once, because opening often takes longer than a pass.
        self.batches = functools.cache(open_batches)
        self._eval_step, self._place, self._log, self._params_of = eval_step, place, log, params_of

    def __call__(self, now: Current) -> None:
        params = self._params_of(now.state)
        for name, batches in self.batches().items():
            begun = time.perf_counter()
            numbers = held_out_loss.evaluate(params, batches, self._eval_step, self._place, name)
            self._log.evaluation(name, now.step, numbers, time.perf_counter() - begun)
            if name == self._decides:
                now.patience.observe(now.step, -numbers['loss'])
            task = name.partition('/')[2]
            self._log.say(
                f'step {now.step} · {f"{task} · " if task else ""}held-out loss {numbers["loss"]:.4f}'
                + (f' (best constant answer {numbers["constant_loss"]:.4f})' if 'constant_loss' in numbers else '')
                + f' · perplexity {numbers["perplexity"]:.2f} · token accuracy {100 * numbers["accuracy"]:.1f}%'
                + (f' · {numbers["bits_per_byte"]:.3f} bits a byte' if 'bits_per_byte' in numbers else '')
            )


class EvaluateTasks:
    """Logs the metrics of tasks and their average, and keeps the best parameters of each task and of the average.

    The run's patience counts the average. `params_of` selects the parameters of a state. Prints the answers to the
    first `shown` examples of each task.
    """

    def __init__(
        self,
        evaluator: TaskEvaluator,
        best: BestCheckpoints,
        log: RunLog,
        params_of: ParamsOf = LAST_PARAMS,
        shown: int = 0,
    ):
        self._evaluator, self._best, self._log, self._params_of = evaluator, best, log, params_of
        self._shown = shown

    def __call__(self, now: Current) -> None:
        scores: dict[str, float] = {}
        params = self._params_of(now.state)
        for report in self._evaluator(params):
            self._report(now, params, report)
            if (metric := self._best.score(report)) is not None:
                scores[report.task] = best.rank(*metric)
        if len(scores) > 1:
            metrics = {best.AVERAGE: best.average(scores)}
            self._report(now, params, Report(best.AVERAGE, self._evaluator.split, metrics, (), 0.0))
        if scores:
            now.patience.observe(now.step, best.average(scores))

    def _report(self, now: Current, params: Any, report: Report) -> None:
        self._log.evaluation(f'eval/{report.task}', now.step, report.metrics, report.seconds)
        for line in task_evaluation.shown_answers(report, self._shown):
            self._log.say(line)
        is_best = False
        with self._log.may_fail():
            is_best = self._best.keep(report, now.step, params)
        text = task_metrics.describe(report.metrics) + (' · the best so far' if is_best else '')
        self._log.say(f'step {now.step} · {report.task} · {text}')


class Profiler:
    """Writes a trace of three steps for TensorBoard's profiler to `folder` whenever `start` is called.

    JAX writes traces to a disk, so they are copied into a bucket afterwards.
    """

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._until: int | None = None
        self._local: epath.Path | None = None

    def start(self, now: Current) -> None:
        if self._until is None:
            if object_store.is_remote(self._folder):
                self._local = epath.Path(tempfile.mkdtemp())
            jax.profiler.start_trace(str(self._local or self._folder))
            self._until = now.step + PROFILED_STEPS

    def after_step(self, step: int, result: Any) -> None:
        """Ends the trace once `result` of the last traced step is ready."""
        if self._until is not None and step >= self._until:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        if self._until is not None:
            jax.profiler.stop_trace()
            self._until = None
            if self._local is not None:
                self._upload(self._local)

    def _upload(self, traced: epath.Path) -> None:
        for file in pathlib.Path(traced).rglob('*'):
            if file.is_file():
                target = self._folder / file.relative_to(traced)
                with object_store.wrap_write_errors(target):
                    target.write_bytes(file.read_bytes())
        traced.rmtree()
