"""What a run says about its learning rate before the first step: its start, peak and end, and a warning."""

from collections.abc import Iterator

import jax
import numpy as np

from remixer_t5x.optim.optimizer import Optimizer

# Steps at which the schedule is looked at; a schedule of more steps is smooth between them.
_LOOKS = 1000


def notes(optimizer: Optimizer, steps: int) -> Iterator[str]:
    """One line with the rates of a run of `steps` steps, and a warning if they rise above `optimizer.highest_rate`.

    Says nothing of an optimizer whose rate is not known.
    """
    if optimizer.learning_rate is None:
        return
    at = np.unique(np.linspace(0, steps - 1, min(steps, _LOOKS)).round().astype(np.int32))
    rates = np.asarray(jax.jit(jax.vmap(optimizer.learning_rate))(at))
    peak = int(rates.argmax())
    parts = [f'{rates[0]:.3g} at step 1']
    if 0 < peak < len(at) - 1:
        parts.append(f'{rates[peak]:.3g} at step {at[peak] + 1:,}')
    if len(at) > 1:
        parts.append(f'{rates[-1]:.3g} at step {steps:,}')
    constant = rates.min() == rates.max()
    yield f'learning rate: {rates[0]:.3g}' if constant else f'learning rate: {", ".join(parts)}'
    highest = optimizer.highest_rate
    if highest is not None and rates[peak] > highest:
        yield (
            f'warning: the learning rate reaches {rates[peak]:.3g}. This optimizer changes a parameter by about that '
            f'share of its size at each step, and T5 is trained with 0.01 to 0.02; lower LEARNING_RATE, to {highest:g} '
            'at most'
        )
