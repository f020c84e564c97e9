"""Computes the costs of HLO instructions: FLOPs, HBM traffic in bytes, and bytes sent to other devices.

FLOPs are counted for matrix products, convolutions and Fourier transforms; a multiply-add counts as two. Elementwise
operations are not counted, because memory traffic hides their time. TPU programs express matrix products as
convolutions with padded windows, so only window positions that overlap an element are counted.

A fusion reads each operand once and writes its results once; intermediate values stay in registers. If a fusion only
slices or gathers an operand, only the slices are counted; if it updates a result in place, only the update is counted.

The bytes that a device sends are a minimum, computed for a ring algorithm over each group. If a group spans multiple
slices, a ring within each slice runs first, and each device then sends only its shard of the result to other slices.
"""

import collections
import json
import math
import re

import numpy as np

from remixer_t5x.devices.chips import EXACT_FLOAT32
from remixer_t5x.extras.forecast.hlo import Computation, HloProgram, Instruction

# Number of FLOPs of matrix products, keyed by their dtype (XLA's name, or EXACT_FLOAT32).
Flops = collections.Counter
# Operations that read only the returned elements of their first operand.
_SLICING_OPS = ('dynamic-slice', 'slice', 'gather')
# An asynchronous copy also returns values of these dtypes, which are not part of the copied data.
_CONTEXT_DTYPES = ('u32', 'token')

# Maps the number of devices n to the bytes that each device sends, relative to the size of its operands.
RELATIVE_BYTES_SENT = {
    'all-gather': lambda n: n - 1,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'ragged-all-to-all': lambda n: (n - 1) / n,
    'collective-broadcast': lambda n: 1,
    'collective-permute': lambda n: 1,
}
# Collectives in which each device of a slice sends only its shard to other slices.
SHARDED_ACROSS_SLICES = ('all-reduce', 'reduce-scatter')
_MESH = r'mesh\[[^\]]*\](?:, device_ids=\(.*?\))? ?\{[^}]*\}'
_DEVICE_IDS = re.compile(r'device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d, ]+))\)')
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def count_flops(instruction: Instruction, computation: Computation, program: HloProgram) -> Flops:
    """Counts the FLOPs of one execution of an instruction, including fused instructions."""
    if instruction.op in ('fusion', 'call'):
        return count_computation_flops(
            program[instruction.find_called_computation() or instruction.find_called_computation('to_apply')], program
        )
    if instruction.op == 'dot':
        contracting = instruction.find_attribute(r'lhs_contracting_dims=\{([\d,]*)\}')
        count: float = _count_product_flops(instruction, computation, _parse_integers(contracting))
    elif instruction.op == 'convolution':
        count = _count_convolution_flops(instruction, computation)
    elif instruction.op == 'fft':
        count = _count_fft_flops(instruction, computation)
    elif instruction.op == 'custom-call':
        count = _count_custom_call_flops(instruction, computation)
    else:
        count = 0
    return Flops({_find_product_dtype(instruction, computation): count}) if count else Flops()


def count_computation_flops(computation: Computation, program: HloProgram) -> Flops:
    """Counts the FLOPs of one execution of a computation."""
    total: Flops = Flops()
    for instruction in computation:
        total.update(count_flops(instruction, computation, program))
    return total


def _find_product_dtype(instruction: Instruction, computation: Computation) -> str:
    """Returns the wider operand dtype, or EXACT_FLOAT32 for float32 with a precision higher than the default."""
    operands = computation.get_operand_arrays(instruction)
    # The first operands of a Pallas kernel may be integers, such as segment ids.
    factors = [array for array in operands if array.dtype.startswith(('bf', 'f'))] or operands
    widest = max(factors[:2], key=lambda array: array.bytes / math.prod(array.shape))
    precise = re.search(r'operand_precision"?[=:][\[{][^\]}]*high', instruction.attributes, re.IGNORECASE)
    return EXACT_FLOAT32 if widest.dtype == 'f32' and precise else widest.dtype


def _count_product_flops(instruction: Instruction, computation: Computation, contracting: list[int]) -> int:
    left = computation.get_operand_arrays(instruction)[0].shape
    return 2 * math.prod(instruction.results[0].shape) * math.prod(left[axis] for axis in contracting)


def _count_convolution_flops(instruction: Instruction, computation: Computation) -> int:
    left, right = computation.get_operand_arrays(instruction)[:2]
    out = instruction.results[0]
    # `dim_labels=b0f_0io->b0f` names the axes of both operands and of the result; digits are spatial dimensions.
    left_axes, right_axes, out_axes = re.split('_|->', instruction.find_attribute(r'dim_labels=(\w+->\w+)'))
    groups = int(instruction.find_attribute(r'batch_group_count=(\d+)') or 1)
    # XLA has already divided the kernel's input features by the number of feature groups.
    features = right.shape[right_axes.index('i')] * out.shape[out_axes.index('f')]
    taps = 1
    for dimension, axis in enumerate(sorted(set(left_axes) - set('bf'))):
        length, outputs = left.shape[left_axes.index(axis)], out.shape[out_axes.index(axis)]
        taps *= _count_taps(instruction, dimension, length, outputs)
    return 2 * taps * features * left.shape[left_axes.index('b')] // groups


def _count_taps(instruction: Instruction, dimension: int, length: int, outputs: int) -> int:
    """Counts the pairs (output, window position) that read an input element rather than padding or a dilation gap."""
    # `window={size=8x1 pad=0_0x7_7}` has two dimensions.
    settings = dict(word.split('=') for word in instruction.find_attribute(r'window=\{([^}]*)\}').split())
    window = {name: _parse_integers(values.split('x')[dimension])[0] for name, values in settings.items()}
    dilation = window.get('lhs_dilate', 1)
    taps: np.ndarray = np.arange(window.get('size', 1)) * window.get('rhs_dilate', 1) - window.get('pad', 0)
    position = np.arange(outputs)[:, None] * window.get('stride', 1) + taps
    inside = (position >= 0) & (position <= (length - 1) * dilation)
    return int((inside & (position % dilation == 0)).sum())


def _count_fft_flops(instruction: Instruction, computation: Computation) -> float:
    """Counts 5 n log2 n FLOPs per complex transform and half as many per real transform, as in FFTW's benchmarks."""
    kind = instruction.find_attribute(r'fft_type=(\w+)')
    whole = instruction.results[0] if kind == 'IRFFT' else computation.get_operand_arrays(instruction)[0]
    points = math.prod(_parse_integers(instruction.find_attribute(r'fft_length=\{([\d,]*)\}')))
    return (2.5 if 'RFFT' in kind else 5.0) * math.log2(max(points, 2)) * math.prod(whole.shape)


def _count_custom_call_flops(instruction: Instruction, computation: Computation) -> float:
    """Computes FLOPs of cuBLAS and cuDNN calls from shapes, and FLOPs of other kernels from their cost estimates."""
    if 'cudnn$fmha' in instruction.custom_call_target:
        logits = instruction.find_attribute(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)\]')
        # Attention takes two matrix products; its backward pass takes five, one of which recomputes the logits.
        products = 5 if instruction.custom_call_target.endswith('Backward') else 2
        head_dim = computation.get_operand_arrays(instruction)[0].shape[-1]
        return products * 2 * math.prod(_parse_integers(logits)) * head_dim
    contracting = instruction.find_attribute(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]')
    if contracting and 'cublas' in instruction.custom_call_target:
        return _count_product_flops(instruction, computation, _parse_integers(contracting))
    return _parse_cost_estimate(instruction).get('flops', 0)


def _parse_cost_estimate(instruction: Instruction) -> dict[str, float]:
    """Returns the `pl.CostEstimate` of a Pallas kernel ('flops', 'transcendentals', 'bytes_accessed'), or {}."""
    estimate = json.loads(instruction.find_attribute(r'"cost_estimate": ?(\{[^}]*\})') or '{}')
    return {name: float(value) for name, value in estimate.items()}


def _parse_integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r'-?\d+', text)]


def count_bytes(instruction: Instruction, computation: Computation, program: HloProgram) -> float:
    """Counts the HBM traffic of one execution of an instruction, in bytes."""
    operands = sum(array.hbm_bytes for array in computation.get_operand_arrays(instruction))
    if instruction.op == 'fusion':
        return _count_fusion_bytes(instruction, computation, program)
    if instruction.op.endswith('-start'):
        # A copy between HBM and VMEM accesses HBM once, a copy within HBM twice.
        copied = [array for array in instruction.results if array.dtype not in _CONTEXT_DTYPES and array.shape]
        accesses = 2 if len({array.memory_space for array in copied}) == 1 else 1
        return accesses * min((array.bytes for array in copied), default=0)
    if instruction.op == 'dynamic-update-slice':
        return 2 * computation.get_operands(instruction)[1].result_bytes
    if instruction.op in _SLICING_OPS:
        return 2 * instruction.result_bytes
    if instruction.op == 'custom-call':
        # Results exclude the scratch buffer, an 8-bit array that library custom calls also return.
        scratch = sum(array.hbm_bytes for array in instruction.results if array.dtype in ('u8', 's8'))
        results = instruction.result_bytes - (scratch if len(instruction.results) > 1 else 0)
        return _parse_cost_estimate(instruction).get('bytes_accessed') or operands + results
    return operands + instruction.result_bytes


def _count_fusion_bytes(instruction: Instruction, computation: Computation, program: HloProgram) -> float:
    fused = program[instruction.find_called_computation()]
    total = 0
    for position, operand in enumerate(computation.get_operands(instruction)):
        size = operand.result_bytes
        read, is_returned = _count_bytes_read(fused, position, size, program) if size else (0, False)
        total += size if is_returned else min(size, read)
    written = _count_bytes_written(fused.root_instruction, fused, program)
    for array, size in zip(instruction.results, written, strict=False):
        total += min(array.hbm_bytes, size)
    return total


def _count_bytes_read(fused: Computation, position: int, size: int, program: HloProgram) -> tuple[int, bool]:
    """Returns how many bytes of a parameter a fusion reads, and whether the fusion returns the parameter unchanged."""
    total, is_returned, aliases = 0, False, [fused.parameter_names[position]]
    for name in aliases:
        is_returned |= name == fused.root_instruction.name
        for user, operand_index in fused.users_by_name.get(name, ()):
            if operand_index == 0 and user.op in _SLICING_OPS:
                total += user.results[0].bytes
            elif user.op == 'bitcast':
                aliases.append(user.name)
            elif user.op == 'fusion':
                called = program[user.find_called_computation()]
                inner, passes_on = _count_bytes_read(called, operand_index, size, program)
                total += inner
                aliases += [user.name] if passes_on else []
            elif user.op != 'tuple' and not (user.op == 'dynamic-update-slice' and operand_index == 0):
                return size, False
    return total, is_returned


def _count_bytes_written(result: Instruction, fused: Computation, program: HloProgram) -> list[int]:
    """Returns the bytes that a fusion writes to each array of `result`."""
    if result.op == 'bitcast':
        return _count_bytes_written(fused.get_operands(result)[0], fused, program)
    if result.op == 'tuple':
        return [size for leaf in fused.get_operands(result) for size in _count_bytes_written(leaf, fused, program)]
    if result.op == 'dynamic-update-slice':
        return [fused.get_operands(result)[1].results[0].bytes]
    if result.op == 'fusion':
        inner = program[result.find_called_computation()]
        return _count_bytes_written(inner.root_instruction, inner, program)
    return [array.bytes for array in result.results]


def find_collective_kind(instruction: Instruction) -> str:
    """Returns the kind of a collective, such as 'all-gather' for `all-gather-start`, or '' for other instructions."""
    name = instruction.op.removesuffix('-start')
    return name if name in RELATIVE_BYTES_SENT else ''


def parse_device_groups(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that exchange data; devices are positions in the program's device assignment.

    Args:
        devices: number of devices that run the program.

    Raises:
        ValueError: the format of the groups is unknown.
    """
    text = instruction.find_attribute(r'source_target_pairs=\{(\{.*?\})\}')
    text = text or instruction.find_attribute(rf'replica_groups=({_MESH}|\{{\{{.*?\}}\}}|\S+)')
    if text.startswith('mesh'):
        groups = _parse_mesh_groups(text)
    elif '<=' in text:
        groups = _parse_iota_groups(text)
    else:
        groups = [[int(number) for number in group.split(',')] for group in re.findall(r'\{([\d, ]+)\}', text)]
    return tuple(map(tuple, groups)) or (tuple(range(devices)),)


def _parse_iota_groups(text: str) -> list[list[int]]:
    """Parses device groups such as `[4,2]<=[2,4]T(1,0)`.

    This example arranges devices 0 to 7 as [2, 4], transposes the array, and reshapes it to 4 groups of 2.
    """
    match = re.match(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
    if not match:
        raise ValueError(f'unknown format of replica groups: {text}')
    shape, reshaped, order = (_parse_integers(group or '') for group in match.groups())
    ids: np.ndarray = np.arange(math.prod(reshaped)).reshape(reshaped).transpose(order or None)
    return ids.reshape(shape).tolist()


def _parse_mesh_groups(text: str) -> list[list[int]]:
    """Parses device groups along mesh axes, such as `mesh['a'=2,'b'=4] {'b'}`; `'b':(2)2` is a sub-axis of 'b'.

    By default, devices fill the mesh in order. `device_ids=([4,2]T(1,0))` reshapes devices 0 to 7 to [4, 2] and
    transposes them.
    """
    head, brace, named = text.partition('{')
    if not brace:
        raise ValueError(f'unknown format of replica groups: {text}')
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", head)}
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(named)}
    shape, grouped = [], []
    for name, size in sizes.items():
        before, used = parts.get(name, (1, 1))
        shape += [before, used, size // (before * used)]
        grouped.append(len(shape) - 2)
    ids: np.ndarray = np.arange(math.prod(sizes.values()))
    if match := _DEVICE_IDS.search(head):
        reshaped, order, listed = (_parse_integers(group or '') for group in match.groups())
        ids = np.asarray(listed) if listed else ids.reshape(reshaped).transpose(order or None)
    grid = np.moveaxis(ids.reshape(shape), grouped, range(-len(grouped), 0))
    return grid.reshape(-1, math.prod(shape[axis] for axis in grouped)).tolist()
