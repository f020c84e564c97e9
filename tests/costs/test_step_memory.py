"""Bytes of a compiled step against counts by hand, and the search for changes with a compiler made of arithmetic."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from remixer_t5x.costs import memory_advice, step_memory
from remixer_t5x.costs.step_memory import Step, StepMemory
from remixer_t5x.devices.hypothetical import Hardware
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.optim import optimizer

ROWS, LENGTH, EMBED, VOCAB = 8, 16, 24, 40


class Words:
    """A model of one table, whose loss keeps `copies` arrays [rows, length, embed] for the backward pass."""

    copies = 6

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
    return Step(Words(), make(0.01), partitioner, batch, **settings)


@pytest.fixture(scope='module')
def measured():
    return functools.cache(lambda rows, microbatches: step_memory.measure(step(rows, microbatches=microbatches)))


def test_what_a_step_is_given_is_counted_from_shapes(measured):
    found = measured(ROWS, 1)
    assert found.parameters == VOCAB * EMBED * 4
    # Two moments, the counters of the step, of Adam and of its schedule, and the usual loss.
    assert 2 * found.parameters < found.optimizer_state <= 2 * found.parameters + 16
    assert found.batch == ROWS * LENGTH * 4
    # The compiler counts the same, so that nothing is left for layouts.
    assert found.padding == 0


def test_temporaries_hold_what_the_backward_pass_needs(measured):
    kept = Words.copies * LENGTH * EMBED * 4
    found = {rows: measured(rows, 1).temporaries for rows in (ROWS, 8 * ROWS)}
    assert found[8 * ROWS] - found[ROWS] >= 7 * ROWS * kept
    assert found[8 * ROWS] >= 8 * ROWS * kept + measured(ROWS, 1).parameters


def test_microbatches_save_activations(measured):
    whole, parts = measured(8 * ROWS, 1), measured(8 * ROWS, 8)
    assert parts.temporaries < 0.5 * whole.temporaries
    assert (parts.parameters, parts.optimizer_state, parts.batch) == (
        whole.parameters,
        whole.optimizer_state,
        whole.batch,
    )


def test_the_total_is_the_sum_of_the_parts(measured):
    *parts, total = dataclasses.astuple(measured(ROWS, 1))
    assert total == sum(parts)


def test_a_batch_that_does_not_divide_is_one_line():
    with pytest.raises(UserError, match='BATCH_SIZE'):
        step_memory.measure(step(5, microbatches=2))


@pytest.mark.parametrize(
    ('said', 'total'),
    [('Used 20.5G of 15.48G hbm. Exceeded', int(20.5 * 2**30)), ('RESOURCE_EXHAUSTED: no number', 60)],
)
def test_a_compiler_that_gives_up_says_what_it_needed(said, total):
    found = step_memory._out_of_memory({'parameters': 30, 'optimizer_state': 20, 'batch': 10}, said)
    assert found.total == total and found.temporaries == total - 60


def arithmetic(step: Step, full_remat: bool) -> StepMemory:
    """A device's memory by the rules that the changes are made for."""
    data, fsdp, _ = step.partitioner.mesh.shape.values()
    parameters = 4 * VOCAB * EMBED // fsdp
    moments = 1 if 'adafactor' in step.optimizer.make.__qualname__ else 2 * parameters
    activations = step.rows * 100 // (data * fsdp * step.microbatches) // (4 if full_remat else 1)
    parts = (parameters, moments, 0, 0, parameters + activations, 0, 0)
    return StepMemory(*parts, sum(parts))


def search(start, available, limit=20):
    found = arithmetic(start, False)
    return list(memory_advice.search(start, found, available, arithmetic, limit))


def test_activations_are_saved_first_where_the_state_fits():
    start = step(64, Partitioner(devices=4))
    assert arithmetic(start, False).total == 4 * 3840 + 1600
    assert [o.change.typed for o in search(start, 15_800)] == ['--gin.MICROBATCHES=2', '--gin.MICROBATCHES=4']
    typed = [o.change.typed for o in search(start, 15_420)]
    assert typed == [*(f'--gin.MICROBATCHES={n}' for n in (2, 4, 8)), '--gin.REMAT_POLICY=@stack.full_remat']


def test_changes_end_with_the_first_that_fits_and_build_on_each_other():
    start = step(64, Partitioner(devices=4))
    results = search(start, 15_420)
    assert all(o.kept for o in results) and [o.memory.total for o in results] == [16_160, 15_760, 15_560, 15_410]


def test_parameters_are_split_first_where_the_state_does_not_fit():
    typed = [o.change.typed for o in search(step(64, Partitioner(devices=4)), 1000)]
    assert typed[:3] == [
        '--mesh=data=2,fsdp=2,tensor=1',
        '--mesh=data=1,fsdp=4,tensor=1',
        '--gin_file=optimizers/adafactor.gin',
    ]


def test_nothing_is_compiled_beyond_the_limit_and_no_gain_is_not_kept():
    start = step(64, Partitioner(devices=4))
    assert len(search(start, 1, limit=3)) == 3
    # Without activations, microbatches save nothing: tried once, and not built upon.
    same = lambda step, remat: dataclasses.replace(arithmetic(step, remat), total=16_960)  # noqa: E731
    results = list(memory_advice.search(start, arithmetic(start, False), 15_800, same, 20))
    assert not any(o.kept for o in results) and len({o.change.typed for o in results}) == len(results)


@pytest.mark.parametrize(
    ('settings', 'advice'),
    [
        ({'platform': 'npu'}, 'cpu, gpu, tpu'),
        ({'devices': 0}, '--devices=8'),
        ({'devices': '8 GPUs'}, '--devices=8'),
        ({'memory': '16GB'}, '--device_memory=16'),
        ({'compiler': 'npu'}, "'cpu', 'gpu' or 'tpu'"),
    ],
)
def test_wrong_hardware_is_one_line(settings, advice):
    with pytest.raises(UserError, match=advice) as error:
        Hardware(**settings)
    assert '\n' not in str(error.value)


def test_hardware_without_a_number_of_devices_asks_for_one():
    with pytest.raises(UserError, match='--devices=32'):
        Hardware('gpu').count()


def test_more_virtual_devices_than_the_process_began_with_are_refused():
    jax.devices()
    with pytest.raises(UserError, match='a new process'):
        Hardware('gpu', devices=len(jax.devices()) + 1).compile_devices()
