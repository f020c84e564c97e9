"""The settings that differ between the gin of a checkpoint and the gin of the run that resumes from it."""

import re

# Folders and reporting periods do not change what is computed.
HARMLESS = ('MODEL_DIR', 'KEEP_CHECKPOINTS', 'RESTORE', 'FILES', 'DATA_DIR', 'CACHE_DIR', 'VOCABULARY_PATH')
MAX_SHOWN = 6


def bindings(config: str) -> dict[str, str]:
    """Macro or `module.Class.argument` to its value, in an operative gin text, which indents continuation lines."""
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


def describe_changes(old: str, new: str) -> str:
    """The settings that differ, as `LEARNING_RATE 0.001 -> 0.01, ...`; empty if none differs or if one text is
    empty.
    """
    before, now = bindings(old), bindings(new)
    if not before or not now:
        return ''
    harmless = {name for name in (*before, *now) if name in HARMLESS or name.endswith(('.model_dir', '.restore'))}
    names = [name for name in sorted({*before, *now} - harmless) if before.get(name) != now.get(name)]
    changes = [f'{name} {before.get(name, "(absent)")} -> {now.get(name, "(absent)")}' for name in names]
    more = [f'and {len(names) - MAX_SHOWN} more'] if len(names) > MAX_SHOWN else []
    return ', '.join([*changes[:MAX_SHOWN], *more])
