"""The settings of a training run, grouped by purpose; gin builds these (configs/runs/pretrain.gin)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
class Learner:
    """What one step computes, with the names of `train_step.make_train_step` and `train_state.plan`.

    `optimizer` may also be given as an optax transformation. `dropout_rate` belongs to the model, which has its own
    settings; here it only decides whether a step draws dropout keys. `seed` fixes initial parameters and dropout.
    `xla_options` are XLA options for the train step, by platform.
    """

    model: Any
    optimizer: Optimizer
    partitioner: partition.Partitioner
    microbatches: ranges.Count = 1
    loss_normalizing_factor: ranges.Positive | str | None = NUM_REAL_TARGET_TOKENS
    dropout_rate: ranges.Rate = 0.0
    seed: ranges.Whole = 0
    xla_options: compiler_options.ByPlatform | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, 'optimizer', as_optimizer(self.optimizer))


@dataclasses.dataclass(frozen=True)
class Folder:
    """The folder of a run, the number of checkpoints to keep, and the parameters to start from.

    `initial_checkpoint_path` is MODEL_DIR or one checkpoint of another run; its optimizer state and step are not used.
    It is read only while `model_dir` has no checkpoint. Parameters whose names have `fresh_parameters` in them do not
    come from there, `checkpoint_map` says how others are called there, and `initial_vocabulary` which vocabulary it
    has, where it is another one (`initial_params`). `best_metrics` names the metric whose best checkpoint is kept (see
    `evaluate.best.score`).
    """

    model_dir: str
    keep_checkpoints: ranges.Count | None = 3
    initial_checkpoint_path: str | None = None
    best_metrics: Mapping[str, str] | str | None = None
    fresh_parameters: str | None = None
    checkpoint_map: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    initial_vocabulary: Any = None


@dataclasses.dataclass(frozen=True)
class Periods:
    """Periods in steps; None means never. Logs, evaluations and checkpoints also happen after the last step.

    `eval_at_start` also evaluates the initial parameters, before the first step of a new run.
    `stop_after_evaluations` ends the run early: after this many evaluations in a row without a better one, which is a
    higher average of the tasks' metrics, or without tasks a lower held-out loss.
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


STOP, SKIP, REWIND, GO_ON = 'stop', 'skip', 'rewind', 'go_on'
NEWEST, PREVIOUS = 'newest', 'previous'
_CHOICES = {
    'on_bad_step': ('ON_BAD_STEP', (STOP, SKIP, REWIND)),
    'on_save_failure': ('ON_SAVE_FAILURE', (STOP, GO_ON)),
    'restore': ('RESTORE', (NEWEST, PREVIOUS)),
}


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What a run does if something fails.

    Attributes:
        on_bad_step: if a loss or gradient is not finite, or at a spike: 'stop'; 'skip' that update; or 'rewind' to the
                last checkpoint and skip the batches since.
        spike_factor: a loss per token above this multiple of its running mean is a spike; None does not look for
            spikes.
        on_save_failure: if a checkpoint cannot be written: 'stop', or 'go_on' and try again at the next one.
        restore: 'newest' refuses a damaged newest checkpoint, 'previous' moves it away and restores the checkpoint
                before it.
    """

    on_bad_step: str = STOP
    spike_factor: ranges.AboveOne | None = None
    on_save_failure: str = STOP
    restore: str = NEWEST

    def __post_init__(self) -> None:
        for field, (macro, allowed) in _CHOICES.items():
            if getattr(self, field) not in allowed:
                options = ' or '.join(repr(choice) for choice in allowed)
                raise UserError(f'{macro} is {getattr(self, field)!r}; it takes {options}')
        ranges.check_fields(self)


@dataclasses.dataclass(frozen=True)
class Run:
    """All settings of a run.

    `evaluation` computes the held-out loss (with `tasks`, of each of them), `tasks` the tasks' metrics; both are None
    only with `periods.eval_period` None. `trackers` show its numbers while it trains.
    """

    learner: Learner
    dataset: pipeline.DatasetConfig
    folder: Folder
    periods: Periods
    evaluation: Evaluation | None = None
    tasks: TaskEvaluation | None = None
    recovery: Recovery = Recovery()
    trackers: Sequence[Tracker] = (TensorBoard(),)

    def __post_init__(self) -> None:
        if not isinstance(self.trackers, list | tuple) or not all(hasattr(one, 'open') for one in self.trackers):
            raise UserError(
                f'TRACKERS is {self.trackers!r:.80}; it takes trackers in parentheses, as in '
                '(@trackers.TensorBoard(),), or () for none'
            )
        period = self.periods.eval_period
        if self.evaluation is not None and self.evaluation.steps == 0:
            object.__setattr__(self, 'evaluation', None)
        if self.evaluation is None and self.tasks is None and period is not None:
            raise UserError(f'EVAL_PERIOD is {period} and no evaluation is set up; give EVAL_PERIOD = None')
        if self.periods.stop_after_evaluations is not None and period is None:
            raise UserError('STOP_AFTER_EVALUATIONS needs evaluations; give EVAL_PERIOD a number of steps')
        if self.periods.eval_at_start and period is None:
            raise UserError('EVAL_AT_START needs evaluations; give EVAL_PERIOD a number of steps')


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    `step` was reached and `checkpoint` is its folder; `stopped` names the signal that ended the run early;
    `train` and `evaluation` are the last records of metrics.jsonl ({} if there is none). `spent` has the seconds of
    this process by what they were spent on (`progress.Timeline`).
    """

    step: int
    stopped: str | None
    train: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    folder: str
    checkpoint: str
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)
