"""Parses the text of an optimized HLO module (`compiled.as_text()`) into instructions with shapes, operands and
attributes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

ENTRY = 'ENTRY'
_ARRAY = re.compile(r'([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?')
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{')
# Matches `ROOT %name = type op(arguments), attributes`.
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)')
_COMMENT = re.compile(r'/\*index=\d+\*/')
_NAME = re.compile(r'%?([\w.\-]+)')
# Operations whose parentheses contain a literal value instead of operands.
_LITERAL_OPS = ('constant', 'parameter', 'iota')


class HloArray(NamedTuple):
    """The type of an array.

    Attributes:
        dtype: XLA's name of the dtype, such as 'bf16'.
        bytes: size in bytes, including padding to TPU tiles.
        memory_space: 0 for HBM, 1 for the on-chip memory of a TPU (VMEM).
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    memory_space: int = 0

    @property
    def hbm_bytes(self) -> int:
        return self.bytes if self.memory_space == 0 else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An HLO instruction.

    Attributes:
        op: opcode, such as 'fusion', 'dot' or 'while'.
        results: the result array, or all arrays of a result tuple.
        operands: names of the instructions that compute the operands.
        arguments: text between the parentheses after the opcode, such as the value of a constant.
        attributes: text after the closing parenthesis.
    """

    name: str
    op: str
    results: tuple[HloArray, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool = False

    @property
    def op_name(self) -> str:
        """JAX's name stack: transformations, Flax modules and the primitive, separated by '/'."""
        return self.find_attribute(r'op_name="([^"]*)"')

    @property
    def custom_call_target(self) -> str:
        """The target of a custom call."""
        return self.find_attribute(r'custom_call_target="([^"]*)"')

    @property
    def result_bytes(self) -> int:
        return sum(array.hbm_bytes for array in self.results)

    def find_attribute(self, pattern: str) -> str:
        """Returns the first group of the regex `pattern` in the attributes, or '' if nothing matches."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ''

    def find_called_computation(self, role: str = 'calls') -> str:
        """Returns the computation name in the attribute `role` ('calls', 'to_apply', 'body' or 'condition'), or ''."""
        return self.find_attribute(rf'\b{role}=%?([\w.\-]+)')

    def find_true_computation(self) -> str:
        """Returns the name of the last branch of a conditional, which runs if the predicate is true."""
        branches = _NAME.findall(self.find_attribute(r'branch_computations=\{([^}]*)\}'))
        return branches[-1] if branches else self.find_called_computation('true_computation')


class Computation:
    """A sequence of instructions in scheduled order, indexed by name."""

    def __init__(self) -> None:
        self.instructions: dict[str, Instruction] = {}

    def __iter__(self):
        return iter(self.instructions.values())

    @functools.cached_property
    def root_instruction(self) -> Instruction:
        return next(instruction for instruction in self if instruction.is_root)

    @functools.cached_property
    def parameter_names(self) -> dict[int, str]:
        """Maps parameter numbers to instruction names."""
        return {int(instruction.arguments): instruction.name for instruction in self if instruction.op == 'parameter'}

    @functools.cached_property
    def users_by_name(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Maps the name of each instruction to its users, as pairs (user, operand index)."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for user in self:
            for position, name in enumerate(user.operands):
                users.setdefault(name, []).append((user, position))
        return users

    def get_operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def get_operand_arrays(self, instruction: Instruction) -> list[HloArray]:
        """Returns the arrays of all operands, including the elements of tuples."""
        return [array for operand in self.get_operands(instruction) for array in operand.results]


# Maps names to computations; the entry computation also has the name ENTRY.
HloProgram = Mapping[str, Computation]


def parse_hlo(text: str) -> HloProgram:
    """Parses the text of an HLO module."""
    computations: dict[str, Computation] = {}
    current = Computation()
    for line in text.splitlines():
        if head := _COMPUTATION.fullmatch(line.rstrip()):
            current = computations[head[2]] = Computation()
            if head[1]:
                computations[ENTRY] = current
        elif match := _INSTRUCTION.match(_COMMENT.sub('', line)):
            root, name, kind, op, arguments, attributes = match.groups()
            operands = () if op in _LITERAL_OPS else tuple(_NAME.findall(arguments))
            current.instructions[name] = Instruction(
                name, op, parse_arrays(kind), operands, arguments, attributes, bool(root)
            )
    return computations


def parse_arrays(kind: str) -> tuple[HloArray, ...]:
    """Parses the arrays in an HLO type such as `(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, u32[])`."""
    return tuple(_parse_array(*match.groups()) for match in _ARRAY.finditer(kind))


def _parse_array(dtype: str, dimensions: str, layout: str | None) -> HloArray:
    shape = tuple(int(size.lstrip('<=')) for size in dimensions.split(',') if size)
    number = re.search(r'\d+', dtype)
    bits = 8 if dtype == 'pred' else int(number[0]) if number else 0
    space = re.search(r'S\((\d+)\)', layout or '')
    sizes = list(shape)
    # The layout `2,1,0:T(8,128)` has 8 x 128 tiles in the two minor dimensions; sizes are rounded up to whole tiles.
    if tiling := re.match(r'([\d,]+):T\(([\d,]+)\)', layout or ''):
        order, tile = ([int(number) for number in group.split(',')] for group in tiling.groups())
        for axis, size in zip(order, reversed(tile), strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
    return HloArray(dtype, shape, math.ceil(math.prod(sizes) * bits / 8), int(space[1]) if space else 0)
