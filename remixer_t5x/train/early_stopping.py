"""Ends a run once its evaluations stop getting better. The count is a part of the checkpoint, so a resumed run ends at
the step at which an unbroken run ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from remixer_t5x.devices import collectives


@dataclasses.dataclass
class Patience:
    """Counts the evaluations since the best.

    Attributes:
        most: evaluations in a row without a better one that end the run; None never ends it.
        best: the highest value so far; None before the first.
        step: its step.
        since: evaluations since then.
    """

    most: int | None = None
    best: float | None = None
    step: int = 0
    since: int = 0

    @classmethod
    def restored(cls, most: int | None, record: Mapping[str, Any] | None) -> Patience:
        """What `record` of a checkpoint has counted; None: a checkpoint without a count."""
        return cls(most, **(record or {}))

    def record(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {'best': self.best, 'step': self.step, 'since': self.since}

    def observe(self, step: int, value: float) -> None:
        """Counts the evaluation of `step`; a higher `value` is better, and NaN is never better."""
        value = collectives.broadcast(value)
        if value == value and (self.best is None or value > self.best):
            self.best, self.step, self.since = value, step, 0
        else:
            self.since += 1

    @property
    def is_over(self) -> bool:
        return self.most is not None and self.since >= self.most

    def said(self) -> str:
        """Why the run is over."""
        return (
            f'no better evaluation than that of step {self.step} in the {self.since} since then '
            f'(STOP_AFTER_EVALUATIONS = {self.most})'
        )
