"""The compiled functions of a run: its train step, which compiles while the data is opened, and its evaluation step."""

import threading
from typing import Any

import jax

from remixer_t5x.data import pipeline
from remixer_t5x.optimization import train_step
from remixer_t5x.optimization.train_state import StatePlan
from remixer_t5x.training.settings import Run


class CompiledAhead:
    """A jitted function that a thread traces and compiles, from `start` on, for arguments of the given shapes.

    It is the same program that the first call would have compiled. A call waits for it, and raises what compiling
    raised.
    """

    def __init__(self, function: train_step.Compiled, *shapes: Any):
        self._function, self._shapes = function, shapes
        self._program: jax.stages.Compiled | None = None
        self._error: BaseException | None = None
        # Not a daemon thread, because Python must not exit while XLA compiles.
        self._thread = threading.Thread(target=self._compile, name='compile')

    def start(self) -> None:
        """Starts to compile, unless it has already started."""
        if self._thread.ident is None:
            self._thread.start()

    def _compile(self) -> None:
        try:
            self._program = self._function.lower(*self._shapes).compile()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Waits until the function is compiled. Raises what compiling raised."""
        self.start()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def __call__(self, *args: Any) -> Any:
        if self._program is None:
            self.wait()
        assert self._program is not None
        return self._program(*args)


def train(run: Run, plan: StatePlan) -> CompiledAhead:
    """`(state, batch) -> (state, metrics)`."""
    learner = run.learner
    step = train_step.make_train_step(
        learner.model,
        plan.tx,
        microbatches=learner.microbatches,
        loss_normalizing_factor=learner.loss_normalizing_factor,
        dropout=learner.dropout_rate > 0,
        seed=learner.seed,
        learning_rate=learner.optimizer.learning_rate,
        spike_factor=run.recovery.spike_factor,
    )
    sharding = learner.partitioner.batch_sharding
    batch = {
        name: jax.ShapeDtypeStruct(shape, 'int32', sharding=sharding)
        for name, shape in pipeline.batch_shapes(run.dataset).items()
    }
    return CompiledAhead(train_step.jit_train_step(step, plan.shardings, learner.partitioner), plan.abstract, batch)


def evaluation(run: Run, plan: StatePlan) -> train_step.Compiled:
    """`(params, batch) -> sums`; compiles at its first call."""
    step = train_step.make_eval_step(run.learner.model)
    return train_step.jit_eval_step(step, plan.shardings, run.learner.partitioner)
