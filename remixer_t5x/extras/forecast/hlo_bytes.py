"""Bytes that an HLO instruction moves between the main memory (HBM) and the core.

A fusion reads each operand once and writes its results once; what is computed within stays in the core. Of an operand
that is only sliced or gathered from, the slices count, and of a result that is updated in place, the update.
"""

from remixer_t5x.extras.forecast import hlo_flops
from remixer_t5x.extras.forecast.hlo_program import Computation, Instruction, Program

# They read a part of their first operand that is as large as their result.
_SLICING = ('dynamic-slice', 'slice', 'gather')
# The context of an asynchronous copy, which is not data.
_CONTEXT = ('u32', 'token')


def of_instruction(instruction: Instruction, computation: Computation, program: Program) -> float:
    """Bytes of one run."""
    if instruction.op == 'fusion':
        return _fusion(instruction, computation, program)
    if instruction.op.endswith('-start'):
        return _asynchronous(instruction)
    if instruction.op == 'dynamic-update-slice':
        return 2 * computation.operands(instruction)[1].result_bytes
    if instruction.op in _SLICING:
        return 2 * instruction.result_bytes
    if instruction.op == 'custom-call':
        return _custom_call(instruction, computation)
    return _operands_and_results(instruction, computation)


def _operands_and_results(instruction: Instruction, computation: Computation) -> int:
    return instruction.result_bytes + sum(array.hbm_bytes for array in computation.operand_arrays(instruction))


def _asynchronous(instruction: Instruction) -> int:
    """A copy between the two memories touches HBM once, a copy within HBM twice."""
    moved = [array for array in instruction.results if array.dtype not in _CONTEXT and array.shape]
    within = len({array.memory_space for array in moved}) == 1
    return min((array.bytes for array in moved), default=0) * (2 if within else 1)


def _custom_call(instruction: Instruction, computation: Computation) -> float:
    """By the estimate that came with the kernel; else its operands and results, without the scratch of libraries."""
    estimated = hlo_flops.estimate(instruction).get('bytes_accessed')
    if estimated:
        return estimated
    scratch = sum(array.hbm_bytes for array in instruction.results if array.dtype in ('u8', 's8'))
    return _operands_and_results(instruction, computation) - (scratch if len(instruction.results) > 1 else 0)


def _fusion(instruction: Instruction, computation: Computation, program: Program) -> float:
    fused = program[instruction.called('calls')]
    total = 0
    for position, operand in enumerate(computation.operands(instruction)):
        whole = operand.result_bytes
        read, returned = _read(fused, position, whole, program) if whole else (0, False)
        total += whole if returned else min(whole, read)
    written = _written(fused, program)
    for array, size in zip(instruction.results, written, strict=False):
        total += min(array.hbm_bytes, size)
    return total


def _read(fused: Computation, position: int, whole: int, program: Program) -> tuple[int, bool]:
    """Bytes that a fused computation reads of its parameter, and whether it also returns the parameter as it is."""
    total, returned, waiting = 0, False, [fused.parameters[position]]
    while waiting:
        name = waiting.pop()
        returned |= name == fused.root.name
        for user, place in fused.users.get(name, ()):
            if place == 0 and user.op in _SLICING:
                total += user.results[0].bytes
            elif user.op == 'bitcast':
                waiting.append(user.name)
            elif user.op == 'fusion':
                inner, passed = _read(program[user.called('calls')], place, whole, program)
                total += inner
                waiting += [user.name] if passed else []
            elif user.op != 'tuple' and not (user.op == 'dynamic-update-slice' and place == 0):
                return whole, False
    return total, returned


def _written(fused: Computation, program: Program) -> list[int]:
    """Bytes that a fused computation writes for each array of its result."""
    root = fused.root
    leaves = fused.operands(root) if root.op == 'tuple' else [root]
    return [size for leaf in leaves for size in _written_by(leaf, fused, program)]


def _written_by(leaf: Instruction, fused: Computation, program: Program) -> list[int]:
    while leaf.op == 'bitcast':
        leaf = fused.operands(leaf)[0]
    if leaf.op == 'dynamic-update-slice':
        return [fused.operands(leaf)[1].results[0].bytes]
    if leaf.op == 'fusion':
        return _written(program[leaf.called('calls')], program)
    return [array.bytes for array in leaf.results]
