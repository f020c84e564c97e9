"""FLOPs, bytes and collectives of compiled programs equal hand counts and XLA's numbers.

XLA compiled the programs in the folder `programs` for 8 chips of TPU v5e and for 8 H100 from `scan(x -> tanh(x @ w))`
over w [6, 256, 256] in bfloat16, with 128 rows of x on each device, and the sum of the rows.
"""

import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.extras.forecast import compiled_program, hlo, hlo_costs

PROGRAMS = pathlib.Path(__file__).parent / 'programs'
SIZES = st.integers(1, 9)
LAYERS, ROWS, WIDTH = 6, 128, 256
# FLOPs of the matrix product of one layer.
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def count_flops(lowered) -> float:
    """Counts the FLOPs of a program before optimization."""
    program = hlo.parse_hlo(lowered.as_text('hlo'))
    return hlo_costs.count_computation_flops(program[hlo.ENTRY], program).total()


@pytest.mark.parametrize(
    ('function', 'shapes', 'flops'),
    [
        (jnp.matmul, [(3, 5, 4), (3, 4, 6)], 2 * 3 * 5 * 4 * 6),
        (jnp.fft.fft, [(3, 64)], 3 * 5 * 64 * math.log2(64)),
        (jnp.fft.rfft, [(3, 64)], 3 * 2.5 * 64 * math.log2(64)),
    ],
)
def test_an_operation_has_the_flops_of_its_closed_form(function, shapes, flops):
    assert count_flops(jax.jit(function).lower(*map(jnp.ones, shapes))) == flops


@settings(max_examples=20)
@given(
    length=st.integers(1, 12), features=SIZES, outputs=SIZES, size=st.integers(1, 5), stride=st.integers(1, 3),
    before=st.integers(0, 6), after=st.integers(0, 6), spread=st.integers(1, 3), gap=st.integers(1, 3),
)  # fmt: skip
def test_a_convolution_counts_only_taps_on_elements(
    length, features, outputs, size, stride, before, after, spread, gap
):
    # TPU programs express matrix products with such windows.
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride,), [(before, after)], lhs_dilation=(spread,), rhs_dilation=(gap,),
            dimension_numbers=('NWC', 'WIO', 'NWC'),
        )  # fmt: skip

    if (length - 1) * spread + 1 + before + after < (size - 1) * gap + 1:
        return
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, length, features), (size, features, outputs))]
    lowered = jax.jit(convolve).lower(*shapes)
    assert count_flops(lowered) == lowered.cost_analysis().get('flops', 0)


def test_a_loop_counts_all_iterations_of_its_body():
    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, weights)

    def both(x, weights):
        return jax.lax.scan(lambda x, _: (layers(x, weights)[0], None), x, None, length=3)[0]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (5, 16, 16))]
    compiled = jax.jit(both).lower(*shapes).compile()
    program = compiled_program.parse_program(compiled.as_text())
    assert sum(kernel.num_runs * kernel.flops.total() for kernel in program.kernels) == 3 * 5 * 2 * 8 * 16 * 16
    # An iteration reads only its slice of the stacked weights.
    sliced = [kernel for kernel in program.kernels if 'dynamic-slice' in kernel.name or 'dynamic_slice' in kernel.name]
    assert [kernel.num_runs for kernel in sliced] == [15] and sliced[0].bytes < 3 * 16 * 16 * 4


@pytest.mark.parametrize('products', [1, 2])
def test_a_conditional_counts_the_branch_for_a_true_predicate(products):
    def either(x, y):
        branches = (lambda: x @ y, lambda: jnp.tanh(x) @ y @ y)
        return jax.lax.cond(x[0, 0] > 0, branches[products - 1], branches[products % 2])

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    text = jax.jit(either).lower(shape, shape).compile().as_text()
    forms = text, re.sub(r'branch_computations=\{(\S+), (\S+)\}', r'true_computation=\2, false_computation=\1', text)
    assert forms[0] != forms[1]
    for form in forms:
        program = compiled_program.parse_program(form)
        assert sum(kernel.flops.total() for kernel in program.kernels) == products * 2 * 8**3


@pytest.mark.parametrize('name', ['scan_tpu_v5e_8', 'scan_h100_8'])
def test_flops_and_collectives_of_an_accelerator_program_are_counted(name):
    program = compiled_program.parse_program((PROGRAMS / f'{name}.hlo').read_text(), devices=8)
    assert sum(kernel.num_runs * kernel.flops['bf16'] for kernel in program.kernels) == LAYERS * PRODUCT
    collectives = {collective.kind: collective for collective in program.collectives}
    assert set(collectives) == {'all-gather', 'all-reduce'}
    assert all(collective.groups == (tuple(range(8)),) for collective in collectives.values())
    # Each device sends its eighth of a layer's matrix to 7 others.
    assert collectives['all-gather'].num_runs == LAYERS
    assert collectives['all-gather'].count_bytes_sent() == 7 * WIDTH * WIDTH * 2 / 8
    assert collectives['all-reduce'].count_bytes_sent() == 2 * 7 / 8 * WIDTH * (2 if 'tpu' in name else 4)


def test_on_chip_arrays_are_not_memory_traffic():
    text = (PROGRAMS / 'scan_tpu_v5e_8.hlo').read_text()
    # The same program also with x, a matrix and the result in HBM.
    programs = [compiled_program.parse_program(each) for each in (text, text.replace('S(1)', ''))]
    on_chip, product = ({kernel.name: kernel for kernel in program.kernels}['fusion.11'] for program in programs)
    assert on_chip.bytes == 0 and on_chip.cycles == 2450
    assert product.bytes == 2 * (2 * ROWS * WIDTH + WIDTH * WIDTH)


@pytest.mark.parametrize(
    ('kind', 'expected'),
    [
        # Tiles of 8 x 128 over the two fastest dimensions.
        ('bf16[16,12,64]{2,1,0:T(8,128)(2,1)}', 16 * 16 * 128 * 2),
        ('f32[16,12,64]{0,2,1:T(8,128)}', 128 * 12 * 64 * 4),
        ('s4[3]{0}', 2),
        ('token[]', 0),
    ],
)
def test_an_array_takes_the_bytes_of_its_tiles(kind, expected):
    (array,) = hlo.parse_arrays(kind)
    assert array.bytes == expected


KERNEL = """HloModule kernel

ENTRY %main (ids: s32[256], x: bf16[256,128]) -> (bf16[256,256], u8[4096]) {
  %ids = s32[256]{0} parameter(0)
  %x = bf16[256,128]{1,0} parameter(1)
  ROOT %call = (bf16[256,256]{1,0}, u8[4096]{0}) custom-call(%ids, %x, %x), custom_call_target="tpu_custom_call"ESTIMATE
}
"""


def test_a_custom_call_counts_its_estimate_or_its_arrays():
    estimate = ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"700","bytes_accessed":"12345"}}}'
    (estimated,) = compiled_program.parse_program(KERNEL.replace('ESTIMATE', estimate)).kernels
    assert (estimated.flops, estimated.bytes) == ({'bf16': 700}, 12345)
    (bare,) = compiled_program.parse_program(KERNEL.replace('ESTIMATE', '')).kernels
    # The library's scratch memory is not traffic.
    assert (bare.flops, bare.bytes) == ({}, 4 * 256 + 2 * (2 * 256 * 128 + 256 * 256)) and bare.op == 'tpu_custom_call'


ATTENTION = """HloModule attention

ENTRY %main (q: bf16[8,114,4,64], k: bf16[8,512,4,64]) -> (bf16[8,4,114,64], u8[0]) {
  %q = bf16[8,114,4,64]{3,2,1,0} parameter(0)
  %k = bf16[8,512,4,64]{3,2,1,0} parameter(1)
  ROOT %call = (bf16[8,4,114,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="TARGET", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["8", "4", "114", "512"]}}}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ('target', 'products'), [('__cudnn$fmhaScaleBiasSoftmax', 2), ('__cudnn$fmhaScaleBiasSoftmaxBackward', 5)]
)
def test_cudnn_attention_counts_its_products(target, products):
    (kernel,) = compiled_program.parse_program(ATTENTION.replace('TARGET', target)).kernels
    assert kernel.flops == {'bf16': products * 2 * 8 * 4 * 114 * 512 * 64} and not kernel.is_opaque


LOOP = """HloModule loop

%condition (state: (u32[], f32[8])) -> pred[] {
  %state = (u32[], f32[8]{0}) parameter(0)
  %bound = u32[] constant(9)
  %counter = u32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}

%body (state: (u32[], f32[8])) -> (u32[], f32[8]) {
  %state = (u32[], f32[8]{0}) parameter(0)
  %one = u32[] constant(1)
  %counter = u32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %next = u32[] add(%counter, %one)
  %after = u32[] add(%next, %one)
  %y = f32[8]{0} negate(%x)
  ROOT %result = (u32[], f32[8]{0}) tuple(%after, %y)
}

ENTRY %main (x: f32[8]) -> (u32[], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %first = u32[] constant(2)
  %start = (u32[], f32[8]{0}) tuple(%first, %x)
  ROOT %loop = (u32[], f32[8]{0}) while(%start), condition=%condition, body=%body
}
"""


def test_iterations_without_a_known_trip_count_follow_from_the_counter():
    # From 2 to 8 in steps of 2, as in loops that the TPU compiler has unrolled.
    program = compiled_program.parse_program(LOOP)
    assert {kernel.name: kernel.num_runs for kernel in program.kernels}['y'] == 4


COLLECTIVE = """HloModule collective

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  ROOT %sent = f32[8,16]{1,0} OP(%x), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true
}
"""
PAIRS = [(0, 2), (1, 3), (4, 6), (5, 7)]


@pytest.mark.parametrize(
    ('groups', 'expected'),
    [
        ('{{0,2},{1,3},{4,6},{5,7}}', PAIRS),
        ('[4,2]<=[2,2,2]T(0,2,1)', PAIRS),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", PAIRS),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}", [(7, 6, 5, 4), (3, 2, 1, 0)]),
        ('{}', [tuple(range(8))]),
    ],
)
def test_device_groups_are_parsed_in_all_formats_of_xla(groups, expected):
    text = COLLECTIVE.replace('OP', 'all-reduce').replace('GROUPS', groups)
    (collective,) = compiled_program.parse_program(text, devices=8).collectives
    assert list(collective.groups) == expected


@pytest.mark.parametrize(
    ('op', 'sent'),
    [('all-gather', 3), ('reduce-scatter', 0.75), ('all-reduce-start', 1.5), ('collective-permute', 1)],
)
def test_a_device_sends_the_bytes_of_a_ring(op, sent):
    text = COLLECTIVE.replace('OP', op).replace('GROUPS', '[2,4]<=[8]')
    if op == 'collective-permute':
        text = text.replace('replica_groups=[2,4]<=[8]', 'source_target_pairs={{0,1},{1,0}}')
    (collective,) = compiled_program.parse_program(text, devices=8).collectives
    assert collective.count_bytes_sent() == sent * 8 * 16 * 4


def test_unknown_device_groups_raise_an_error():
    text = COLLECTIVE.replace('OP', 'all-reduce').replace('GROUPS', 'mesh_of_devices')
    with pytest.raises(ValueError, match='replica groups'):
        compiled_program.parse_program(text, devices=8)
