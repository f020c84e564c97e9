"""Trains a model from its settings to its result: `train` prepares a run, `Loop` takes its steps.

The host never waits for the current step: metrics stay on the device until a log, and the check for NaN looks at the
previous step. The state, the position in the data and the train step determine all numbers.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from remixer_t5x import startup
from remixer_t5x.data import prefetch
from remixer_t5x.evaluate import best, task_evaluation
from remixer_t5x.run_folder import metrics, model_dir
from remixer_t5x.train import hooks, preemption, progress, run_log, saving, settings, start, steps


def train(
    run: settings.Run,
    *,
    config_text: str = '',
    flops_per_step: Callable[[], float] | None = None,
    show_progress: bool = True,
    signals: contextlib.ExitStack | None = None,
    report: Callable[[str], str] | None = None,
) -> settings.Result:
    """Trains to `run.periods.train_steps`, from the newest checkpoint in MODEL_DIR if there is one.

    Args:
        run: what to train and where.
        config_text: the operative gin, written to MODEL_DIR/config.gin and into each checkpoint.
        flops_per_step: counts the arithmetic of one step over the whole batch, for the utilization; None omits it.
        show_progress: whether to print.
        signals: a stack whose end restores the caller's signal handlers; None restores them at the return.
        report: writes a report about the run in a folder, for trackers that store files, and returns its path.

    Raises:
        UserError: the user made a mistake, the disk is full, or the loss is not finite.
    """
    learner, dataset, folder, periods, recovery = run.learner, run.dataset, run.folder, run.periods, run.recovery
    timeline, last = progress.Timeline(), periods.train_steps
    held_out = run.evaluation.name if run.evaluation else ''
    startup.end_phase('configuration')

    # The step compiles while the data is prepared.
    start.check(learner, dataset, run.evaluation, run.tasks)
    programs = steps.Programs(learner, dataset, recovery.spike_factor, start.is_new(folder))
    startup.end_phase('model')
    data = start.RunData(learner, dataset, run.evaluation, run.tasks)
    startup.end_phase('data')

    path = start.claim(folder.model_dir)
    record = {**data.record, 'config': config_text, 'versions': model_dir.package_versions()}
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(model_dir.locked(path))
        checkpoints = stack.enter_context(saving.opened(path, folder.keep_checkpoints))
        with timeline.during(progress.STATE):
            patience, abstract = periods.stop_after_evaluations, programs.plan.abstract
            now, notes = start.resume(checkpoints, abstract, record, recovery.restore, dataset.save_position, patience)
            if now is None:
                create = functools.partial(programs.initial_state, jax.random.key(learner.seed))
                state, more = start.initial_state(folder, learner.model, programs.plan, data.vocabulary, create)
                notes += more
                now = saving.Current(state, position=data.first_position(), patience=saving.Patience(patience))
        startup.end_phase('state')

        first, is_new = now.step, now.saved is None
        tokens = dataset.batch_size * sum(dataset.task_feature_lengths.values())
        work = progress.Work.of_step(tokens, learner.partitioner.mesh.size, flops_per_step)
        goes_on = recovery.on_save_failure == settings.GO_ON
        log = run_log.RunLog(path, first, last, work, goes_on, show_progress, timeline, is_new)
        stack.callback(log.close)
        if jax.process_index() == 0:
            start.write_files(path, config_text, data.vocabulary, is_new, log.say)
        if first >= last or now.patience.is_over:
            why = f'TRAIN_STEPS = {last}' if first >= last else now.patience.reason()
            for line in (f'{path} is at step {first} already ({why}); nothing was trained', *notes):
                log.say(line)
            return _result(held_out, path, first, None)
        notes += data.evaluator.notes if data.evaluator else ()
        log.start(learner, run.trackers, config_text, programs.plan, notes)

        stop = (signals or stack).enter_context(preemption.StopRequest(first))
        batches = stack.enter_context(data.batches(now.position, periods.checkpoint_period))
        guard = saving.BadSteps(recovery.on_bad_step, checkpoints)
        saves_first = recovery.on_bad_step == settings.REWIND
        saver = saving.Saver(last, goes_on, saves_first, checkpoints, batches, guard, record, abstract, log)
        profiler = hooks.Profiler(path / 'profile')
        keeper = best.BestCheckpoints(path, record, folder.best_metrics)
        # Checkpoints follow the records that they cover, so that a resumed run does not write these again.
        run_hooks = [
            hooks.Hook(periods.log_period, hooks.LogWindow(log, saver)),
            *_evaluations(periods, held_out, run.tasks, programs, data, keeper, log),
            hooks.Hook(periods.checkpoint_period, saver, spent_on=progress.CHECKPOINT),
            hooks.Hook(periods.profile_period, profiler.start, at_end=False),
        ]
        startup.end_phase('opening the data')
        try:
            stopped = Loop(programs.train, batches, run_hooks, guard, saver, profiler, log).run(now, last, stop)
            spent = log.write_times(first, now.step)
            log.add_files(report)
        except Exception as error:
            error.add_note(f'the newest checkpoint is of step {now.saved}' if now.saved else 'there is no checkpoint')
            raise
    return _result(held_out, path, now.step, stopped, spent)


class Loop:
    """Draws a batch, takes a step, adds its metrics to the window, checks for a bad step, and calls the hooks."""

    def __init__(
        self,
        train_step: steps.CompiledAhead,
        batches: prefetch.Prefetcher,
        run_hooks: Sequence[hooks.Hook],
        guard: saving.BadSteps,
        saver: saving.Saver,
        profiler: hooks.Profiler,
        log: run_log.RunLog,
    ):
        self._train_step, self._batches, self._hooks, self._guard = train_step, batches, run_hooks, guard
        self._saver, self._profiler, self._log = saver, profiler, log
        self._during = log.timeline.during

    def run(self, now: saving.Current, last: int, stop: preemption.StopRequest) -> str | None:
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
                    batch = self._next_batch()
                    with self._during(progress.COMPILE if now.step + 1 == first else progress.STEPS):
                        self._step(now, batch, first, last)
            except saving.Rewind as reason:
                with self._during(progress.STATE):
                    self._saver.go_back(now, reason)
            stopped = stop.agreed(now.step)
        self._profiler.close()
        with self._during(progress.CHECKPOINT):
            self._saver.last(now)
        if now.patience.is_over:
            self._log.say(f'stopping early at step {now.step}: {now.patience.reason()}')
        return stopped

    def _next_batch(self) -> Any:
        begun = time.perf_counter()
        with self._during(progress.DATA):
            batch = next(self._batches)
        self._log.clock.wait(time.perf_counter() - begun)
        return batch

    def _step(self, now: saving.Current, batch: Any, first: int, last: int) -> None:
        now.state, step_metrics = self._train_step(now.state, batch)
        now.step += 1
        now.window.add(step_metrics)
        self._guard.step(now.step, step_metrics)
        if now.step == first:
            # The first step waits for the compiler; speed is measured from the second step on.
            jax.block_until_ready(step_metrics)
            self._log.clock.lap(now.step)
            startup.end_phase('compiling and the first step')
            startup.report_phases(self._log.say)
        self._log.step(now.step)
        for hook in self._hooks:
            if hook.due(now.step, last):
                self._call(hook, now)
        self._profiler.after_step(now.step, step_metrics)
        if now.step == first:
            begun = time.perf_counter()
            with self._during(progress.EVALUATION):
                for hook in self._hooks:
                    if hook.prepare is not None:
                        hook.prepare()
            self._log.clock.pause(time.perf_counter() - begun)

    def _call(self, hook: hooks.Hook, now: saving.Current) -> None:
        begun = time.perf_counter()
        self._guard.now()
        with self._during(hook.spent_on or progress.STEPS):
            hook.call(now)
        if hook.spent_on:
            self._log.clock.pause(time.perf_counter() - begun)


def _evaluations(
    periods: settings.Periods,
    held_out: str,
    tasks: task_evaluation.TaskEvaluation | None,
    programs: steps.Programs,
    data: start.RunData,
    keeper: best.BestCheckpoints,
    log: run_log.RunLog,
) -> Iterator[hooks.Hook]:
    """Yields the hooks of the held-out loss, whose records are named `held_out` if it is not empty, and the metrics."""
    params_of, period, at_start = programs.evaluated(), periods.eval_period, periods.eval_at_start
    if held_out and period is not None:
        decides = held_out if tasks is None else None
        eval_step = programs.evaluation(data.vocabulary)
        loss = hooks.EvaluateLoss(data.held_out, eval_step, data.place, log, decides, params_of)
        yield hooks.Hook(period, loss, at_start=at_start, spent_on=progress.EVALUATION, prepare=loss.batches)
    if tasks is not None and data.evaluator is not None:
        metrics_of_tasks = hooks.EvaluateTasks(data.evaluator, keeper, log, params_of, tasks.shown)
        yield hooks.Hook(period, metrics_of_tasks, at_start=at_start, spent_on=progress.EVALUATION)


def _result(
    held_out: str, path: epath.Path, step: int, stopped: str | None, spent: Mapping[str, float] | None = None
) -> settings.Result:
    last = {record['kind']: record for record in metrics.read(path / model_dir.METRICS)}
    checkpoint = str(path / model_dir.CHECKPOINTS / str(step))
    return settings.Result(
        step, stopped, last.get('train', {}), last.get(held_out, {}), str(path), checkpoint, spent or {}
    )
