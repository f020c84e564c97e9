"""What happens at a bad step: its loss or gradient is not finite, or its loss is a spike.

The step itself left parameters and optimizer unchanged (`train_step`). The host learns of it one step later, so that
the device never waits for the host.
"""

from collections.abc import Mapping
from typing import Any

import jax

from remixer_t5x.checkpoints.manager import Checkpoints
from remixer_t5x.errors import UserError
from remixer_t5x.optim import train_state
from remixer_t5x.train.settings import REWIND, SKIP, STOP

# After more bad steps in a row than this, the run cannot recover.
MOST_SKIPPED_IN_A_ROW = 20
MOST_REWINDS = 5


class Rewind(Exception):
    """The run must go back to its last checkpoint; the text says why."""


class BadSteps:
    """`step` looks at the previous step, whose numbers have arrived by now; `now` waits for the newest step.

    `policy` is settings.Recovery's `on_bad_step`. Both raise UserError if the run has to stop, or Rewind.
    """

    def __init__(self, policy: str, checkpoints: Checkpoints):
        self._policy, self._checkpoints = policy, checkpoints
        self._unread: tuple[int, Mapping[str, jax.Array]] | None = None
        self._in_a_row = 0
        self._rewinds: dict[int, int] = {}

    def step(self, number: int, found: Mapping[str, jax.Array]) -> None:
        """Keeps the metrics of step `number`; acts if the previous step was bad."""
        self.now()
        self._unread = (number, found)

    def now(self) -> None:
        """Acts if the newest step was bad."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        step, found = unread
        if float(found['nonfinite']) > 0:
            self._act('the loss or its gradient is not finite', step)
        elif float(found.get('spike', 0.0)) > 0:
            self._act('the loss is a spike (SPIKE_FACTOR)', step)
        else:
            self._in_a_row = 0

    def params(self, number: int, params: Any) -> None:
        """Acts if a parameter is not finite, which a finite gradient can still make; it cannot be skipped."""
        self.now()
        if not bool(train_state.all_finite(params)):
            text = 'a parameter is not finite'
            if self._policy == REWIND:
                raise Rewind(f'{text} at step {number}')
            self._stop(text, number)

    def rewound(self, step: int) -> int:
        """Counts a rewind to the checkpoint of `step` and returns their number. Raises UserError if there were too
        many.
        """
        self._unread = None
        self._rewinds[step] = self._rewinds.get(step, 0) + 1
        if self._rewinds[step] > MOST_REWINDS:
            self._stop(f'the run went back to step {step} {MOST_REWINDS} times and does not get past it', step)
        return self._rewinds[step]

    def _act(self, text: str, step: int) -> None:
        self._in_a_row += 1
        if self._policy == REWIND:
            raise Rewind(f'{text} at step {step}')
        if self._policy != SKIP:
            self._stop(text, step)
        if self._in_a_row > MOST_SKIPPED_IN_A_ROW:
            self._stop(f'{MOST_SKIPPED_IN_A_ROW} steps in a row were skipped: {text}', step)

    def _stop(self, text: str, step: int) -> None:
        kept = self._checkpoints.latest_step()
        where = 'no checkpoint was saved yet'
        if kept is not None:
            where = f'the last good checkpoint is step {kept} in {self._checkpoints.folder}'
        other = ', or set ON_BAD_STEP to "skip" or "rewind"' if self._policy == STOP else ''
        raise UserError(
            f'{text} at step {step}; {where}; lower the learning rate or lengthen its warmup, and look at the data '
            f'near that step{other}'
        )
