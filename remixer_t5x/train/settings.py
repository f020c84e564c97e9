"""Defines dataclasses for the settings of a training run. configs/runs/pretrain.gin configures them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from remixer_t5x import ranges
from remixer_t5x.data import pipeline
from remixer_t5x.devices import compiler_options, partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.held_out_loss import Evaluation
from remixer_t5x.evaluate.task_evaluation import TaskEvaluation
from remixer_t5x.optim.optimizer import Optimizer, as_optimizer
from remixer_t5x.optim.train_step import NUM_REAL_TARGET_TOKENS
from remixer_t5x.run_folder.trackers import TensorBoard, Tracker


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The settings from which the train step and the train state are created.

    Attributes:
        optimizer: an `Optimizer`, or an optax gradient transformation to convert to one.
        microbatches: number of microbatches into which a batch is split for gradient accumulation.
        loss_normalizing_factor: divisor of the summed loss.
        seed: seed for the initial parameters and for dropout.
        xla_options: maps each platform to the XLA options for the train step.
    """

    model: Any
    optimizer: Optimizer
    partitioner: partition.Partitioner
    microbatches: ranges.Count = 1
    loss_normalizing_factor: ranges.Positive | str | None = NUM_REAL_TARGET_TOKENS
    seed: ranges.NonNegativeInt = 0
    xla_options: compiler_options.OptionsByPlatform | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, 'optimizer', as_optimizer(self.optimizer))


@dataclasses.dataclass(frozen=True)
class Folder:
    """The folder of a run, the number of checkpoints to keep, and the source of the initial parameters.

    Attributes:
        model_dir: the folder of the run.
        keep_checkpoints: number of checkpoints to keep; None keeps all.
        initial_checkpoint_path: MODEL_DIR or a checkpoint of another run, from which only parameters are loaded;
            ignored if `model_dir` contains a checkpoint.
        best_metrics: the metric that selects the best checkpoint of each task; see
            `evaluate.checkpoint_ranking.select_ranking_metric`.
        fresh_parameters: a substring of parameter names. Matching parameters are initialized randomly instead of from
            the initial checkpoint.
        checkpoint_map: maps parameter names to names in the initial checkpoint; see
            `initial_params.find_param_sources`.
        initial_vocabulary: the vocabulary of the initial checkpoint; None for the vocabulary of this run.
    """

    model_dir: str
    keep_checkpoints: ranges.Count | None = 3
    initial_checkpoint_path: str | None = None
    best_metrics: Mapping[str, str] | str | None = None
    fresh_parameters: str | None = None
    checkpoint_map: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    initial_vocabulary: Any = None

    def __post_init__(self) -> None:
        dependent = {
            'FRESH_PARAMETERS': self.fresh_parameters,
            'INITIAL_CHECKPOINT_MAP': self.checkpoint_map or None,
            'INITIAL_VOCABULARY': self.initial_vocabulary,
        }
        used = [name for name, value in dependent.items() if value is not None]
        if used and not self.initial_checkpoint_path:
            raise UserError(
                f'INITIAL_CHECKPOINT_PATH must be a checkpoint if {used[0]} is set, got '
                f'{self.initial_checkpoint_path!r}; pass --gin.INITIAL_CHECKPOINT_PATH=MODEL_DIR, or remove '
                f'{used[0]}'
            )


@dataclasses.dataclass(frozen=True)
class Periods:
    """The number of train steps, and the periods (in steps) of logs, evaluations, checkpoints and profiles.

    A period of None disables the activity. A run also logs, evaluates and saves a checkpoint after its last step. If
    `eval_at_start` is true, a new run also evaluates its initial parameters. `stop_after_evaluations` is the patience
    of early stopping: the run ends after this number of consecutive evaluations without improvement of the tasks'
    average metric or, in a run without tasks, of the held-out loss.
    """

    train_steps: ranges.Count
    log_period: ranges.Count = 100
    eval_period: ranges.Count | None = 1000
    checkpoint_period: ranges.Count = 1000
    profile_period: ranges.Count | None = None
    stop_after_evaluations: ranges.Count | None = None
    eval_at_start: bool = False

    def __post_init__(self) -> None:
        ranges.check_fields(self)


STOP, SKIP, REWIND, CONTINUE = 'stop', 'skip', 'rewind', 'continue'
NEWEST, PREVIOUS = 'newest', 'previous'
_BadStepPolicy = Annotated[str, ranges.Range("'stop', 'skip' or 'rewind'", {STOP, SKIP, REWIND}.__contains__)]
_SaveFailurePolicy = Annotated[str, ranges.Range("'stop' or 'continue'", {STOP, CONTINUE}.__contains__)]
_RestorePolicy = Annotated[str, ranges.Range("'newest' or 'previous'", {NEWEST, PREVIOUS}.__contains__)]


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The settings that determine how a run reacts to bad steps, failed writes and damaged checkpoints.

    Attributes:
        on_bad_step: the reaction to a loss spike, or to a loss or gradient that is not finite. 'stop' raises an error,
            'skip' skips the update, and 'rewind' restores the last checkpoint and skips the batches read since then.
        spike_factor: threshold for loss spikes, as a multiple of the running mean of the loss per token; None disables
            the check.
        on_save_failure: the reaction to a checkpoint that cannot be written. 'stop' raises an error; 'continue' retries
            at the next checkpoint.
        restore: the reaction to a damaged newest checkpoint. 'newest' raises an error; 'previous' moves the damaged
            checkpoint away and restores the previous checkpoint.
    """

    on_bad_step: _BadStepPolicy = STOP
    spike_factor: ranges.AboveOne | None = None
    on_save_failure: _SaveFailurePolicy = STOP
    restore: _RestorePolicy = NEWEST

    def __post_init__(self) -> None:
        ranges.check_fields(self)


@dataclasses.dataclass(frozen=True)
class Run:
    """All settings of a run. `evaluation` configures the held-out loss, and `tasks` configures the task metrics.

    Raises UserError if the data and the model have different model types, if a batch size is not divisible by the
    number of devices, or if evaluation settings contradict each other.
    """

    step_config: StepConfig
    dataset: pipeline.DatasetConfig
    folder: Folder
    periods: Periods
    evaluation: Evaluation | None = None
    tasks: TaskEvaluation | None = None
    recovery: Recovery = Recovery()
    trackers: Sequence[Tracker] = (TensorBoard(),)

    def __post_init__(self) -> None:
        if not isinstance(self.trackers, list | tuple) or any(
            isinstance(each, type) or not hasattr(each, 'open') for each in self.trackers
        ):
            raise UserError(
                f'TRACKERS must be a tuple of trackers, as in (@trackers.TensorBoard(),), or (), got '
                f'{self.trackers!r:.80}'
            )
        if self.evaluation is not None and self.evaluation.steps == 0:
            object.__setattr__(self, 'evaluation', None)
        periods = self.periods
        evaluates = periods.eval_period is not None and (self.evaluation or self.tasks)
        if not evaluates and (periods.stop_after_evaluations is not None or periods.eval_at_start):
            raise UserError(
                'STOP_AFTER_EVALUATIONS and EVAL_AT_START require evaluations; set EVAL_PERIOD and EVAL_STEPS, or '
                'remove both'
            )
        model_type = self.step_config.model.model_type
        for dataset in [self.dataset] if self.evaluation is None else [self.dataset, self.evaluation.dataset]:
            if dataset.model_type != model_type:
                raise UserError(
                    f'MODEL_TYPE must be {model_type!r}, the type of MODEL, got {dataset.model_type!r}; pass '
                    f"--gin_file=model_types/{model_type}.gin after the model's file, or --gin.MODEL_TYPE={model_type}"
                )
        check_batch_size = self.step_config.partitioner.check_batch_size
        check_batch_size(self.dataset.batch_size, self.step_config.microbatches)
        if self.evaluation is not None:
            check_batch_size(self.evaluation.dataset.batch_size)
        if self.tasks is not None:
            check_batch_size(self.tasks.decoding.batch_size)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    `stopped` is the name of the signal that ended the run early, or None. `train` is the last training record in
    metrics.jsonl, and `evaluation` the last record of the held-out loss; each is {} if there is none. `folder` is
    MODEL_DIR, and `checkpoint` is the folder of the last checkpoint.
    """

    step: int
    stopped: str | None
    train: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    folder: str
    checkpoint: str
    seconds_by_activity: Mapping[str, float] = dataclasses.field(default_factory=dict)
