"""The settings that differ between the gin of a checkpoint and the gin of the run that resumes from it."""

import re

# Folders and reporting periods do not change what is computed.
HARMLESS = ('MODEL_DIR', 'KEEP_CHECKPOINTS', 'RESTORE', 'FILES', 'DATA_DIR', 'CACHE_DIR', 'VOCABULARY_PATH')
MOST_SHOWN = 6


def bindings(config: str) -> dict[str, str]:
    """Macro or `module.Class.argument` to its value, in an operative gin text, which indents continuation lines."""
    found: dict[str, list[str]] = {}
    name = None
    for line in config.splitlines():
        start = re.match(r'([\w./]+) = (.*)', line)
        if start:
            name, value = start.groups()
            found[name] = [value]
        elif name and line.startswith(' '):
            found[name].append(line)
        else:
            name = None
    return {
        name: ' '.join(filter(None, (part.rstrip('\\').strip() for part in parts))) for name, parts in found.items()
    }


def describe_changes(old: str, new: str) -> str:
    """The settings that differ, as `LEARNING_RATE 0.001 -> 0.01, ...`; empty if none differs or if one text is
    empty.
    """
    before, now = bindings(old), bindings(new)
    if not before or not now:
        return ''
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name) and not _harmless(name)]
    shown = [f'{name} {before.get(name, "(absent)")} -> {now.get(name, "(absent)")}' for name in names[:MOST_SHOWN]]
    more = [f'and {len(names) - MOST_SHOWN} more'] if len(names) > MOST_SHOWN else []
    return ', '.join([*shown, *more])


def _harmless(name: str) -> bool:
    return name in HARMLESS or name.endswith(('.model_dir', '.restore'))
