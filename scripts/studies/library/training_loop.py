"""The training loop of the studies: Adam in float32, several steps in one call of a compiled program."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from remixer_t5x.costs import counts
from remixer_t5x.data import batch_formats
from remixer_t5x.models import interface

# Steps in one call of the compiled program, so that Python's part does not count.
CHUNK = 25


@dataclasses.dataclass(frozen=True)
class Program:
    """Compiled functions. A carry is (parameters, state of Adam), and `train` consumes the carry that it is given.

    Attributes:
        init: key -> carry.
        begin: parameters -> carry with a fresh state.
        train: (carry, rows [steps, batch, ...], rate, number of the first step, key) -> carry, mean loss of the steps.
    """

    init: Callable[[jax.Array], Any]
    begin: Callable[[Any], Any]
    train: Callable[..., tuple[Any, jax.Array]]


def compiled(
    initial: Callable[[jax.Array], Any],
    loss: Callable[[Any, Any, jax.Array], jax.Array],
    schedule: Callable[[jax.Array], jax.Array],
    clip: float | None = 1.0,
) -> Program:
    """Adam, whose step number n has the size `rate * schedule(n)`.

    Args:
        initial: key -> parameters.
        loss: (parameters, rows [batch, ...], key of the step) -> mean loss.
        schedule: such as those of optax; `rate` is an argument of the program, so that rates share one.
        clip: highest norm of a gradient over all parameters; None clips nothing.
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


def loss_per_token(model: Any) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """(parameters, rows, key) -> the model's mean loss over what it predicts, without dropout."""

    def loss(params, rows, key):
        total, sums = model.loss(params, rows)
        return total / sums['weights']

    return loss


def step_flops(model: Any, batch: int, lengths: Mapping[str, int]) -> float:
    """Matrix products of one step, forward and backward; traced, not run."""
    rows = batch_formats.abstract_batch(model.model_type, lengths, batch)
    shapes = {name: array.shape for name, array in rows.items()}
    params = nn.unbox(interface.param_shapes(model, shapes))
    return counts.total_flops(lambda params, rows: jax.grad(lambda p: model.loss(p, rows)[0])(params), params, rows)


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
    """Trains for the steps with these numbers; the carry, and the mean loss of the last `chunk` of steps.

    Args:
        rows: a tree of arrays [examples, ...].
        order: indices of the examples of each batch, as `epochs.batches` has them.
        place: puts rows [steps, batch, ...] onto devices.
        label: shown with the number of the step on a terminal.
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
