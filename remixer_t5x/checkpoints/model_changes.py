"""Describes in one line how a checkpoint differs from the model that a configuration builds, by shapes of arrays."""

import re
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]
_SUBLAYER = re.compile(r'(?:^|/)(encoder|decoder)/run_\d+/layer/(\w+)/')
_SIDES = ('encoder', 'decoder')


def describe(saved: Shapes, current: Shapes) -> str:
    """Names the sublayers that only one of both has, or the first array whose shape differs; empty if all are equal.

    Args:
        saved: shapes of the arrays in the checkpoint, by names such as `params/encoder/run_0/layer/...`.
        current: shapes of the model, or of the state of a run.
    """
    differing = [name for name in sorted({*saved, *current}) if saved.get(name) != current.get(name)]
    if not differing:
        return ''
    there, here = _sublayers(saved), _sublayers(current)
    if others := [side for side in _SIDES if there[side] != here[side]]:
        changes = {side: _change(there[side], here[side]) for side in others}
        if len(set(changes.values())) == 1:
            return f'its {" and ".join(others)} {"have" if others[1:] else "has"} {changes[others[0]]}'
        return ', '.join(f'its {side} has {change}' for side, change in changes.items())
    # An array that both have is more informative than one that one of them lacks, and a parameter than its moments.
    name = min(differing, key=lambda name: (not (name in saved and name in current), not name.startswith('params/')))
    more = f' (and {len(differing) - 1} more differ)' if len(differing) > 1 else ''
    by_length = any(mixer in name for mixer in ('remixer', 'gmlp', 'mlp_mixer')) and name in saved and name in current
    advice = '; rows are as long as there with --gin.MAX_INPUT_LENGTH and --gin.MAX_TARGET_LENGTH' if by_length else ''
    return (
        f'{name} has shape {saved.get(name, "(absent)")} there and {current.get(name, "(absent)")} here{more}{advice}'
    )


def _sublayers(shapes: Shapes) -> dict[str, set[str]]:
    """The names of the modules in the layers of each stack, such as `self_attention`, without norms."""
    names: dict[str, set[str]] = {side: set() for side in _SIDES}
    for match in filter(None, map(_SUBLAYER.search, shapes)):
        if not match[2].endswith('norm'):
            names[match[1]].add(match[2])
    return names


def _change(there: set[str], here: set[str]) -> str:
    lacks, has = (' and '.join(sorted(names)) or 'nothing' for names in (here - there, there - here))
    return f'{has} where this configuration builds {lacks}'
