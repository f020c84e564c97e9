"""Compiles the train step and evaluation step of a run, and creates its initial state.

Background threads compile the train step and the parameter initialization while the data is being opened.
"""

from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

import jax

from remixer_t5x.data import batch_formats, pipeline, task_vocabulary
from remixer_t5x.devices import collectives, compilation_cache, compiler_options
from remixer_t5x.evaluate import head_predictions
from remixer_t5x.optim import train_state, train_step
from remixer_t5x.optim.train_state import TrainState
from remixer_t5x.run_folder import model_dir, object_store
from remixer_t5x.train import initial_params
from remixer_t5x.train.settings import Run


class AheadOfTimeFunction:
    """A jitted function that is compiled in a background thread for fixed argument shapes.

    The first call waits until all processes have compiled the function, and raises compilation errors. `function` is a
    function returned by `jax.jit`, or a `train_step.CompiledStep`. `options` maps XLA option names to values.
    """

    def __init__(self, function: Any, *shapes: Any, options: Mapping[str, Any] | None = None):
        self._function, self._shapes, self._options = function, shapes, options or {}
        self._program: futures.Future[jax.stages.Compiled] | None = None
        self._is_first_call = True

    def start_compilation(self) -> None:
        """Traces the function and starts its compilation. Later calls do nothing. Raises tracing errors."""
        if self._program is None:
            lowered = self._function.lower(*self._shapes)
            # Python waits for this thread before it exits, because a process must not exit while XLA is compiling.
            executor = futures.ThreadPoolExecutor(1, compilation_cache.COMPILE_THREAD_NAME)
            self._program = executor.submit(compiler_options.compile_with_options, lowered, self._options)
            executor.shutdown(wait=False)

    def __call__(self, *args: Any) -> Any:
        self.start_compilation()
        assert self._program is not None
        program = self._program.result()
        if self._is_first_call:
            # On CPUs, Gloo waits at most 30 s for each process to join the first collective operation.
            collectives.barrier()
            self._is_first_call = False
        return program(*args)


class CompiledPrograms:
    """Compiles the programs of a run and creates the run's initial state.

    Attributes:
        plan: the shapes and shardings of the train state.
    """

    def __init__(self, run: Run):
        """Starts compiling the train step and, unless the run may restore parameters, the random initialization."""
        self._config, self._folder = config, folder = run.step_config, run.folder
        shapes = pipeline.get_batch_shapes(run.dataset)
        self.plan = train_state.plan_train_state(config.model, config.optimizer, shapes, config.partitioner)
        step = train_step.make_train_step(
            config.model,
            self.plan.tx,
            microbatches=config.microbatches,
            loss_normalizing_factor=config.loss_normalizing_factor,
            seed=config.seed,
            learning_rate=config.optimizer.learning_rate,
            spike_factor=run.recovery.spike_factor,
            trainable=config.optimizer.trainable,
        )
        jitted = train_step.jit_train_step(step, self.plan.shardings, config.partitioner, donate=True)
        sharding = config.partitioner.batch_sharding
        options = compiler_options.get_training_options(config.xla_options, config.partitioner.mesh.devices.flat[0])
        # Maps the number of positions of a batch, which depends on its length bucket, to the program for these batches.
        self._train_steps: dict[int, AheadOfTimeFunction] = {}
        for arrays in pipeline.get_abstract_train_batches(run.dataset):
            batch = {
                name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
                for name, array in arrays.items()
            }
            program = AheadOfTimeFunction(jitted, self.plan.abstract, batch, options=options)
            self._train_steps[batch_formats.count_positions(arrays)] = program
            program.start_compilation()
        self._init = AheadOfTimeFunction(self.plan.jit_init(), jax.random.key(config.seed))
        checkpoints = model_dir.to_absolute_path(folder.model_dir) / model_dir.CHECKPOINTS
        # Do not look for checkpoints in a bucket here, because the bucket may be slow or unavailable.
        if not (folder.initial_checkpoint_path or object_store.is_remote(checkpoints) or checkpoints.exists()):
            self._init.start_compilation()

    def run_train_step(
        self, state: TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Runs the train step and returns the new state and the metrics."""
        return self._train_steps[batch_formats.count_positions(batch)](state, batch)

    def create_initial_state(self, vocabulary: Any) -> tuple[TrainState, list[str]]:
        """Returns the state at step 0 and a list of messages for the user.

        Loads the parameters from the initial checkpoint, if there is one, and otherwise initializes them randomly.
        `vocabulary` is the vocabulary of the run. Raises UserError if the checkpoint's parameters do not fit the model.
        """
        if not self._folder.initial_checkpoint_path:
            return self._create_random_state(), []
        fresh = getattr(self._config.model, 'fresh_parameters', ())
        params, description = initial_params.load_initial_params(
            self._folder, self.plan, vocabulary, self._create_random_state, fresh
        )
        return self.plan.init_from_params(params, donate=True), [description]

    def _create_random_state(self) -> TrainState:
        return self._init(jax.random.key(self._config.seed))

    def build_eval_step(self, vocabulary: Any) -> train_step.CompiledStep:
        """Returns the evaluation step `(params, batch) -> sums`, which is compiled when it is first called."""
        model, token_bytes = self._config.model, None
        if model.model_type == batch_formats.DECODER_ONLY:
            token_bytes = task_vocabulary.count_bytes_per_token(vocabulary)
        step = train_step.make_eval_step(model, token_bytes, count_targets=not head_predictions.has_head(model))
        return train_step.jit_eval_step(step, self.plan.shardings, self._config.partitioner)

    def build_params_selector(self) -> Callable[[TrainState], Any]:
        """Returns a function that maps a train state to the parameters to evaluate.

        The averages are evaluated if the optimizer averages parameters; otherwise, the latest parameters are evaluated.
        """
        average = self._config.optimizer.evaluated
        if average is None:
            return lambda state: state.params
        return jax.jit(lambda state: average(state.opt_state, state.params), out_shardings=self.plan.shardings.params)
