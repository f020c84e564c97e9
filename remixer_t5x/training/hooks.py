"""What happens between steps, each hook at its own period. A hook's `call` gets the current position of the run."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from remixer_t5x.data import pipeline
from remixer_t5x.evaluation import held_out_loss, task_metrics
from remixer_t5x.evaluation.best import BestCheckpoints
from remixer_t5x.evaluation.task_evaluation import TaskEvaluator
from remixer_t5x.run_folder import metrics
from remixer_t5x.training.run_log import RunLog
from remixer_t5x.training.saving import Saver
from remixer_t5x.training.start import Current

PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Hook:
    """`call(now)` every `period` steps (None means never), and after the last step if `at_end`.

    The time of a call does not count as training if the hook `pauses` the clock.
    """

    period: int | None
    call: Callable[[Current], None]
    at_end: bool = True
    pauses: bool = False

    def due(self, step: int, last: int) -> bool:
        return self.period is not None and (step % self.period == 0 or (self.at_end and step == last))


class LogWindow:
    """Logs the means of the steps since the last log, and notices a checkpoint that could not be written."""

    def __init__(self, log: RunLog, saver: Saver):
        self._log, self._saver = log, saver

    def __call__(self, now: Current) -> None:
        numbers = metrics.means(now.window.totals())
        now.window = metrics.Window()
        self._log.train(now.step, numbers)
        self._saver.check()


class EvaluateLoss:
    """Logs loss, perplexity and token accuracy of `batches`. `place` puts a batch on the devices."""

    def __init__(
        self,
        name: str,
        batches: pipeline.EvalBatches,
        eval_step: held_out_loss.EvalStep,
        place: Callable[[Any], Any],
        log: RunLog,
    ):
        self._name, self._batches, self._eval_step, self._place, self._log = name, batches, eval_step, place, log

    def __call__(self, now: Current) -> None:
        begun = time.perf_counter()
        numbers = held_out_loss.evaluate(now.state.params, self._batches, self._eval_step, self._place, self._name)
        self._log.evaluation(self._name, now.step, numbers, time.perf_counter() - begun)
        self._log.say(
            f'step {now.step} · held-out loss {numbers["loss"]:.4f} · perplexity {numbers["perplexity"]:.2f} · '
            f'token accuracy {100 * numbers["accuracy"]:.1f}%'
        )


class EvaluateTasks:
    """Logs the metrics of tasks, and keeps the best parameters of each task."""

    def __init__(self, evaluator: TaskEvaluator, best: BestCheckpoints, log: RunLog):
        self._evaluator, self._best, self._log = evaluator, best, log

    def __call__(self, now: Current) -> None:
        for report in self._evaluator(now.state.params):
            self._log.evaluation(f'eval/{report.task}', now.step, report.metrics, report.seconds)
            is_best = self._best.keep(report, now.step, now.state.params)
            shown = task_metrics.describe(report.metrics) + (' · the best so far' if is_best else '')
            self._log.say(f'step {now.step} · {report.task} · {shown}')


class Profiler:
    """Traces three steps into `folder` whenever `start` is called; look at them with TensorBoard's profiler."""

    def __init__(self, folder: str):
        self._folder = folder
        self._until: int | None = None

    def start(self, now: Current) -> None:
        if self._until is None:
            jax.profiler.start_trace(self._folder)
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
