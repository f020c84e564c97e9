"""How often an HLO `while` runs its body.

XLA writes the number into most loops. Where the TPU compiler has changed a loop (unrolled, pipelined), the number
follows from the counter: its first value, what an iteration adds, and the bound that the condition compares with.
"""

import math

from remixer_t5x.extras.forecast.hlo_program import Computation, Instruction, Program

# They pass a value on.
_SAME = ('copy', 'bitcast', 'convert')


def iterations(loop: Instruction, outside: Computation, program: Program) -> int:
    """The number of iterations; 1 if the loop has no counter that is understood.

    Args:
        outside: the computation that contains the loop.
    """
    known = loop.attribute(r'"known_trip_count": ?\{"n": ?"(\d+)"')
    if known:
        return int(known)
    condition, body = program[loop.called('condition')], program[loop.called('body')]
    compared = condition.root
    if compared.op != 'compare' or compared.attribute(r'direction=(\w+)') != 'LT':
        return 1
    counter, bound = (_through(each, condition) for each in condition.operands(compared))
    place = _place(counter)
    last = _initial(_place(bound), loop, outside) if _place(bound) is not None else _constant(bound)
    if place is None or last is None:
        return 1
    added = _added(body.operands(body.root)[place], place, body)
    return max(1, math.ceil((last - (_initial(place, loop, outside) or 0)) / (added or 1)))


def _through(instruction: Instruction, computation: Computation) -> Instruction:
    while instruction.op in _SAME:
        instruction = computation.operands(instruction)[0]
    return instruction


def _place(instruction: Instruction) -> int | None:
    """Which element of the loop's state it reads; None if it reads none."""
    return int(instruction.attribute(r'index=(\d+)')) if instruction.op == 'get-tuple-element' else None


def _constant(instruction: Instruction) -> int | None:
    whole = instruction.op == 'constant' and instruction.arguments.lstrip('-').isdecimal()
    return int(instruction.arguments) if whole else None


def _initial(place: int | None, loop: Instruction, outside: Computation) -> int | None:
    """The constant with which an element of the loop's state begins."""
    state = outside.operands(loop)[0]
    if place is None or state.op != 'tuple':
        return None
    return _constant(_through(outside.operands(state)[place], outside))


def _added(new: Instruction, place: int, body: Computation) -> int | None:
    """What an iteration adds to the counter: constants, one by one where the loop is unrolled."""
    new = _through(new, body)
    if _place(new) == place:
        return 0
    if new.op != 'add':
        return None
    left, right = (_through(each, body) for each in body.operands(new))
    step, rest = (_constant(right), left) if _constant(left) is None else (_constant(left), right)
    before = _added(rest, place, body)
    return None if step is None or before is None else step + before
