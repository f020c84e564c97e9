"""What a compiled program runs on each device: its kernels and collectives, in a loop once for each iteration.

XLA's own `cost_analysis()` counts the body of a loop once, so it misses most of a model whose layers are scanned.
"""

import dataclasses
from collections.abc import Iterator

from remixer_t5x.extras.forecast import hlo_bytes, hlo_collectives, hlo_flops, hlo_loops, hlo_program
from remixer_t5x.extras.forecast.hlo_flops import Flops
from remixer_t5x.extras.forecast.hlo_program import Computation, Instruction, Program

# These run nothing, or are counted where they start.
_FREE = {
    *('parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'after-all', 'opt-barrier', 'add-dependency'),
    *('optimization-barrier', 'partition-id', 'replica-id', 'iota', 'domain'),
}
# Custom calls that mark a value and run nothing.
_MARKS = {'Sharding', 'AllocateBuffer', 'AssumeGatherIndicesInBound', 'ConcatBitcast'}

# How many readers of a result are asked where they were traced.
_READERS = 8


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that runs on a device.

    Attributes:
        name: its name in the HLO.
        op: 'fusion', 'dot', ...; of a custom call, what it runs.
        op_name: where JAX traced it.
        times: how often the program runs it.
        flops: of one run, by the type of number.
        bytes: between HBM and the core, of one run.
        cycles: the TPU compiler's estimate for one run; None where it has none.
        is_opaque: a custom kernel without an estimate of its FLOPs, of which only operands and results count.
    """

    name: str
    op: str
    op_name: str
    times: int
    flops: Flops
    bytes: float
    cycles: int | None
    is_opaque: bool = False


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange between devices.

    Attributes:
        kind: 'all-gather', 'all-reduce', ...
        op_name: where JAX traced it.
        times: how often the program runs it.
        given: bytes of a device's operands in one run.
        groups: devices that exchange data, by their position in the program's assignment.
    """

    kind: str
    op_name: str
    times: int
    given: float
    groups: tuple[tuple[int, ...], ...]

    @property
    def members(self) -> int:
        """Devices of a group."""
        return max(len(group) for group in self.groups)

    @property
    def sent(self) -> float:
        """Bytes that each device sends in one run, if its group is in one slice."""
        return hlo_collectives.bytes_sent(self.kind, self.given, self.members)


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Kernels and collectives in the order of the schedule."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]


def read(text: str, devices: int = 1) -> CompiledProgram:
    """What the program of an optimised HLO text runs.

    Args:
        text: `compiled.as_text()`.
        devices: how many devices run it.

    Raises:
        ValueError: the text is not an HLO module.
    """
    program = hlo_program.parse(text)
    found = list(_runs(program, program.entry, 1, devices))
    return CompiledProgram(
        kernels=tuple(run for run in found if isinstance(run, Kernel)),
        collectives=tuple(run for run in found if isinstance(run, Collective)),
    )


def _runs(program: Program, name: str, times: int, devices: int, loop: str = '') -> Iterator[Kernel | Collective]:
    """What computation `name`, in a loop that JAX traced at `loop`, runs when it is run `times` times."""
    computation = program[name]
    for instruction in computation:
        if instruction.op in _FREE or instruction.op.endswith(('-done', '-update')) or instruction.target in _MARKS:
            continue
        if instruction.op == 'while':
            repeated = times * hlo_loops.iterations(instruction, computation, program)
            inner = instruction.op_name or loop
            yield from _runs(program, instruction.called('body'), repeated, devices, inner)
        elif instruction.op == 'conditional':
            branches = (list(_runs(program, branch, times, devices, loop)) for branch in instruction.branches())
            yield from max(branches, key=_size, default=[])
        elif instruction.op in ('call', 'async-start'):
            called = instruction.called('to_apply') or instruction.called('calls')
            yield from _runs(program, called, times, devices, loop)
        elif hlo_collectives.kind(instruction):
            yield _collective(instruction, computation, times, devices)
        else:
            yield from _fused_collectives(instruction, program, times, devices)
            yield _kernel(instruction, computation, program, times, loop)


def _size(runs: list[Kernel | Collective]) -> float:
    """A measure of work by which the dearest branch of a conditional is chosen."""
    return sum(run.times * (run.bytes + run.flops.total() if isinstance(run, Kernel) else run.sent) for run in runs)


def _kernel(instruction: Instruction, computation: Computation, program: Program, times: int, loop: str) -> Kernel:
    cycles = instruction.attribute(r'"estimated_cycles": ?"(\d+)"')
    flops = hlo_flops.of_instruction(instruction, computation, program)
    return Kernel(
        name=instruction.name,
        op=instruction.target or instruction.op,
        op_name=_op_name(instruction, computation, program) or loop,
        times=times,
        flops=flops,
        bytes=hlo_bytes.of_instruction(instruction, computation, program),
        cycles=int(cycles) if cycles else None,
        is_opaque=bool(instruction.target) and not flops,
    )


def _op_name(instruction: Instruction, computation: Computation, program: Program) -> str:
    """Where JAX traced it. What XLA added, such as a copy, belongs to what reads its result."""
    waiting = [instruction]
    for reader in waiting:
        named = reader.op_name or _op_name_within(reader, program)
        if named or len(waiting) > _READERS:
            return named
        waiting += [user for user, _ in computation.users.get(reader.name, ()) if user.op != 'tuple']
    return ''


def _op_name_within(instruction: Instruction, program: Program) -> str:
    """The place of the last instruction of a fusion that has one."""
    if instruction.op != 'fusion':
        return ''
    named = [each.op_name for each in program[instruction.called('calls')] if each.op_name and each.op != 'parameter']
    return named[-1] if named else ''


def _collective(instruction: Instruction, computation: Computation, times: int, devices: int) -> Collective:
    groups = tuple(hlo_collectives.groups(instruction, devices))
    given = hlo_collectives.bytes_given(instruction, computation)
    return Collective(hlo_collectives.kind(instruction), instruction.op_name, times, given, groups)


def _fused_collectives(instruction: Instruction, program: Program, times: int, devices: int) -> Iterator[Collective]:
    """The TPU compiler puts some collectives into fusions."""
    if instruction.op != 'fusion':
        return
    fused = program[instruction.called('calls')]
    for each in fused:
        if hlo_collectives.kind(each):
            yield _collective(each, fused, times, devices)
        elif each.op == 'fusion':
            yield from _fused_collectives(each, program, times, devices)
