"""Bytes that an HLO collective sends between devices, and the groups of devices that exchange data.

Bytes are the minimum that each device sends: around a ring of its group, and if the group spans several slices, around
rings within the slices first, so that each device sends its part of the result between the slices.
"""

import math
import re

import numpy as np

from remixer_t5x.extras.forecast.hlo import Instruction

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
# Collectives of which each device of a slice exchanges only its part with other slices.
_DIVIDED = ('all-reduce', 'reduce-scatter')
_MESH = r'mesh\[[^\]]*\](?:, device_ids=\(.*?\))? ?\{[^}]*\}'
_DEVICE_IDS = re.compile(r'device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d, ]+))\)')
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def collective_kind(instruction: Instruction) -> str:
    """'all-gather' for `all-gather` and `all-gather-start`; '' for what is not a collective, or ends one."""
    name = instruction.op.removesuffix('-start')
    return name if name in _SENT else ''


def bytes_sent(kind: str, operand_bytes: float, members: int, slices: int = 1) -> float:
    """Bytes that one device sends over the slowest link of its group.

    Args:
        members: devices of the group.
        slices: over how many slices they are spread evenly; with several, the bytes are those between slices.
    """
    if slices == 1:
        return _SENT[kind](members) * operand_bytes
    return _SENT[kind](slices) * operand_bytes * (slices / members if kind in _DIVIDED else 1.0)


def device_groups(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices, by their position in the program's assignment, that exchange data with each other.

    Args:
        devices: how many devices run the program.

    Raises:
        ValueError: the format of the groups is unknown.
    """
    text = instruction.attribute(r'source_target_pairs=\{(\{.*?\})\}')
    text = text or instruction.attribute(rf'replica_groups=({_MESH}|\{{\{{.*?\}}\}}|\S+)')
    if text.startswith('mesh'):
        groups = _mesh_groups(text)
    elif '<=' in text:
        groups = _iota_groups(text)
    else:
        groups = [[int(number) for number in group.split(',')] for group in re.findall(r'\{([\d, ]+)\}', text)]
    return tuple(map(tuple, groups)) or (tuple(range(devices)),)


def _iota_groups(text: str) -> list[list[int]]:
    """`[4,2]<=[2,4]T(1,0)`: 0 to 7 as an array [2, 4], transposed and reshaped to 4 groups of 2."""
    match = re.match(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
    if not match:
        raise ValueError(f'unknown format of replica groups: {text}')
    shape, reshaped, order = map(_integers, match.groups())
    ids: np.ndarray = np.arange(np.prod(reshaped)).reshape(reshaped).transpose(order)
    return ids.reshape(shape).tolist()


def _mesh_groups(text: str) -> list[list[int]]:
    """`mesh['a'=2,'b'=4] {'b'}`: the devices along the named axes of a mesh; `'b':(2)2` is a part of an axis.

    The devices of the mesh are in order, unless it says `device_ids=([4,2]T(1,0))`: 0 to 7 as an array, transposed.
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
        reshaped, order, listed = map(_integers, match.groups())
        ids = np.asarray(listed) if reshaped is None else ids.reshape(reshaped).transpose(order)
    grid = np.moveaxis(ids.reshape(shape), grouped, range(-len(grouped), 0))
    return grid.reshape(-1, math.prod(shape[axis] for axis in grouped)).tolist()


def _integers(text: str | None) -> list[int] | None:
    return None if text is None else [int(number) for number in text.split(',')]
