"""What an HLO collective sends between devices: how many bytes, and among which devices.

Bytes are the least that each device sends: around a ring of its group, and where the group spans several slices, around
rings within the slices first, so that each device sends its part of the result between the slices.
"""

import math
import re

import numpy as np

from remixer_t5x.extras.forecast.hlo_program import Computation, Instruction

# Bytes that each of n devices sends, in units of the bytes of its operands.
_SENT = {
    'all-gather': lambda n: n - 1,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'ragged-all-to-all': lambda n: (n - 1) / n,
    'collective-broadcast': lambda n: 1,
    'collective-permute': lambda n: 1,
}
# Of these, each device of a slice exchanges its part with other slices.
_DIVIDED = ('all-reduce', 'reduce-scatter')


def kind(instruction: Instruction) -> str:
    """'all-gather' of `all-gather` and of `all-gather-start`; '' of what is not a collective, or ends one."""
    name = instruction.op.removesuffix('-start')
    return name if name in _SENT else ''


def bytes_given(instruction: Instruction, computation: Computation) -> int:
    """Bytes of the operands of one device."""
    return sum(array.bytes for array in computation.operand_arrays(instruction))


def bytes_sent(kind: str, given: float, members: int) -> float:
    """Bytes that one device sends to the other `members` of its group, if all are in one slice."""
    return _SENT[kind](members) * given


def bytes_sent_between(kind: str, given: float, members: int, slices: int) -> float:
    """Bytes that one device sends to other slices, if its group is spread evenly over `slices`."""
    share = slices / members if kind in _DIVIDED else 1.0
    return _SENT[kind](slices) * given * share


def groups(instruction: Instruction, devices: int) -> list[tuple[int, ...]]:
    """The devices, by their position in the program's assignment, that exchange data with each other.

    Args:
        devices: how many devices run the program.

    Raises:
        ValueError: the groups are written in a way that is not known here.
    """
    pairs = instruction.attribute(r'source_target_pairs=\{(\{.*?\})\}')
    if pairs:
        return _listed(pairs)
    text = instruction.attribute(rf'replica_groups=({_MESH}|\{{\{{.*?\}}\}}|\S+)')
    if text.startswith('mesh'):
        return _of_axes(text)
    if '<=' in text:
        return _of_iota(text)
    return _listed(text) or [tuple(range(devices))]


def _listed(text: str) -> list[tuple[int, ...]]:
    """`{{0,1},{2,3}}`; `{}` is empty."""
    found = (re.findall(r'\d+', group) for group in re.findall(r'\{([\d, ]+)\}', text))
    return [tuple(map(int, group)) for group in found]


def _of_iota(text: str) -> list[tuple[int, ...]]:
    """`[4,2]<=[2,4]T(1,0)`: 0 to 7 as an array [2, 4], transposed and reshaped to 4 groups of 2."""
    found = re.match(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
    if not found:
        raise ValueError(f'unknown form of replica groups: {text}')
    shape, reshaped, order = (tuple(map(int, part.split(','))) if part else None for part in found.groups())
    ids = np.arange(np.prod(reshaped)).reshape(reshaped)
    return [tuple(row) for row in np.transpose(ids, order).reshape(shape).tolist()]


def _of_axes(text: str) -> list[tuple[int, ...]]:
    """`mesh['a'=2,'b'=4] {'b'}`: the devices along the named axes of a mesh; `'b':(2)2` is a part of an axis.

    The devices of the mesh are in order, unless it says `device_ids=([4,2]T(1,0))`: 0 to 7 as an array, transposed.
    """
    head, brace, named = text.partition('{')
    if not brace:
        raise ValueError(f'unknown form of replica groups: {text}')
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", head)}
    chosen = {name: (int(pre or 1), int(size or sizes[name])) for name, pre, size in _AXIS.findall(named)}
    shape, inside = [], []
    for name, size in sizes.items():
        before, used = chosen.get(name, (1, 1))
        shape += [before, used, size // (before * used)]
        inside.append(len(shape) - 2)
    grid = np.moveaxis(_device_ids(head, sizes).reshape(shape), inside, range(-len(inside), 0))
    return [tuple(row) for row in grid.reshape(-1, math.prod(shape[axis] for axis in inside)).tolist()]


def _device_ids(head: str, sizes: dict[str, int]) -> np.ndarray:
    found = re.search(r'device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d, ]+))\)', head)
    if not found:
        return np.arange(np.prod(list(sizes.values())))
    shape, order, listed = (tuple(map(int, part.split(','))) if part else None for part in found.groups())
    return np.asarray(listed) if shape is None else np.arange(np.prod(shape)).reshape(shape).transpose(order)


_MESH = r'mesh\[[^\]]*\](?:, device_ids=\(.*?\))? ?\{[^}]*\}'
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
