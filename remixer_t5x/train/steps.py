"""Compiles the functions of a run. The initial state and the train step compile while the data is opened."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from remixer_t5x import startup
from remixer_t5x.data import batch_formats, pipeline, task_vocabulary
from remixer_t5x.devices import compiler_options
from remixer_t5x.optim import train_state, train_step
from remixer_t5x.optim.train_state import TrainState
from remixer_t5x.train.settings import Learner


class Jitted(Protocol):
    """The result of `jax.jit`, or `train_step.CompiledStep`."""

    def lower(self, *args: Any) -> jax.stages.Lowered: ...


class CompiledAhead:
    """A jitted function that a thread compiles for arguments of the given shapes after `start`.

    It is the program that the first call would compile, with `options` for XLA. A call waits for it, and raises the
    error of its compilation.
    """

    def __init__(self, function: Jitted, *shapes: Any, options: Mapping[str, Any] | None = None):
        self._function, self._shapes, self._options = function, shapes, options or {}
        self._program: jax.stages.Compiled | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Traces the function and starts to compile it, unless that is done. Raises the errors of tracing."""
        if self._thread is None:
            lowered = self._function.lower(*self._shapes)
            # Not a daemon thread, because Python must not exit while XLA compiles.
            self._thread = threading.Thread(target=self._compile, args=(lowered,), name=startup.COMPILES)
            self._thread.start()

    def _compile(self, lowered: jax.stages.Lowered) -> None:
        try:
            self._program = compiler_options.compile_with_options(lowered, self._options)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Waits until the function is compiled. Raises the error of its compilation."""
        self.start()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def __call__(self, *args: Any) -> Any:
        if self._program is None:
            self.wait()
        assert self._program is not None
        return self._program(*args)


class Programs:
    """The compiled functions of a run, and `plan`, the shapes and shardings of its state.

    XLA compiles in threads while the caller prepares and opens the data.

    Attributes:
        train: `(state, batch) -> (state, metrics)`, for the batches of the run's data.
        initial_state: `(key) -> state`; it compiles ahead if `is_new`, a run with random parameters.
        options: options of XLA for the train step, by the hardware file and the devices that are there.
    """

    def __init__(self, learner: Learner, dataset: pipeline.DatasetConfig, spike_factor: float | None, is_new: bool):
        batch = pipeline.abstract_batch(dataset)
        shapes = {name: array.shape for name, array in batch.items()}
        self._learner = learner
        self.plan = train_state.plan(learner.model, learner.optimizer, shapes, learner.partitioner)
        self.options = compiler_options.for_training(learner.xla_options, learner.partitioner.mesh.devices.flat[0])
        step = train_step.make_train_step(
            learner.model,
            self.plan.tx,
            microbatches=learner.microbatches,
            loss_normalizing_factor=learner.loss_normalizing_factor,
            dropout=learner.dropout_rate > 0,
            seed=learner.seed,
            learning_rate=learner.optimizer.learning_rate,
            spike_factor=spike_factor,
            trainable=learner.optimizer.trainable,
        )
        sharding = learner.partitioner.batch_sharding
        abstract = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for name, array in batch.items()
        }
        jitted = train_step.jit_train_step(step, self.plan.shardings, learner.partitioner, donate=True)
        self.train = CompiledAhead(jitted, self.plan.abstract, abstract, options=self.options)
        self.initial_state = CompiledAhead(self.plan.jit_init(), jax.random.key(learner.seed))
        self.train.start()
        if is_new:
            self.initial_state.start()

    def evaluation(self, vocabulary: Any) -> train_step.CompiledStep:
        """Returns `(params, batch) -> sums`, which compiles at its first call; `vocabulary` is the run's."""
        model, token_bytes = self._learner.model, None
        if model.model_type == batch_formats.DECODER_ONLY:
            token_bytes = task_vocabulary.token_bytes(vocabulary)
        step = train_step.make_eval_step(model, token_bytes, count_targets=model.model_type not in batch_formats.HEADS)
        return train_step.jit_eval_step(step, self.plan.shardings, self._learner.partitioner)

    def evaluated(self) -> Callable[[TrainState], Any]:
        """Returns `(state) -> params` to evaluate: the optimizer's average of parameters, or the last ones."""
        average = self._learner.optimizer.evaluated
        if average is None:
            return lambda state: state.params
        return jax.jit(lambda state: average(state.opt_state, state.params), out_shardings=self.plan.shardings.params)
