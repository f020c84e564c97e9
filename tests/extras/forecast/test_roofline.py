"""The roofline, and the modules and phases of operations, for hand-written programs."""

import dataclasses

import pytest

from remixer_t5x.devices.chips import Chip
from remixer_t5x.extras.forecast import roofline
from remixer_t5x.extras.forecast.compiled_program import Collective, CompiledProgram, Kernel
from remixer_t5x.extras.forecast.forecast import Forecast
from remixer_t5x.extras.forecast.hlo_costs import Flops
from remixer_t5x.extras.forecast.roofline import BACKWARD, FORWARD, RECOMPUTED, UPDATE

# 100 FLOP/s, 10 bytes/s, links of 5 bytes/s, a network of 1; 10 cycles per second.
MACHINE = Chip('toy', (), 1, {'bf16': 100.0, 'f32': 50.0}, 10.0, 5.0, 1.0, 'link', clock=10.0, devices_per_chip=2)
LAYER = 'encoder/encoder._run/while/body/closed_call'


def kernel(op_name='jit(step_fn)/jvp(f)/encoder/mlp/dot_general', num_runs=1, flops=(), size=0.0, cycles=None, **other):
    return Kernel('fusion.1', 'fusion', op_name, num_runs, Flops(dict(flops)), size, cycles, **other)


def bound(*operations, chip=MACHINE, slices=(0, 0, 1, 1)):
    kernels = tuple(operation for operation in operations if isinstance(operation, Kernel))
    collectives = tuple(operation for operation in operations if operation not in kernels)
    return roofline.compute_step_time_bound(CompiledProgram(kernels, collectives), chip, slices)


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
    assert bound(across, chip=unknown).collectives[0].seconds is None


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


def test_utilization_and_cost_follow_from_the_time():
    result = Forecast(None, bound(kernel()), None, model_flops=1000.0, tokens=64, devices=4)
    # 1000 FLOPs in 10 s on four devices of 100 FLOP/s; two chips at 9 dollars per hour.
    assert result.mfu(10.0) == 0.25
    assert result.dollars_per_million_tokens(10.0, 9.0) == pytest.approx(2 * 9 * 10 / 3600 / 64 * 1e6)
