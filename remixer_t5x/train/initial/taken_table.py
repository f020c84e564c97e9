"""A table of what a run takes from a checkpoint, what begins fresh, and what is left there."""

import math
from collections.abc import Collection, Iterator, Mapping

Shapes = Mapping[str, tuple[int, ...]]
# Places of one kind; of more, the largest are shown.
MOST_SHOWN = 12


def lines(taken: Shapes, fresh: Shapes, left: Shapes) -> Iterator[str]:
    """One line for each place: what happens to it, its name, arrays and parameters.

    A place is the shortest beginning of names that all arrays of one kind share with no array of another kind.
    """
    kinds = {'taken': taken, 'fresh': fresh, 'left': left}
    everything = {name for shapes in kinds.values() for name in shapes}
    for kind, shapes in kinds.items():
        # What is left has names of the checkpoint, the others have names of the model.
        by_place: dict[str, list[int]] = {}
        for name, place in places(shapes.keys(), everything - shapes.keys()).items():
            by_place.setdefault(place, []).append(math.prod(shapes[name]))
        ordered = sorted(by_place.items(), key=lambda item: -sum(item[1]))
        for place, sizes in ordered[:MOST_SHOWN]:
            yield _line(kind, place, len(sizes), sum(sizes))
        if rest := ordered[MOST_SHOWN:]:
            arrays = sum(len(sizes) for _, sizes in rest)
            yield _line(kind, f'{len(rest)} more places', arrays, sum(sum(sizes) for _, sizes in rest))


def places(names: Collection[str], others: Collection[str]) -> dict[str, str]:
    """For each of `names` the shortest beginning, of whole parts, that none of `others` has, as `encoder/run_0`."""
    known = {'/'.join(parts[:depth]) for parts in (name.split('/') for name in others) for depth in range(len(parts))}
    found = {}
    for name in names:
        parts = name.split('/')
        beginnings = ('/'.join(parts[:depth]) for depth in range(1, len(parts) + 1))
        found[name] = next((beginning for beginning in beginnings if beginning not in known), name)
    return found


def _line(kind: str, place: str, arrays: int, size: int) -> str:
    return f'  {kind:<5}  {place:<44}  {arrays:>4} {"array " if arrays == 1 else "arrays"}  {size:>14,} parameters'
