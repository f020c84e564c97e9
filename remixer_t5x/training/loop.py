"""The training loop: draw a batch, take a step, and let each hook (log, evaluate, save, profile) run when due.

The host never waits for the step it has just started: metrics stay on the device until a log, and the check
for NaN looks one step back. Everything that decides the numbers is in the state, the data position and the
step's @@"""

import contextlib
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath

from remixer_t5x.checkpoints import manager
from remixer_t5x.data import pipeline, prefetch
from remixer_t5x.devices import collectives
from remixer_t5x.evaluation import task_metrics
from remixer_t5x.evaluation.best import BestCheckpoints
from remixer_t5x.evaluation.held_out_loss import evaluate
from remixer_t5x.evaluation.task_evaluation import TaskEvaluator
from remixer_t5x.optimization import train_step
from remixer_t5x.run_folder import metrics, model_dir, run_lock
from remixer_t5x.training import bad_steps, preemption, progress, settings, start
from remixer_t5x.training.hooks import Hook, Profiler
from remixer_t5x.training.settings import Result, Run

# A position is exact at any step, but a step between two captures is found again by drawing the batches since.
MOST_BATCHES_DRAWN_AGAIN = 100
# For a checkpoint under way when one of several processes fails.
CLOSING_SECONDS = 20.0


def train(
    run: Run, *, config_text: str = '', flops_per_step: float | None = None, show_progress: bool = True
) -> Result:
    """Trains to `run.periods.train_steps`, from the newest checkpoint in MODEL_DIR if there is one.

    Args:
      run: what to train and where.
      config_text: the operative gin, written to MODEL_DIR/config.gin and into each checkpoint.
      flops_per_step: arithmetic of one step over the whole batch, for the utilisation; None shows none.
      show_progress: whether anything is printed.

    Raises:
      UserError: for every mistake of a user, a full disk, and a loss that is not finite.
    """
    path = start.check(run)
    record = start.describe(run.dataset, config_text)
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(run_lock.held(path))
        checkpoints = manager.Checkpoints(path, run.folder.keep_checkpoints)
        stack.enter_context(_closing(checkpoints))
        begin = start.begin(run, checkpoints, record)
        outlet = _Outlet(run, path, begin.step, flops_per_step, show_progress)
        stack.callback(outlet.close)
        if outlet.first:
            model_dir.write_config(path, config_text)
        stopped = None
        if begin.step < run.periods.train_steps:
            outlet.say_start(begin)
            session = _Session(run, begin, checkpoints, outlet)
            stopped = session.loop()
            step = session.step
        else:
            step = begin.step
            outlet.line.say(f'{path} is at step {step} already (TRAIN_STEPS = {run.periods.train_steps})')
    return _result(run, path, step, stopped)


class _Outlet:
    """Where numbers go: files and the screen of the first process, nothing on the others."""

    def __init__(self, run: Run, path: epath.Path, step: int, flops: float | None, show: bool):
        self.run, self.path = run, path
        self.first = jax.process_index() == 0
        self.line = progress.ProgressLine(run.periods.train_steps, step, quiet=not (show and self.first))
        self.writers = metrics.Writers()
        self.write_from(step)
        tokens = run.dataset.batch_size * sum(run.dataset.task_feature_lengths.values())
        peak = progress.peak_flops(jax.devices()[0].device_kind)
        self.work = progress.Work(tokens, flops, peak and peak * run.learner.partitioner.mesh.size)

    def write_from(self, step: int) -> None:
        """Drops what was logged after `step`, which is done again."""
        self.writers.close()
        if self.first:
            self.writers = metrics.Writers(
                metrics.JsonlWriter(self.path / model_dir.METRICS, step),
                metrics.TensorBoardWriter(self.path / model_dir.TENSORBOARD, step),
            )

    def say_start(self, begin: start.Start) -> None:
        parameters = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(begin.plan.abstract.params))
        mesh = ' x '.join(f'{name} {size}' for name, size in self.run.learner.partitioner.mesh.shape.items())
        self.line.say(f'{parameters:,} parameters · {jax.devices()[0].device_kind} · mesh {mesh}')
        for note in begin.notes:
            self.line.say(note)
        self.line.say(f'{self.path}: {begin.told} of {self.run.periods.train_steps}; the first step compiles')

    def close(self) -> None:
        self.line.close()
        self.writers.close()


class _Session:
    """The steps of one process: state, step, and the log's window move; the rest stays."""

    def __init__(self, run: Run, begin: start.Start, checkpoints: manager.Checkpoints, outlet: _Outlet):
        self.run, self.record, self.checkpoints, self.outlet = run, begin.record, checkpoints, outlet
        self.state, self.step, self.window = begin.take_state(), begin.step, begin.window
        self.begin = begin
        self.saved: int | None = begin.saved
        self.guard = bad_steps.BadSteps(run.recovery.on_bad_step, checkpoints)
        self.threads = pipeline.threads_beside(jax.default_backend())
        self.held_out: pipeline.EvalBatches | tuple[()] = ()
        if run.evaluation is not None and run.periods.eval_period is not None:
            share = run.learner.partitioner.data_shard()
            self.held_out = run.evaluation.batches(share, self.threads)
        self.judge: TaskEvaluator | None = None
        if run.tasks is not None:
            self.judge = TaskEvaluator(run.tasks, run.learner.model, run.learner.partitioner)
            self.best = BestCheckpoints(outlet.path, begin.record, run.folder.best_metrics)
            for note in self.judge.notes:
                outlet.line.say(note)

    def loop(self) -> str | None:
        """Steps until the end or a signal, whose name is returned. The last state is saved in both cases."""
        last = self.run.periods.train_steps
        profiler = Profiler(str(self.outlet.path / 'profile'))
        hooks, stopped = self._hooks(profiler), None
        self._compile()
        with preemption.StopRequest() as stop, self._open_data() as self.batches:
            self.clock = progress.Clock(self.outlet.work, self.step)
            if self.run.recovery.on_bad_step == settings.REWIND and self.saved is None:
                # There must be something to go back to.
                self.save(self.step)
            while self.step < last and not stopped:
                try:
                    self._advance(hooks, profiler, last)
                except bad_steps.Rewind as reason:
                    self._rewind(reason)
                stopped = stop.agreed(self.step)
            profiler.close()
            if self.saved != self.step:
                with contextlib.suppress(bad_steps.Rewind):
                    self.save(self.step, is_last=True)
            self.checkpoints.wait()
        return stopped

    def _advance(self, hooks: tuple[Hook, ...], profiler: Profiler, last: int) -> None:
        batch = next(self.batches)
        self.state, found = self.train_step(self.state, batch)
        self.step += 1
        self.window.add(found)
        self.guard.step(self.step, found)
        if self.step == self.begin.step + 1:
            # The first step compiles; speed is measured from the second on.
            jax.block_until_ready(found)
            self.clock.lap(self.step)
        self.outlet.line.update(self.step)
        for hook in hooks:
            if hook.due(self.step, last):
                hook.call(self.step)
        profiler.after_step(self.step, found)

    def _rewind(self, reason: bad_steps.Rewind) -> None:
        """The state and the log of the last checkpoint; the batches go on behind the one that was bad."""
        self.checkpoints.wait()
        step = collectives.broadcast(self.checkpoints.latest_step())
        times = self.guard.rewound(step)
        self.outlet.line.say(
            f'{reason}: back to step {step} (time {times} of {bad_steps.MOST_REWINDS}), without the batches since then'
        )
        # Its memory is needed for the other one.
        del self.state
        self.state, _ = self.checkpoints.restore(step, self.begin.plan.abstract)
        self.window = metrics.Window(self.checkpoints.run(step)['window'])
        self.step = self.saved = step
        self.outlet.write_from(step)
        self.clock = progress.Clock(self.outlet.work, step)

    def _hooks(self, profiler: Profiler) -> tuple[Hook, ...]:
        # The checkpoint comes after what it covers is written, so that a resumed run need not write it again.
        periods = self.run.periods
        return (
            Hook(periods.log_period, self.log),
            Hook(periods.eval_period, self.evaluate),
            Hook(periods.checkpoint_period, self.save),
            Hook(periods.profile_period, profiler.start, at_end=False),
        )

    def _compile(self) -> None:
        learner, plan = self.run.learner, self.begin.plan
        step = train_step.make_train_step(
            learner.model,
            plan.tx,
            microbatches=learner.microbatches,
            loss_normalizing_factor=learner.loss_normalizing_factor,
            dropout=learner.dropout_rate > 0,
            seed=learner.seed,
            learning_rate=learner.optimizer.learning_rate,
            spike_factor=self.run.recovery.spike_factor,
        )
        evaluation = train_step.make_eval_step(learner.model)
        self.train_step = train_step.jit_train_step(step, plan.shardings, learner.partitioner)
        self.eval_step = train_step.jit_eval_step(evaluation, plan.shardings, learner.partitioner)

    def _open_data(self) -> prefetch.Prefetcher:
        partitioner = self.run.learner.partitioner
        streams = len(self.begin.position.states)
        source = pipeline.TrainBatches(self.run.dataset, *partitioner.data_shard(), self.threads, streams)
        period = min(self.run.periods.checkpoint_period, MOST_BATCHES_DRAWN_AGAIN)
        return prefetch.Prefetcher(source, partitioner.shard_batch, self.begin.position, capture_period=period)

    def log(self, step: int) -> None:
        self.guard.now()
        numbers = metrics.means(self.window.totals())
        self.window = metrics.Window()
        timing = self.clock.lap(step)
        self.outlet.writers.write('train', step, numbers, timing)
        self.outlet.line.log(step, numbers, timing)
        with self._save_may_fail():
            self.checkpoints.check_for_errors()

    def evaluate(self, step: int) -> None:
        self.guard.now()
        begun = time.perf_counter()
        if self.run.evaluation is not None:
            self._evaluate_loss(step, self.run.evaluation.name)
        if self.judge is not None:
            self._evaluate_tasks(step, self.judge)
        self.clock.pause(time.perf_counter() - begun)

    def _evaluate_loss(self, step: int, kind: str) -> None:
        begun, place = time.perf_counter(), self.run.learner.partitioner.shard_batch
        numbers = evaluate(self.state.params, self.held_out, self.eval_step, place, kind)
        self.outlet.writers.write(kind, step, numbers, {'seconds': time.perf_counter() - begun})
        self.outlet.line.say(
            f'step {step} · held-out loss {numbers["loss"]:.4f} · perplexity {numbers["perplexity"]:.2f} · '
            f'token accuracy {100 * numbers["accuracy"]:.1f}%'
        )

    def _evaluate_tasks(self, step: int, judge: TaskEvaluator) -> None:
        for report in judge(self.state.params):
            self.outlet.writers.write(f'eval/{report.task}', step, report.metrics, {'seconds': report.seconds})
            is_best = self.best.keep(report, step, self.state.params)
            shown = task_metrics.describe(report.metrics) + (' · the best so far' if is_best else '')
            self.outlet.line.say(f'step {step} · {report.task} · {shown}')

    def save(self, step: int, is_last: bool = False) -> None:
        begun = time.perf_counter()
        self.guard.params(step, self.state.params)
        record = {**self.record, 'window': self.window.totals()}
        with self._save_may_fail():
            # The one before, for which this one waits in any case.
            self.checkpoints.wait()
        with self._save_may_fail(not is_last and step < self.run.periods.train_steps):
            self.checkpoints.save(step, self.state, self.batches.position(), record)
            self.saved = step
        self.clock.pause(time.perf_counter() - begun)

    @contextlib.contextmanager
    def _save_may_fail(self, may: bool = True) -> Iterator[None]:
        """A failed write is told and training goes on, where that is asked for and another write will follow."""
        try:
            yield
        except manager.SaveFailed as error:
            if not may or self.run.recovery.on_save_failure != settings.GO_ON:
                raise
            self.outlet.line.say(f'warning: {error}; training goes on (ON_SAVE_FAILURE)')
            self.checkpoints.reopen()


@contextlib.contextmanager
def _closing(checkpoints: manager.Checkpoints) -> Iterator[None]:
    try:
        yield
    except BaseException:
        # The reason for leaving is more useful than a second failure on the way out.
        closing = threading.Thread(target=_close_quietly, args=(checkpoints,), daemon=True)
        closing.start()
        # With several processes it waits for the others, who may wait for this one elsewhere.
        closing.join(None if jax.process_count() == 1 else CLOSING_SECONDS)
        raise
    checkpoints.close()


def _close_quietly(checkpoints: manager.Checkpoints) -> None:
    with contextlib.suppress(Exception):
        checkpoints.close()


def _result(run: Run, path: epath.Path, step: int, stopped: str | None) -> Result:
    name = run.evaluation.name if run.evaluation else ''
    last = {record['kind']: record for record in metrics.read(path / model_dir.METRICS)}
    where = str(path / model_dir.CHECKPOINTS / str(step))
    return Result(step, stopped, last.get('train', {}), last.get(name, {}), str(path), where)
