"""Describes how a checkpoint differs from the run that resumes from it: settings, and shapes of arrays."""

import re
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]
# Folders and reporting periods do not change what is computed.
HARMLESS = ('MODEL_DIR', 'KEEP_CHECKPOINTS', 'RESTORE', 'FILES', 'DATA_DIR', 'CACHE_DIR', 'VOCABULARY_PATH')
MAX_SHOWN = 6
_POSITION_MIXERS = ('remixer', 'gmlp', 'mlp_mixer')


def parse_bindings(config: str) -> dict[str, str]:
    """Returns values by macro or `module.Class.argument` of an operative gin text, which indents continuation lines."""
    values: dict[str, list[str]] = {}
    name = None
    for line in config.splitlines():
        start = re.match(r'([\w./]+) = (.*)', line)
        if start:
            name, value = start.groups()
            values[name] = [value]
        elif name and line.startswith(' '):
            values[name].append(line)
        else:
            name = None
    return {name: ' '.join(filter(None, (line.rstrip('\\').strip() for line in values[name]))) for name in values}


def describe_config(old: str, new: str) -> str:
    """Lists the settings that differ, as `LEARNING_RATE 0.001 -> 0.01, ...`; empty if none does or a text is empty."""
    before, now = parse_bindings(old), parse_bindings(new)
    if not before or not now:
        return ''
    harmless = {name for name in (*before, *now) if name in HARMLESS or name.endswith(('.model_dir', '.restore'))}
    names = [name for name in sorted({*before, *now} - harmless) if before.get(name) != now.get(name)]
    changes = [f'{name} {before.get(name, "(absent)")} -> {now.get(name, "(absent)")}' for name in names]
    more = [f'and {len(names) - MAX_SHOWN} more'] if len(names) > MAX_SHOWN else []
    return ', '.join([*changes[:MAX_SHOWN], *more])


def describe_shapes(saved: Shapes, current: Shapes) -> str:
    """Names the first array that differs between a checkpoint and a model or state, and counts the others.

    Empty if both have the same arrays. Names are like `params/encoder/run_0/layer/...`.
    """
    differing = [name for name in sorted({*saved, *current}) if saved.get(name) != current.get(name)]
    if not differing:
        return ''
    # An array that both have is more informative than one that one of them lacks, and a parameter than its moments.
    name = min(differing, key=lambda name: (not (name in saved and name in current), not name.startswith('params/')))
    more = f' (and {len(differing) - 1} more differ)' if len(differing) > 1 else ''
    has_fixed_length = name in saved and name in current and any(mixer in name for mixer in _POSITION_MIXERS)
    advice = '; set the same lengths with MAX_INPUT_LENGTH and MAX_TARGET_LENGTH' if has_fixed_length else ''
    there, here = saved.get(name, '(absent)'), current.get(name, '(absent)')
    return f'{name} has shape {there} there and {here} here{more}{advice}'
