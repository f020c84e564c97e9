"""Implements the training loop of the studies: Adam in float32, with multiple steps per call of a compiled program."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Number of steps per call of the compiled program, to amortize Python's overhead.
CHUNK = 25


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled training program. A carry is a pair (parameters, Adam state); `train` donates its carry.

    Attributes:
        init: key -> carry.
        begin: parameters -> carry with a fresh state.
        train: (carry, rows [steps, batch, ...], rate, number of the first step, key) -> carry, mean loss of the steps.
    """

    init: Callable[[jax.Array], Any]
    begin: Callable[[Any], Any]
    train: Callable[..., tuple[Any, jax.Array]]


def compile_training(
    initial: Callable[[jax.Array], Any],
    loss: Callable[[Any, Any, jax.Array], jax.Array],
    schedule: Callable[[jax.Array], jax.Array],
    clip: float | None = 1.0,
) -> Program:
    """Compiles training with Adam and the learning rate `rate * schedule(n)` at step n.

    Args:
        initial: key -> parameters.
        loss: (parameters, rows [batch, ...], key of the step) -> mean loss.
        schedule: an optax schedule. `rate` is an argument of the program, so that all rates share one compilation.
        clip: maximum norm of the gradient over all parameters; None does not clip.
    """
    adam = optax.scale_by_adam()
    if clip is not None:
        adam = optax.chain(optax.clip_by_global_norm(clip), adam)

    def begin(params):
        return params, adam.init(params)

    def step(carry, rows, rate, number, key):
        params, state = carry
        error, gradient = jax.value_and_grad(loss)(params, rows, jax.random.fold_in(key, number))
        updates, state = adam.update(gradient, state, params)
        scale = -rate * schedule(number)
        return (jax.tree.map(lambda p, u: p + scale * u, params, updates), state), error

    def train(carry, rows, rate, first, key):
        numbers = first + jnp.arange(jax.tree.leaves(rows)[0].shape[0])
        carry, errors = jax.lax.scan(lambda carry, now: step(carry, now[0], rate, now[1], key), carry, (rows, numbers))
        return carry, jnp.mean(errors)

    return Program(jax.jit(lambda key: begin(initial(key))), jax.jit(begin), jax.jit(train, donate_argnums=0))


def run(
    program: Program,
    carry: Any,
    rows: Any,
    order: Iterator[np.ndarray],
    steps: range,
    *,
    rate: float = 1.0,
    key: jax.Array | None = None,
    chunk: int = CHUNK,
    place: Callable[[Any], Any] = lambda rows: rows,
    label: str = '',
) -> tuple[Any, float]:
    """Trains for the given steps, and returns the carry and the mean loss of the last `chunk` of steps.

    Args:
        rows: a tree of arrays [examples, ...].
        order: example indices of each batch, from `epochs.batches`.
        place: function that puts rows [steps, batch, ...] on devices.
        label: label to print with the step number on a terminal.
    """
    key = jax.random.key(0) if key is None else key
    loss = float('nan')
    for done in range(steps.start, steps.stop, chunk):
        chosen = np.stack(list(itertools.islice(order, min(chunk, steps.stop - done))))
        taken = place(jax.tree.map(lambda array, chosen=chosen: array[chosen], rows))
        carry, mean = program.train(carry, taken, rate, done, key)
        loss = float(mean)
        if label and sys.stdout.isatty():
            print(f'{label}: step {done + len(chosen):,} of {steps.stop:,}', end='\r', flush=True)
    return carry, loss
