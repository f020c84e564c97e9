"""Lists the kernels and collectives that a compiled program runs on each device, and how often each one runs.

XLA's `cost_analysis()` counts the body of a loop once, so it misses most of the cost of a model with scanned layers.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from remixer_t5x.extras.forecast import hlo, hlo_costs
from remixer_t5x.extras.forecast.hlo import Computation, HloProgram, Instruction
from remixer_t5x.extras.forecast.hlo_costs import Flops

# Operations that do not launch a kernel.
_OPS_WITHOUT_KERNEL = {
    *('parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'after-all', 'opt-barrier', 'add-dependency'),
    *('optimization-barrier', 'partition-id', 'replica-id', 'iota', 'domain'),
}
# Custom calls that only annotate a value and do not launch a kernel.
_ANNOTATIONS = {'Sharding', 'AllocateBuffer', 'AssumeGatherIndicesInBound', 'ConcatBitcast'}
# Operations whose result has the same value as the operand.
_ALIASES = ('copy', 'bitcast', 'convert')
# Maximum number of users to search for an `op_name` if an instruction has none.
_MAX_SEARCHED_USERS = 8


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An HLO instruction that runs as a kernel on a device.

    Attributes:
        op: opcode, such as 'fusion' or 'dot', or the target of a custom call.
        op_name: JAX's name stack of the instruction, from the HLO metadata.
        num_runs: how often the kernel runs in one execution of the program.
        flops: maps dtypes to FLOPs per run.
        bytes: HBM traffic per run, in bytes.
        cycles: clock cycles per run, as estimated by the TPU compiler, or None without an estimate.
        is_opaque: whether the kernel is a custom call without a FLOP estimate; only its operands and results are
            counted.
    """

    name: str
    op: str
    op_name: str
    num_runs: int
    flops: Flops
    bytes: float
    cycles: int | None
    is_opaque: bool = False


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation.

    Attributes:
        kind: opcode, such as 'all-gather' or 'all-reduce'.
        num_runs: how often the collective runs in one execution of the program.
        operand_bytes: size of the operands on one device, per run.
        groups: groups of devices that exchange data; devices are positions in the program's device assignment.
    """

    kind: str
    num_runs: int
    operand_bytes: float
    groups: tuple[tuple[int, ...], ...]

    @property
    def group_size(self) -> int:
        """The number of devices in the largest group."""
        return max(map(len, self.groups))

    def count_bytes_sent(self, slices: int = 1) -> float:
        """Returns the bytes that each device sends per run over the slowest link of its group.

        If each group spans several slices, only the bytes sent between slices are counted.
        """
        count_relative_bytes = hlo_costs.RELATIVE_BYTES_SENT[self.kind]
        if slices == 1:
            return count_relative_bytes(self.group_size) * self.operand_bytes
        share = slices / self.group_size if self.kind in hlo_costs.SHARDED_ACROSS_SLICES else 1.0
        return count_relative_bytes(slices) * share * self.operand_bytes


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """The kernels and collectives of a program in scheduled order."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]


def parse_program(text: str, devices: int = 1) -> CompiledProgram:
    """Parses the kernels and collectives in the text (`compiled.as_text()`) of a program for `devices` devices."""
    runs = list(_iterate_operations(hlo.parse_hlo(text), hlo.ENTRY, 1, devices))
    return CompiledProgram(
        kernels=tuple(run for run in runs if isinstance(run, Kernel)),
        collectives=tuple(run for run in runs if isinstance(run, Collective)),
    )


def _iterate_operations(
    program: HloProgram, name: str, num_runs: int, devices: int, loop: str = ''
) -> Iterator[Kernel | Collective]:
    """Yields the kernels and collectives of the computation `name`.

    Args:
        num_runs: number of runs of the computation.
        loop: JAX's name stack of the innermost loop that contains the computation.
    """
    computation = program[name]
    for instruction in computation:
        if (
            instruction.op in _OPS_WITHOUT_KERNEL
            or instruction.op.endswith(('-done', '-update'))
            or instruction.custom_call_target in _ANNOTATIONS
        ):
            continue
        if instruction.op == 'while':
            repeats = num_runs * count_iterations(instruction, computation, program)
            yield from _iterate_operations(
                program, instruction.find_called_computation('body'), repeats, devices, instruction.op_name or loop
            )
        elif instruction.op == 'conditional':
            # `costs.model_counts` counts the same branch.
            yield from _iterate_operations(program, instruction.find_true_computation(), num_runs, devices, loop)
        elif instruction.op in ('call', 'async-start'):
            called = instruction.find_called_computation('to_apply') or instruction.find_called_computation()
            yield from _iterate_operations(program, called, num_runs, devices, loop)
        elif hlo_costs.find_collective_kind(instruction):
            yield _build_collective(instruction, computation, num_runs, devices)
        else:
            yield from _iterate_fused_collectives(instruction, program, num_runs, devices)
            yield _build_kernel(instruction, computation, program, num_runs, loop)


def _build_kernel(
    instruction: Instruction, computation: Computation, program: HloProgram, num_runs: int, loop: str
) -> Kernel:
    cycles = instruction.find_attribute(r'"estimated_cycles": ?"(\d+)"')
    flops = hlo_costs.count_flops(instruction, computation, program)
    return Kernel(
        name=instruction.name,
        op=instruction.custom_call_target or instruction.op,
        op_name=_find_op_name(instruction, computation, program) or loop,
        num_runs=num_runs,
        flops=flops,
        bytes=hlo_costs.count_bytes(instruction, computation, program),
        cycles=int(cycles) if cycles else None,
        is_opaque=bool(instruction.custom_call_target) and not flops,
    )


def _find_op_name(instruction: Instruction, computation: Computation, program: HloProgram) -> str:
    """Returns an instruction's JAX name stack or, for a copy added by XLA, that of an instruction reading the copy."""
    readers = [instruction]
    for reader in readers:
        op_name = reader.op_name
        if reader.op == 'fusion' and not op_name:
            names = [inner.op_name for inner in program[reader.find_called_computation()] if inner.op != 'parameter']
            op_name = next(filter(None, reversed(names)), '')
        if op_name or len(readers) > _MAX_SEARCHED_USERS:
            return op_name
        readers += [user for user, _ in computation.users_by_name.get(reader.name, ()) if user.op != 'tuple']
    return ''


def _build_collective(instruction: Instruction, computation: Computation, num_runs: int, devices: int) -> Collective:
    operand_bytes = sum(array.bytes for array in computation.get_operand_arrays(instruction))
    groups = hlo_costs.parse_device_groups(instruction, devices)
    return Collective(hlo_costs.find_collective_kind(instruction), num_runs, operand_bytes, groups)


def _iterate_fused_collectives(
    instruction: Instruction, program: HloProgram, num_runs: int, devices: int
) -> Iterator[Collective]:
    """Yields the collectives inside a fusion created by the TPU compiler."""
    fused = program[instruction.find_called_computation()] if instruction.op == 'fusion' else Computation()
    for inner in fused:
        if hlo_costs.find_collective_kind(inner):
            yield _build_collective(inner, fused, num_runs, devices)
        yield from _iterate_fused_collectives(inner, program, num_runs, devices)


def count_iterations(loop: Instruction, outside: Computation, program: HloProgram) -> int:
    """Returns the trip count of a `while` loop, or 1 if it cannot be determined.

    XLA annotates most loops with `known_trip_count`. For loops that the TPU compiler has unrolled or pipelined, the
    trip count is computed from the counter's initial value, its increment and the loop bound.

    Args:
        loop: a `while` instruction.
        outside: the computation that contains the loop.
        program: the whole program.
    """
    known = loop.find_attribute(r'"known_trip_count": ?\{"n": ?"(\d+)"')
    if known:
        return int(known)
    condition, body = program[loop.find_called_computation('condition')], program[loop.find_called_computation('body')]
    compare, state = condition.root_instruction, outside.get_operands(loop)[0]
    if compare.op != 'compare' or 'direction=LT' not in compare.attributes:
        return 1
    elements = outside.get_operands(state) if state.op == 'tuple' else []
    first = {index: _evaluate_integer(element, outside, {}) for index, element in enumerate(elements)}
    counter, bound = condition.get_operands(compare)
    last = _evaluate_integer(bound, condition, first)
    while counter.op in _ALIASES:
        (counter,) = condition.get_operands(counter)
    if counter.op != 'get-tuple-element' or last is None:
        return 1
    index = _get_element_index(counter)
    step = _evaluate_integer(body.get_operands(body.root_instruction)[index], body, {index: 0}) or 1
    return max(1, math.ceil((last - (first.get(index) or 0)) / step))


def _evaluate_integer(
    instruction: Instruction, computation: Computation, state: Mapping[int, int | None]
) -> int | None:
    """Evaluates an integer instruction from the known elements of the loop state; returns None for an unknown value."""
    if instruction.op == 'constant':
        return int(instruction.arguments) if instruction.arguments.lstrip('-').isdecimal() else None
    if instruction.op == 'get-tuple-element':
        return state.get(_get_element_index(instruction))
    if instruction.op not in (*_ALIASES, 'add'):
        return None
    values = [_evaluate_integer(operand, computation, state) for operand in computation.get_operands(instruction)]
    return None if None in values else sum(value for value in values if value is not None)


def _get_element_index(instruction: Instruction) -> int:
    return int(instruction.find_attribute(r'index=(\d+)'))
