"""Trains a model: `train` prepares a run, and `TrainingLoop` runs its steps.

The host never waits for the current step: metrics stay on the device until they are logged, and the NaN check reads the
metrics of the previous step.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from remixer_t5x.checkpoints import checkpoint_manager, checkpoint_paths
from remixer_t5x.data import batch_formats, prefetch
from remixer_t5x.evaluate import checkpoint_ranking
from remixer_t5x.run_folder import metrics, model_dir
from remixer_t5x.train import compilation, hooks, preemption, progress, run_log, run_setup, run_state, settings


def train(
    run: settings.Run,
    *,
    config_text: str = '',
    flops_per_step: Callable[[], float] | None = None,
    show_progress: bool = True,
    signals: contextlib.ExitStack | None = None,
) -> settings.TrainResult:
    """Trains until step `run.periods.train_steps`, starting from the newest checkpoint in MODEL_DIR if there is one.

    Args:
        run: the settings.
        config_text: the operative gin config, which is written to MODEL_DIR/config.gin and to each checkpoint.
        flops_per_step: function that returns the model FLOPs of one step on the global batch; None omits the model
            FLOPs utilization (MFU) from the logs, and so do length buckets and frozen parameters.
        show_progress: whether to print progress.
        signals: an exit stack that restores the caller's signal handlers when it is closed; None restores them when
            `train` returns.

    Raises:
        UserError: a setting is invalid, the disk is full, or the loss is not finite.
    """
    timeline = progress.ActivityTimer()

    folder, checkpoints_path = run.folder, model_dir.to_absolute_path(run.folder.model_dir) / model_dir.CHECKPOINTS
    # Check the path of the initial checkpoint first, because preparing programs and data is slow. A resumed run does
    # not read the initial checkpoint.
    if folder.initial_checkpoint_path and not checkpoint_paths.list_steps(checkpoints_path):
        checkpoint_paths.find_checkpoint(folder.initial_checkpoint_path)
    # XLA compiles the train step in a thread while this thread opens the data.
    programs = compilation.CompiledPrograms(run)
    data = run_setup.RunData(run)

    path = run_setup.create_shared_model_dir(run.folder.model_dir)
    record = {**data.record, 'config': config_text, 'versions': model_dir.get_package_versions()}
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(model_dir.lock_model_dir(path))
        checkpoints = stack.enter_context(run_state.open_checkpoints(path, run.folder.keep_checkpoints))
        with timeline.measure_activity(progress.RESTORING_STATE):
            state, notes = run_setup.restore_or_create_state(run, checkpoints, programs, data, record)

        first, last = state.step, run.periods.train_steps
        log = _open_log(run, path, state, timeline, flops_per_step, show_progress)
        stack.callback(log.close)
        if jax.process_index() == 0:
            run_setup.write_run_files(path, config_text, data.vocabulary, log.is_new, log.print)
        if (first >= last and state.is_evaluated) or state.patience.is_exhausted:
            reason = f'TRAIN_STEPS = {last}' if first >= last else state.patience.describe_early_stop()
            for line in (f'{path} is already at step {first} ({reason}); nothing was trained', *notes):
                log.print(line)
            return _build_result(data.loss_kind, path, first, None)
        log.start(run.step_config, programs.plan, run.trackers, config_text, (*notes, *data.notes))

        stop = (signals or stack).enter_context(preemption.StopSignalHandler())
        batches = stack.enter_context(data.open_batches(state.position, run.periods.checkpoint_period))
        loop = _build_loop(run, programs, data, batches, checkpoints, record, log, stop)
        try:
            stopped = loop.run(state, last, stop)
            seconds = timeline.get_seconds_by_activity()
        except Exception as error:
            latest = state.saved_step
            error.add_note(f'the newest checkpoint is from step {latest}' if latest else 'there is no checkpoint')
            raise
    return _build_result(data.loss_kind, path, state.step, stopped, seconds)


@dataclasses.dataclass
class TrainingLoop:
    """The training loop: reads a batch, runs the train step, checks for a bad step, and calls the hooks."""

    train_step: Callable[[Any, Any], tuple[Any, Any]]
    batches: prefetch.Prefetcher
    run_hooks: Sequence[hooks.Hook]
    bad_steps: run_state.BadStepHandler
    saver: run_state.CheckpointSaver
    profiler: hooks.Profiler
    log: run_log.RunLog

    def __post_init__(self) -> None:
        self._measure_activity = self.log.timeline.measure_activity

    def run(self, state: run_state.RunState, last: int, stop: preemption.StopSignalHandler) -> str | None:
        """Trains until step `last`, until early stopping or until a signal, and saves the final state.

        Returns the name of the signal, or None if there was no signal.
        """
        signal_name, first = None, state.step + 1
        with self._measure_activity(progress.CHECKPOINT):
            self.saver.save_initial_state(state)
        while (state.step < last or not state.is_evaluated) and not signal_name and not state.patience.is_exhausted:
            try:
                if state.is_evaluated:
                    self._run_step(state, first, last)
                else:
                    self._call_due_hooks(state, last, progress.EVALUATION)
                    state.is_evaluated = True
            except run_state.RewindRequested as reason:
                with self._measure_activity(progress.RESTORING_STATE):
                    self.saver.rewind_run(state, reason)
            except preemption.EvaluationInterrupted:
                # The resumed run repeats all evaluations of this step.
                state.is_evaluated = False
            signal_name = stop.get_agreed_signal()
        self.profiler.close()
        if state.patience.is_exhausted and state.window.compute_totals():
            self.saver.log_mean_metrics(state)
        with self._measure_activity(progress.CHECKPOINT):
            self.saver.save_final_state(state)
        if state.patience.is_exhausted:
            self.log.print(f'stopping early at step {state.step}: {state.patience.describe_early_stop()}')
        return signal_name

    def _run_step(self, state: run_state.RunState, first: int, last: int) -> None:
        with self._measure_activity(progress.STEPS):
            with self._measure_activity(progress.WAITING_FOR_DATA):
                batch = next(self.batches)
            self.log.clock.add_batch(batch_formats.count_positions(batch))
            is_first = state.step + 1 == first
            with self._measure_activity(progress.COMPILE if is_first else progress.STEPS):
                state.train_state, step_metrics = self.train_step(state.train_state, batch)
                state.step += 1
                state.window.add_step_metrics(step_metrics)
                self.bad_steps.add_step_metrics(state.step, step_metrics)
                if is_first:
                    # Measure the speed from the second step onwards, because the first step waits for the compiler.
                    jax.block_until_ready(step_metrics)
                    self.log.clock.measure_speed(state.step)
                self._call_due_hooks(state, last)
                self.profiler.stop_trace_if_due(state.step, step_metrics)
            if is_first:
                with self._measure_activity(progress.EVALUATION):
                    for hook in self.run_hooks:
                        if hook.prepare is not None:
                            hook.prepare()

    def _call_due_hooks(self, state: run_state.RunState, last: int, activity: str | None = None) -> None:
        """Calls the hooks that are due at the step of `state`, or only those with this `activity`."""
        for hook in self.run_hooks:
            if hook.is_due(state.step, last) and activity in (None, hook.activity):
                # Wait for the last step first, so that its time is not attributed to the hook.
                self.bad_steps.check_last_step()
                with self._measure_activity(hook.activity or progress.STEPS):
                    hook.call(state)


def _open_log(
    run: settings.Run,
    path: epath.Path,
    state: run_state.RunState,
    timeline: progress.ActivityTimer,
    flops_per_step: Callable[[], float] | None,
    show_progress: bool,
) -> run_log.RunLog:
    # The FLOPs are those of full rows, and include the gradients of all parameters.
    flops = None if run.dataset.length_buckets or run.step_config.optimizer.trainable else flops_per_step
    return run_log.RunLog(
        path,
        step=state.step,
        last_step=run.periods.train_steps,
        cost=progress.StepCost.create_for_current_devices(run.step_config.partitioner.mesh.size, flops),
        tolerates_failures=run.recovery.on_save_failure == settings.CONTINUE,
        show=show_progress,
        timeline=timeline,
        is_evaluated=state.is_evaluated,
    )


def _build_loop(
    run: settings.Run,
    programs: compilation.CompiledPrograms,
    data: run_setup.RunData,
    batches: prefetch.Prefetcher,
    checkpoints: checkpoint_manager.RunCheckpoints,
    record: Mapping[str, Any],
    log: run_log.RunLog,
    stop: preemption.StopSignalHandler,
) -> TrainingLoop:
    bad_steps = run_state.BadStepHandler(run.recovery.on_bad_step, checkpoints)
    last, abstract = run.periods.train_steps, programs.plan.abstract
    saver = run_state.CheckpointSaver(run.recovery, last, checkpoints, batches, bad_steps, record, abstract, log)
    profiler = hooks.Profiler(log.path / 'profile')
    best_checkpoints = checkpoint_ranking.BestCheckpoints(log.path, record, run.folder.best_metrics, log.is_new)
    params_of, period = programs.build_params_selector(), run.periods.eval_period
    new_hook = functools.partial(hooks.Hook, period, at_start=run.periods.eval_at_start, activity=progress.EVALUATION)
    run_hooks = [hooks.Hook(run.periods.log_period, saver.log_mean_metrics)]
    if data.loss_kind and period is not None:
        # If the run evaluates tasks, early stopping uses their metrics instead.
        early_stopping = None if data.evaluator else data.loss_kind
        eval_step = programs.build_eval_step(data.vocabulary)

        def place(batch: Any) -> Any:
            stop.raise_if_stopping()
            return data.place(batch)

        loss = hooks.LossEvaluationHook(
            data.open_held_out_batches, eval_step, place, log, params_of, early_stopping, data.evaluated
        )
        run_hooks.append(new_hook(loss, prepare=lambda: loss.held_out_batches))
    if data.evaluator is not None:
        shown_answers = run.tasks.shown if run.tasks else 0
        run_hooks.append(
            new_hook(
                hooks.TaskEvaluationHook(
                    data.evaluator, best_checkpoints, log, params_of, stop.raise_if_stopping, shown_answers
                )
            )
        )
    # Log a step's records before saving its checkpoint, so that a resumed run does not repeat them.
    run_hooks += [
        hooks.Hook(run.periods.checkpoint_period, saver, activity=progress.CHECKPOINT),
        hooks.Hook(run.periods.profile_period, profiler.start_trace, at_end=False),
    ]
    return TrainingLoop(programs.run_train_step, batches, run_hooks, bad_steps, saver, profiler, log)


def _build_result(
    loss_kind: str, path: epath.Path, step: int, stopped: str | None, seconds: Mapping[str, float] | None = None
) -> settings.TrainResult:
    last = {record['kind']: record for record in metrics.read_records(path / model_dir.METRICS)}
    checkpoint = str(path / model_dir.CHECKPOINTS / str(step))
    return settings.TrainResult(
        step, stopped, last.get(metrics.TRAIN_KIND, {}), last.get(loss_kind, {}), str(path), checkpoint, seconds or {}
    )
