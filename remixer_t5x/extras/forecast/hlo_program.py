"""Reads the text of an optimised HLO module (`compiled.as_text()`) into instructions.

Only what a cost model needs is kept: shapes, operands and attributes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_ARRAY = re.compile(r'([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (.*)$')
_COMMENT = re.compile(r'/\*index=\d+\*/')
_NAME = re.compile(r'%?([\w.\-]+)')
# What is between their parentheses is a value.
_LITERAL = ('constant', 'parameter', 'iota')


class Array(NamedTuple):
    """An array of a result.

    Attributes:
        dtype: XLA's name, such as 'bf16'.
        shape: its dimensions.
        bytes: what it occupies, with the padding of a TPU's tiles.
        memory_space: 0 is the main memory (HBM); 1 is a TPU's on-chip memory (VMEM).
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
    """One line of a computation.

    Attributes:
        op: 'fusion', 'dot', 'while', ...
        results: the arrays of the result; one unless the result is a tuple.
        operands: names of the instructions that it reads.
        arguments: the text between its parentheses, which is the value of a constant.
        attributes: the text after its parentheses.
    """

    name: str
    op: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool = False

    @property
    def op_name(self) -> str:
        """Where JAX traced it: function transformations, flax modules and the primitive, by '/'."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def target(self) -> str:
        """Which kernel a custom call runs."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    @property
    def result_bytes(self) -> int:
        return sum(array.hbm_bytes for array in self.results)

    def attribute(self, pattern: str) -> str:
        """The first group of `pattern` in the attributes; '' without a match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ''

    def called(self, role: str) -> str:
        """The computation that it calls as 'calls', 'to_apply', 'body' or 'condition'; '' if it calls none."""
        return self.attribute(rf'\b{role}=%?([\w.\-]+)')

    def branches(self) -> list[str]:
        """The computations of a conditional."""
        listed = self.attribute(r'branch_computations=\{([^}]*)\}')
        named = [self.called('true_computation'), self.called('false_computation')]
        return _NAME.findall(listed) or [name for name in named if name]


class Computation:
    """Instructions by name, in the order of the schedule."""

    def __init__(self, instructions: Mapping[str, Instruction]):
        self.instructions = instructions

    def __iter__(self):
        return iter(self.instructions.values())

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self if instruction.is_root)

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """Names of the parameters by their number."""
        return {int(each.arguments): each.name for each in self if each.op == 'parameter'}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """By name of an instruction, the instructions that read it, with the position of the operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {}
        for user in self:
            for position, name in enumerate(user.operands):
                found.setdefault(name, []).append((user, position))
        return found

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def operand_arrays(self, instruction: Instruction) -> list[Array]:
        """The arrays of all operands; a tuple gives all its arrays."""
        return [array for operand in self.operands(instruction) for array in operand.results]


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, and the name of the first to run."""

    computations: Mapping[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


def parse(text: str) -> Program:
    """The program of an HLO text.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = '', dict[str, Instruction]()
    inside = False
    for line in text.splitlines():
        if not inside:
            head = _COMPUTATION.match(line.rstrip())
            if head:
                inside, current = True, {}
                computations[head[2]] = Computation(current)
                entry = head[2] if head[1] else entry
        elif line.startswith('}'):
            inside = False
        else:
            instruction = _instruction(line)
            if instruction:
                current[instruction.name] = instruction
    if not entry:
        raise ValueError('the text is not an HLO module: it has no entry computation')
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(_COMMENT.sub('', line))
    if not found:
        return None
    kind, rest = _split_result(found[3])
    op, _, rest = rest.partition('(')
    end = _closing(rest, 1)
    op, arguments = op.strip(), rest[:end]
    return Instruction(
        name=found[2],
        op=op,
        results=tuple(arrays(kind)),
        operands=() if op in _LITERAL else tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=rest[end + 1 :],
        is_root=bool(found[1]),
    )


def _split_result(text: str) -> tuple[str, str]:
    """The type of the result, which may be a nested tuple, and the rest of the line."""
    if text.startswith('('):
        end = _closing(text[1:], 1) + 2
        return text[:end], text[end:]
    kind, _, rest = text.partition(' ')
    return kind, rest


def _closing(text: str, depth: int) -> int:
    """The position of the parenthesis that closes the `depth` open ones."""
    for position, character in enumerate(text):
        depth += (character == '(') - (character == ')')
        if depth == 0:
            return position
    return len(text)


def arrays(kind: str) -> list[Array]:
    """The arrays of a type such as `(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, u32[])`."""
    return [_array(*match.groups()) for match in _ARRAY.finditer(kind)]


def _array(dtype: str, dimensions: str, layout: str | None) -> Array:
    shape = tuple(int(size.lstrip('<=')) for size in dimensions.split(',') if size)
    space = re.search(r'S\((\d+)\)', layout or '')
    elements = math.prod(_padded(shape, layout or ''))
    return Array(dtype, shape, math.ceil(elements * bits(dtype) / 8), int(space[1]) if space else 0)


def _padded(shape: tuple[int, ...], layout: str) -> list[int]:
    """`shape` rounded up to whole tiles; `2,1,0:T(8,128)` tiles the two fastest dimensions, the last number first."""
    order, _, tiling = layout.partition(':')
    tile = re.match(r'T\(([\d,]+)\)', tiling)
    sizes = list(shape)
    if tile and order and shape:
        fastest = [int(axis) for axis in order.split(',')]
        for axis, size in zip(fastest, reversed([int(n) for n in tile[1].split(',')]), strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
    return sizes


def bits(dtype: str) -> int:
    """Bits of an element: 16 of 'bf16', 8 of 'f8e4m3fn' and of 'pred'; 0 of 'token'."""
    number = re.search(r'\d+', dtype)
    return 8 if dtype == 'pred' else int(number[0]) if number else 0
