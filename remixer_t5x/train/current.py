"""The state of a run between its steps: the train state, metrics, data position, and the count for early stopping."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from remixer_t5x.data.prefetch import Position
from remixer_t5x.devices import collectives
from remixer_t5x.optim import train_state
from remixer_t5x.run_folder import metrics


@dataclasses.dataclass
class Patience:
    """Counts the evaluations since the best, and ends a run whose evaluations stop improving.

    The count is a part of the checkpoint, so a resumed run ends at the same step as an uninterrupted run.

    Attributes:
        most: number of evaluations in a row without a better one that ends the run; None never ends it.
        best: the highest value so far; None before the first.
        step: the step of that value.
        since: evaluations since then.
    """

    most: int | None = None
    best: float | None = None
    step: int = 0
    since: int = 0

    @classmethod
    def restored(cls, most: int | None, record: Mapping[str, Any] | None) -> 'Patience':
        """Restores the count from `record` of a checkpoint; None for a checkpoint without a count."""
        return cls(most, **(record or {}))

    def record(self) -> dict[str, Any]:
        """Returns the count as JSON for a checkpoint."""
        return {'best': self.best, 'step': self.step, 'since': self.since}

    def observe(self, step: int, value: float) -> None:
        """Counts the evaluation of `step`; a higher `value` is better, NaN never."""
        value = collectives.broadcast(value)
        if value == value and (self.best is None or value > self.best):
            self.best, self.step, self.since = value, step, 0
        else:
            self.since += 1

    @property
    def is_over(self) -> bool:
        return self.most is not None and self.since >= self.most

    def reason(self) -> str:
        """Describes why the run is over."""
        return (
            f'no better evaluation than that of step {self.step} in the {self.since} since then '
            f'(STOP_AFTER_EVALUATIONS = {self.most})'
        )


@dataclasses.dataclass
class Current:
    """The current state of a run, which its steps and hooks change.

    Attributes:
        state: the train state after `step` updates. There must be no other reference to it, because a step donates its
            buffers.
        step: number of updates.
        window: metrics since the last log.
        saved: step of the newest checkpoint; None without a checkpoint.
        position: position in the data at which this process started.
        patience: the count of evaluations since the best.
    """

    state: train_state.TrainState
    step: int = 0
    window: metrics.Window = dataclasses.field(default_factory=metrics.Window)
    saved: int | None = None
    position: Position = dataclasses.field(default_factory=Position)
    patience: Patience = dataclasses.field(default_factory=Patience)
