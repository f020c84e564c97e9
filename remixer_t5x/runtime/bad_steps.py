"""Stops a run at the first number that is not finite, without making the device wait for the host."""

from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from remixer_t5x.errors import UserError
from remixer_t5x.runtime.checkpoint import Checkpoints


class NanGuard:
    """`step` looks at the step before, whose numbers are there by now; `now` waits for the newest one."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._unread: tuple[int, Mapping[str, jax.Array]] | None = None

    def step(self, number: int, found: Mapping[str, jax.Array]) -> None:
        """Keeps the metrics of step `number`; raises UserError if the step before it was not finite."""
        self.now()
        self._unread = (number, found)

    def now(self) -> None:
        """Raises UserError if the newest step was not finite."""
        unread, self._unread = self._unread, None
        if unread is not None and float(unread[1]['nonfinite']) > 0:
            self._stop(unread[0], 'the loss or its gradient')

    def params(self, number: int, params: Any) -> None:
        """Raises UserError if a parameter is not finite: a finite gradient can still make an infinite one."""
        self.now()
        if not bool(_all_finite(params)):
            self._stop(number, 'a parameter')

    def _stop(self, step: int, what: str) -> NoReturn:
        kept = self._checkpoints.latest_step()
        where = 'no checkpoint was saved yet'
        if kept is not None:
            where = f'the last good checkpoint is step {kept} in {self._checkpoints.folder}'
        raise UserError(
            f'{what} is not finite at step {step}; {where}; lower the learning rate or lengthen its warmup, '
            'and look at the data near that step'
        )


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
