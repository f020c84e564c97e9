"""What happens beside the steps, each thing at its own period."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Hook:
    """`call(step)` every `period` steps (None: never), and after the last step if `at_end`."""

    period: int | None
    call: Callable[[int], None]
    at_end: bool = True

    def due(self, step: int, last: int) -> bool:
        return self.period is not None and (step % self.period == 0 or (self.at_end and step == last))


class Profiler:
    """Traces three steps into `folder` whenever `start` is called; look at them with TensorBoard's profiler."""

    def __init__(self, folder: str):
        self._folder = folder
        self._until: int | None = None

    def start(self, step: int) -> None:
        if self._until is None:
            jax.profiler.start_trace(self._folder)
            self._until = step + PROFILED_STEPS

    def after_step(self, step: int, result: Any) -> None:
        """Ends the trace once `result`, of the last traced step, is there."""
        if self._until is not None and step >= self._until:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        if self._until is not None:
            jax.profiler.stop_trace()
            self._until = None
