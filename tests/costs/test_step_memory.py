"""The memory of a compiled step against counts of arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from remixer_t5x.costs import step_memory
from remixer_t5x.costs.step_memory import StepSpec
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.optim import optimizer

ROWS, LENGTH, EMBED, VOCAB = 8, 16, 24, 40


class TableModel:
    """A model with one table, whose loss saves `copies` arrays [rows, length, embed] for the backward pass."""

    copies = 6
    model_type = 'encoder_decoder'

    def init(self, rng, batch_shapes):
        table = jax.random.normal(rng, (VOCAB, EMBED))
        return {'table': nn.LogicallyPartitioned(table, ('vocab', 'embed'))}

    def loss(self, params, batch, dropout_rng=None):
        x = params['table'][batch['tokens']]
        for _ in range(self.copies):
            x = jnp.sin(x @ (params['table'].T @ params['table']))
        return jnp.sum(x), {'loss': jnp.sum(x), 'weights': jnp.float32(x.size)}


def step(rows=ROWS, partitioner=None, make=optimizer.adamw_rms, **settings):
    batch = {'tokens': jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)}
    partitioner = partitioner or Partitioner(devices=jax.devices()[:1])
    return StepSpec(TableModel(), make(0.01), partitioner, batch, **settings)


def test_memory_is_counted_from_shapes_and_microbatches_reduce_only_activations():
    few, single, split = (
        step_memory.measure_memory(step(rows, microbatches=microbatches))
        for rows, microbatches in ((ROWS, 1), (8 * ROWS, 1), (8 * ROWS, 8))
    )
    assert few.parameters == VOCAB * EMBED * 4 and few.batch == ROWS * LENGTH * 4
    # Two moments, the counters of the step, of Adam and of its schedule, and the usual loss.
    assert 2 * few.parameters < few.optimizer_state <= 2 * few.parameters + 16
    # The compiler counts the same bytes, so there is no padding.
    assert few.padding == 0
    row = TableModel.copies * LENGTH * EMBED * 4
    assert single.temporaries - few.temporaries >= 7 * ROWS * row
    assert single.temporaries >= 8 * ROWS * row + few.parameters
    assert split.temporaries < 0.5 * single.temporaries
    names = ('parameters', 'optimizer_state', 'batch')
    assert all(getattr(split, name) == getattr(single, name) for name in names)
    assert single.total == sum(dataclasses.astuple(single)[:-1])
    # The state contains a counter and a PRNG key.
    noisy = step(make=lambda rate: optax.chain(optax.sgd(rate), optax.add_noise(0.1, 0.5, jax.random.key(0))))
    assert step_memory.count_bytes_per_device(noisy.state_plan.abstract.opt_state) == 4 + 8


@pytest.mark.parametrize(
    ('message', 'total'),
    [('Used 20.5G of 15.48G hbm. Exceeded', int(20.5 * 2**30)), ('RESOURCE_EXHAUSTED: no number', 60)],
)
def test_an_out_of_memory_error_reports_the_memory_used(message, total):
    memory = step_memory._parse_out_of_memory_error({'parameters': 30, 'optimizer_state': 20, 'batch': 10}, message)
    assert memory.total == total and memory.temporaries == total - 60
