"""The roofline, the modules and phases of operations, and the advice, for hand-written programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from remixer_t5x.cli.info.memory import format_flag
from remixer_t5x.costs.step_memory import StepMemory, StepSpec
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.extras.forecast import forecast as forecasts
from remixer_t5x.extras.forecast import roofline
from remixer_t5x.extras.forecast.compiled_program import Collective, CompiledProgram, Kernel
from remixer_t5x.extras.forecast.forecast import Forecast
from remixer_t5x.extras.forecast.hlo_costs import Flops
from remixer_t5x.extras.forecast.roofline import BACKWARD, FORWARD, RECOMPUTED, UPDATE, Machine

# 100 FLOP/s, 10 bytes/s, links of 5 bytes/s, a network of 1; 10 cycles per second.
MACHINE = Machine('toy', {'bf16': 100.0, 'f32': 50.0}, 10.0, 5.0, 'link', 1.0, clock=10.0, devices_per_chip=2)
LAYER = 'encoder/encoder._run/while/body/closed_call'


def kernel(op_name='jit(step_fn)/jvp(f)/encoder/mlp/dot_general', num_runs=1, flops=(), size=0.0, cycles=None, **other):
    return Kernel('fusion.1', 'fusion', op_name, num_runs, Flops(dict(flops)), size, cycles, **other)


def bound(*operations, machine=MACHINE, slices=(0, 0, 1, 1)):
    kernels = tuple(operation for operation in operations if isinstance(operation, Kernel))
    collectives = tuple(operation for operation in operations if operation not in kernels)
    return roofline.compute_step_time_bound(CompiledProgram(kernels, collectives), machine, slices)


def test_a_kernel_takes_the_longer_of_compute_and_memory_time():
    result = bound(kernel(flops={'bf16': 400}, size=10), kernel(flops={'f32': 50}, size=30, num_runs=2))
    # 4 s of products and 1 s of traffic; twice 1 s of products and 3 s of traffic.
    assert result.kernel_seconds == 4 + 2 * 3 and result.compute_seconds == 4
    assert (result.flops, result.hbm_bytes, result.num_kernel_runs) == ({'bf16': 400, 'f32': 100}, 70, 3)
    # An unknown dtype has the lowest peak.
    assert bound(kernel(flops={'c64': 100})).kernel_seconds == 2


def test_kernels_are_grouped_by_module_and_phase_and_sorted_by_cost():
    result = bound(kernel(size=10), kernel(op_name='jit(step_fn)/mul', size=30), kernel(size=11, cycles=5))
    seconds = {operation.location.module: operation.kernel_seconds for operation in result.operations}
    assert list(seconds.items()) == [(roofline.OPTIMIZER, 3.0), ('encoder/mlp', 2.1)]
    # 5 cycles of one kernel; the other has no estimate.
    assert result.estimated_seconds == 0.5 and result.operations[1].unestimated_seconds() == {'fusion': 1.0}


def test_a_collective_takes_the_time_of_its_slowest_link():
    inside = Collective('all-gather', 3, 10.0, ((0, 1), (2, 3)))
    across = Collective('all-reduce', 1, 4.0, ((0, 2), (1, 3)))
    alone = Collective('all-reduce', 1, 4.0, ((0,), (1,), (2,), (3,)))
    result = bound(kernel(size=50), inside, across, alone)
    costs = [(each.link, each.bytes_sent, each.seconds) for each in result.collectives]
    assert costs == [('link', 30, 6), ('network', 4, 4)]
    assert (result.overlapped_seconds, result.serial_seconds) == (10, 15)
    unknown = dataclasses.replace(MACHINE, network=None)
    assert bound(across, machine=unknown).collectives[0].seconds is None


@pytest.mark.parametrize(('kind', 'sent'), [('all-reduce', 4.0), ('all-gather', 8.0)])
def test_a_device_sends_its_part_between_slices(kind, sent):
    # With two slices of two devices, each device reduces half of the array within its slice first.
    (result,) = bound(Collective(kind, 1, 8.0, ((0, 1, 2, 3),))).collectives
    assert (result.link, result.group_size, result.bytes_sent) == ('network', 4, sent)


@pytest.mark.parametrize(
    ('op_name', 'expected'),
    [
        (
            f'jit(step_fn)/transpose(jvp(EncoderDecoder.encode))/{LAYER}/checkpoint/run_0/layer/layer._compute_update/'
            'self_attention/vmap(qhd,khd->hqk)/dot_general',
            ('encoder/run_0/layer/self_attention', BACKWARD, 'dot_general'),
        ),
        (
            f'jit(step_fn)/transpose(jvp(f))/{LAYER}/checkpoint/rematted_computation/eval_jaxpr/run_0/layer/norm/mul',
            ('encoder/run_0/layer/norm', RECOMPUTED, 'mul'),
        ),
        ('jit(step_fn)/jvp()/while/body/closed_call/reduce_max', (roofline.LOSS, FORWARD, 'reduce_max')),
        ('jit(step_fn)/mul', (roofline.OPTIMIZER, UPDATE, 'mul')),
        ("state.params['token_embedder']['embedding']", (roofline.OPTIMIZER, UPDATE, 'copy')),
        ('', (roofline.UNNAMED, '-', '-')),
    ],
)
def test_op_names_are_parsed_into_module_phase_and_operation(op_name, expected):
    assert roofline.parse_op_name(op_name) == expected


GIB = 2**30
MESHES = {'data': Partitioner(devices=1), 'four': Partitioner(devices=4), 'fsdp': Partitioner(fsdp=4, devices=4)}


def list_advice(forecast, available=100 * GIB):
    return list(forecasts.recommend_changes(forecast, available))


def forecast(*operations, mesh='data', microbatches=1, temporaries=GIB, state=GIB, model_flops=1000.0):
    """Builds the forecast of a step with 8 rows of (6, 2) tokens."""
    batch = {
        'encoder_input_tokens': jax.ShapeDtypeStruct((8, 6), jnp.int32),
        'decoder_target_tokens': jax.ShapeDtypeStruct((8, 2), jnp.int32),
    }
    step = StepSpec(None, lambda rate: None, MESHES[mesh], batch, microbatches)
    memory = StepMemory(state, state, 0, 0, temporaries, 0, 0, temporaries + 2 * state)
    devices = step.partitioner.mesh.size
    return Forecast(step, bound(*operations, slices=(0,) * devices), memory, model_flops, 8 * 8, devices)


def test_utilization_and_cost_follow_from_the_time():
    result = forecast(kernel(), mesh='fsdp')
    # 1000 FLOPs in 10 s on four devices of 100 FLOP/s; two chips at 9 dollars per hour.
    assert result.mfu(10.0) == 0.25
    assert result.dollars_per_million_tokens(10.0, 9.0) == pytest.approx(2 * 9 * 10 / 3600 / 64 * 1e6)


WORK = kernel(flops={'bf16': 1000})
GATHER = Collective('all-gather', 5, 2.0 / 3, ((0, 1, 2, 3),))
PERMUTE = Collective('collective-permute', 200, 0.001, ((0, 1),))
UPDATED = kernel(op_name='jit(step_fn)/mul', size=20)
REMAT = kernel(op_name=f'jit(step_fn)/transpose(jvp(f))/{LAYER}/checkpoint/rematted_computation/run_0/mul', size=20)


@pytest.mark.parametrize(
    ('current', 'flag', 'reason'),
    [
        (forecast(kernel(flops={'f32': 1000})), '--gin.DTYPE=bfloat16', '100% of the FLOPs are float32'),
        (forecast(WORK, GATHER, mesh='fsdp', model_flops=4000.0, state=1), '--mesh=data=-1', 'sends 0 MB, and 0 MB'),
        (forecast(WORK, PERMUTE, mesh='fsdp', model_flops=4000.0), '--mesh=data=-1', '200 collective-permutes'),
        (forecast(WORK, microbatches=4), '--gin.MICROBATCHES=2', 'gradients 4 times'),
        (forecast(WORK, REMAT), '--gin.REMAT_POLICY=None', '(17%)'),
        (forecast(kernel(flops={'bf16': 1500})), '--gin.REMAT_POLICY=None', '1.50 times'),
        (forecast(WORK, UPDATED), '--gin.BATCH_SIZE=16', '(17%)'),
    ],
)
def test_advice_states_its_reason_with_numbers(current, flag, reason):
    (change,) = list_advice(current)
    assert format_flag(change.macro, change.value) == flag and reason in change.reason


def test_fsdp_is_advised_if_updates_cost_more_than_gathers():
    reduced = Collective('all-reduce', 5, 0.1, ((0, 1, 2, 3),))
    change = list_advice(forecast(WORK, UPDATED, reduced, mesh='four', model_flops=4000.0))[0]
    assert (change.macro, change.value) == ('MESH', 'fsdp=-1') and 'it updates 1/4 of them' in change.reason
    assert 'a step needs 2.25 GiB less memory' in change.reason
    # The same step with sharded parameters is not advised to change back, and slow links prevent the advice.
    sharded = forecast(WORK, UPDATED, GATHER, mesh='fsdp', model_flops=4000.0, state=1)
    slow = Collective('all-reduce', 5, 100.0, ((0, 1, 2, 3),))
    slow_step = forecast(WORK, UPDATED, slow, mesh='four', model_flops=4000.0)
    assert not any(change.macro == 'MESH' for step in (sharded, slow_step) for change in list_advice(step))


@pytest.mark.parametrize('options', [{'microbatches': 4}, {'mesh': 'fsdp', 'model_flops': 4000.0}, {}])
def test_a_change_that_does_not_fit_is_not_advised(options):
    result = forecast(WORK, PERMUTE if 'mesh' in options else UPDATED, **options)
    assert list_advice(result, None)
    assert not list_advice(result, result.memory.total + 1)
    # A compute-bound step needs no change.
    assert list_advice(forecast(WORK)) == []
