"""Trains a model from its settings to its result: `train` is the whole run, `Loop` takes the steps.

The host never waits for the current step: metrics stay on the device until a log, and the check for NaN looks at the
previous step. The state, the position of the data and the train step decide all numbers.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from remixer_t5x import startup
from remixer_t5x.data import prefetch, task_vocabulary
from remixer_t5x.evaluate.best import BestCheckpoints
from remixer_t5x.run_folder import metrics, model_dir
from remixer_t5x.train import preemption, progress, saving, settings, start, steps
from remixer_t5x.train.current import Current
from remixer_t5x.train.hooks import EvaluateLoss, EvaluateTasks, Hook, LogWindow, Profiler
from remixer_t5x.train.run_log import RunLog
from remixer_t5x.train.settings import Result, Run
from remixer_t5x.train.start import RunData


def train(
    run: Run,
    *,
    config_text: str = '',
    flops_per_step: Callable[[], float] | None = None,
    show_progress: bool = True,
    signals: contextlib.ExitStack | None = None,
    report: Callable[[str], str] | None = None,
) -> Result:
    """Trains to `run.periods.train_steps`, from the newest checkpoint in MODEL_DIR if there is one.

    Args:
        run: what to train and where.
        config_text: the operative gin, written to MODEL_DIR/config.gin and into each checkpoint.
        flops_per_step: counts the arithmetic of one step over the whole batch, for the utilization; None omits it.
        show_progress: whether to print.
        signals: a stack whose end restores the caller's handlers of signals; None restores them at the return.
        report: writes a report about the run in a folder, for trackers that store files, and returns its path.

    Raises:
        UserError: the user made a mistake, the disk is full, or the loss is not finite.
    """
    last, timeline, learner, dataset = run.periods.train_steps, progress.Timeline(), run.learner, run.dataset
    held_out = run.evaluation.name if run.evaluation else ''
    startup.done('configuration')
    start.check(run)
    programs = steps.Programs(learner, dataset, run.recovery.spike_factor, start.is_new(run.folder))
    startup.done('model')
    data = RunData(run)
    record = {**data.record, 'config': config_text, 'versions': model_dir.package_versions()}
    startup.done('data')
    path = start.claim(run.folder.model_dir)
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(model_dir.locked(path))
        checkpoints = stack.enter_context(saving.opened(path, run.folder.keep_checkpoints))
        with timeline.during(progress.RESTORE):
            create = functools.partial(programs.initial_state, jax.random.key(learner.seed))
            now, message, notes = start.begin(run, programs.plan, checkpoints, record, data.vocabulary, create)
        startup.done('state')
        first = now.step
        tokens = dataset.batch_size * sum(dataset.task_feature_lengths.values())
        work = progress.Work.of_step(tokens, learner.partitioner.mesh.size, flops_per_step)
        goes_on = run.recovery.on_save_failure == settings.GO_ON
        log = RunLog(path, first, last, work, goes_on, show_progress, timeline, config_text, is_new=now.saved is None)
        stack.callback(log.close)
        if jax.process_index() == 0:
            model_dir.write_config(path, config_text)
            if now.saved is None or not task_vocabulary.saved(path):
                start.save_vocabulary(path, data.vocabulary, log.say)
        if now.step >= last or now.patience.is_over:
            why = f'TRAIN_STEPS = {last}' if now.step >= last else now.patience.reason()
            log.say(f'{path} is at step {now.step} already ({why})')
            return _result(held_out, path, now.step, None)
        notes = (*notes, *(data.evaluator.notes if data.evaluator else ()))
        log.start(learner, run.trackers, programs.plan, notes, message)
        if startup.measures():
            log.say(f'options of XLA for the step: {programs.options or "none"}')

        stop = (signals or stack).enter_context(preemption.StopRequest(now.step))
        batches = stack.enter_context(data.batches(now.position))
        guard = saving.BadSteps(run.recovery.on_bad_step, checkpoints)
        saver = saving.Saver(run.recovery, last, checkpoints, batches, guard, record, programs.plan.abstract, log)
        profiler = Profiler(path / 'profile')
        best = BestCheckpoints(path, record, run.folder.best_metrics)
        # Checkpoints follow the records that they cover, so that a resumed run does not write these again.
        hooks = [
            Hook(run.periods.log_period, LogWindow(log, saver)),
            *_evaluations(run.periods, held_out, run.tasks.shown if run.tasks else 0, programs, data, best, log),
            Hook(run.periods.checkpoint_period, saver, spent_on=progress.CHECKPOINT),
            Hook(run.periods.profile_period, profiler.start, at_end=False),
        ]
        startup.done('opening the data')
        try:
            stopped = Loop(programs.train, batches, hooks, guard, saver, profiler, log).run(now, last, stop)
            spent = log.spent(first, now.step)
            log.add_files(report)
        except Exception as error:
            error.add_note(f'the newest checkpoint is of step {now.saved}' if now.saved else 'there is no checkpoint')
            raise
    return _result(held_out, path, now.step, stopped, spent)


class Loop:
    """Draws a batch, takes a step, adds to the window, checks for a bad step, and calls the hooks that are due."""

    def __init__(
        self,
        train_step: steps.CompiledAhead,
        batches: prefetch.Prefetcher,
        hooks: Sequence[Hook],
        guard: saving.BadSteps,
        saver: saving.Saver,
        profiler: Profiler,
        log: RunLog,
    ):
        self._train_step, self._batches, self._hooks, self._guard = train_step, batches, hooks, guard
        self._saver, self._profiler, self._log = saver, profiler, log
        self._during = log.timeline.during

    def run(self, now: Current, last: int, stop: preemption.StopRequest) -> str | None:
        """Trains until step `last`, the end of the run's patience, or a signal, and returns the name of the signal.

        Saves the last state in all cases.
        """
        stopped, first = None, now.step + 1
        if now.saved is None:
            for hook in self._hooks:
                if hook.at_start:
                    self._call(hook, now)
        with self._during(progress.CHECKPOINT):
            self._saver.first(now)
        while now.step < last and not stopped and not now.patience.is_over:
            try:
                with self._during(progress.STEPS):
                    self._advance(now, first, last)
            except saving.Rewind as reason:
                with self._during(progress.RESTORE):
                    self._saver.go_back(now, reason)
            stopped = stop.agreed(now.step)
        self._profiler.close()
        with self._during(progress.CHECKPOINT):
            self._saver.last(now)
        if now.patience.is_over:
            self._log.say(f'stopping early at step {now.step}: {now.patience.reason()}')
        return stopped

    def _advance(self, now: Current, first: int, last: int) -> None:
        batch = self._next_batch()
        if now.step + 1 == first:
            with self._during(progress.COMPILE):
                self._step(now, batch, first, last)
        else:
            self._step(now, batch, first, last)

    def _next_batch(self) -> Any:
        begun = time.perf_counter()
        with self._during(progress.DATA):
            batch = next(self._batches)
        self._log.clock.wait(time.perf_counter() - begun)
        return batch

    def _step(self, now: Current, batch: Any, first: int, last: int) -> None:
        now.state, step_metrics = self._train_step(now.state, batch)
        now.step += 1
        now.window.add(step_metrics)
        self._guard.step(now.step, step_metrics)
        if now.step == first:
            # The first step waits for the compiler; speed is measured from the second step on.
            jax.block_until_ready(step_metrics)
            self._log.clock.lap(now.step)
            startup.done('compiling and the first step')
            startup.report(self._log.say)
        self._log.step(now.step)
        for hook in self._hooks:
            if hook.due(now.step, last):
                self._call(hook, now)
        self._profiler.after_step(now.step, step_metrics)
        if now.step == first:
            self._prepare()

    def _prepare(self) -> None:
        begun = time.perf_counter()
        with self._during(progress.EVALUATION):
            for hook in self._hooks:
                if hook.prepare is not None:
                    hook.prepare()
        self._log.clock.pause(time.perf_counter() - begun)

    def _call(self, hook: Hook, now: Current) -> None:
        begun = time.perf_counter()
        self._guard.now()
        with self._during(hook.spent_on or progress.STEPS):
            hook.call(now)
        if hook.spent_on:
            self._log.clock.pause(time.perf_counter() - begun)


def _evaluations(
    periods: settings.Periods,
    held_out: str,
    shown: int,
    programs: steps.Programs,
    data: RunData,
    best: BestCheckpoints,
    log: RunLog,
) -> Iterator[Hook]:
    """Yields the hooks of the held-out loss and the tasks' metrics.

    Records of the loss are named `held_out`; an empty name means no loss. `shown` is the number of answers to print.
    """
    evaluator, evaluated = data.evaluator, programs.evaluated()
    period, at_start = periods.eval_period, periods.eval_at_start
    if held_out and period is not None:
        decides = held_out if evaluator is None else None
        eval_step, place = programs.evaluation(data.vocabulary), data.place
        call = EvaluateLoss(data.held_out, eval_step, place, log, decides, evaluated)
        yield Hook(period, call, at_start=at_start, spent_on=progress.EVALUATION, prepare=call.batches)
    if evaluator is not None:
        call_tasks = EvaluateTasks(evaluator, best, log, evaluated, shown)
        yield Hook(period, call_tasks, at_start=at_start, spent_on=progress.EVALUATION)


def _result(
    held_out: str, path: epath.Path, step: int, stopped: str | None, spent: Mapping[str, float] | None = None
) -> Result:
    last = {record['kind']: record for record in metrics.read(path / model_dir.METRICS)}
    checkpoint = str(path / model_dir.CHECKPOINTS / str(step))
    return Result(step, stopped, last.get('train', {}), last.get(held_out, {}), str(path), checkpoint, spent or {})
