"""FLOPs of the matrix products, convolutions and Fourier transforms of an HLO instruction.

A multiply and an add count as two. Element-wise work is left out: it is hidden behind memory traffic. TPU programs
write matrix products as convolutions, whose windows select the positions that are multiplied, so only taps that meet
an element count.
"""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from remixer_t5x.extras.forecast.hlo_program import Computation, Instruction, Program

# By the type of number in which the products are computed: a dtype of XLA, or EXACT.
Flops = collections.Counter
# Products of float32 that must not be rounded to fewer bits.
EXACT = 'f32 exact'


def of_instruction(instruction: Instruction, computation: Computation, program: Program) -> Flops:
    """FLOPs of one run, with everything that a fusion computes."""
    if instruction.op in ('fusion', 'call'):
        called = instruction.called('calls') or instruction.called('to_apply')
        return of_computation(program[called], program)
    if instruction.op == 'custom-call':
        return _custom_call(instruction, computation)
    count = _COUNTS.get(instruction.op)
    return Flops({_number(instruction, computation): count(instruction, computation)}) if count else Flops()


def of_computation(computation: Computation, program: Program) -> Flops:
    """FLOPs of one run of a fused computation."""
    total: Flops = Flops()
    for instruction in computation:
        total.update(of_instruction(instruction, computation, program))
    return total


def _number(instruction: Instruction, computation: Computation) -> str:
    """The wider type of both operands; EXACT for float32 with a higher precision than the default."""
    widest = max(computation.operand_arrays(instruction)[:2], key=lambda array: array.bytes / math.prod(array.shape))
    precise = re.search(r'operand_precision"?[=:][\[{][^\]}]*high', instruction.attributes, re.IGNORECASE)
    return EXACT if widest.dtype == 'f32' and precise else widest.dtype


def _dot(instruction: Instruction, computation: Computation) -> int:
    contracted = _whole(instruction.attribute(r'lhs_contracting_dims=\{([\d,]*)\}'))
    return _product(instruction, computation, contracted)


def _product(instruction: Instruction, computation: Computation, contracted: list[int]) -> int:
    left = computation.operand_arrays(instruction)[0].shape
    return 2 * math.prod(instruction.results[0].shape) * math.prod(left[axis] for axis in contracted)


def _convolution(instruction: Instruction, computation: Computation) -> int:
    left, right = computation.operand_arrays(instruction)[:2]
    out = instruction.results[0]
    names = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
    assert names, f'the convolution {instruction.name} has no dim_labels'
    left_axes, right_axes, out_axes = names.groups()
    groups = int(instruction.attribute(r'batch_group_count=(\d+)') or 1)
    # XLA has already divided the kernel's input features by the number of feature groups.
    features = right.shape[right_axes.index('i')] * out.shape[out_axes.index('f')]
    taps = 1
    for number, axis in enumerate(sorted(set(left_axes) - set('bf'))):
        length, outputs = left.shape[left_axes.index(axis)], out.shape[out_axes.index(axis)]
        taps *= _window(instruction, number).taps(length, outputs)
    return 2 * taps * features * left.shape[left_axes.index('b')] // groups


@dataclasses.dataclass(frozen=True)
class _Window:
    """How a convolution's window moves along one dimension, in HLO's terms."""

    size: int = 1
    stride: int = 1
    pad: tuple[int, int] = (0, 0)
    lhs_dilate: int = 1
    rhs_dilate: int = 1
    rhs_reversal: int = 0

    def taps(self, length: int, outputs: int) -> int:
        """How many pairs of an output and a tap of the window meet an element, and neither padding nor a gap."""
        if self.size == 1 and self.pad == (0, 0) and self.lhs_dilate == 1:
            return outputs
        taps: np.ndarray = np.arange(self.size) * self.rhs_dilate - self.pad[0]
        position = np.arange(outputs)[:, None] * self.stride + taps
        inside = (position >= 0) & (position <= (length - 1) * self.lhs_dilate)
        return int((inside & (position % self.lhs_dilate == 0)).sum())


def _window(instruction: Instruction, number: int) -> _Window:
    """The window along spatial dimension `number`; `size=8x1 pad=0_0x7_7` has two dimensions."""
    settings: dict[str, Any] = {}
    for setting in instruction.attribute(r'window=\{([^}]*)\}').split():
        name, _, values = setting.partition('=')
        value = values.split('x')[number]
        settings[name] = tuple(map(int, value.split('_'))) if name == 'pad' else int(value)
    return _Window(**settings)


def _fft(instruction: Instruction, computation: Computation) -> float:
    """5 n log2 n for each complex transform, half of it for a real one, as benchmarks count."""
    kind = instruction.attribute(r'fft_type=(\w+)')
    whole = instruction.results[0] if kind == 'IRFFT' else computation.operand_arrays(instruction)[0]
    points = math.prod(_whole(instruction.attribute(r'fft_length=\{([\d,]*)\}')))
    return (2.5 if 'RFFT' in kind else 5.0) * math.log2(max(points, 2)) * math.prod(whole.shape)


def _custom_call(instruction: Instruction, computation: Computation) -> Flops:
    """cuBLAS and cuDNN by their dimensions; other kernels by the estimate that came with them, if one did."""
    if 'cudnn$fmha' in instruction.target:
        return Flops({_number(instruction, computation): _attention(instruction, computation)})
    contracted = instruction.attribute(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]')
    if contracted and 'cublas' in instruction.target:
        return Flops({_number(instruction, computation): _product(instruction, computation, _whole(contracted))})
    flops = estimate(instruction).get('flops', 0)
    return Flops({_number(instruction, computation): flops}) if flops else Flops()


def _attention(instruction: Instruction, computation: Computation) -> int:
    """cuDNN's fused attention: its two products, or the five of its gradient, where one repeats the logits."""
    logits = _whole(instruction.attribute(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)\]'))
    products = 5 if instruction.target.endswith('Backward') else 2
    return products * 2 * math.prod(logits) * computation.operand_arrays(instruction)[0].shape[-1]


def estimate(instruction: Instruction) -> dict[str, float]:
    """`pl.CostEstimate` of a Pallas kernel: 'flops', 'transcendentals', 'bytes_accessed'; empty where it gave none."""
    found = re.search(r'"cost_estimate": ?(\{[^}]*\})', instruction.attributes)
    return {name: float(value) for name, value in json.loads(found[1]).items()} if found else {}


def _whole(text: str) -> list[int]:
    return [int(number) for number in re.findall(r'\d+', text)]


_COUNTS: dict[str, Callable[[Instruction, Computation], float]] = {
    'dot': _dot,
    'convolution': _convolution,
    'fft': _fft,
}
