"""Compares a checkpoint's data, settings and array shapes with those of the run that resumes from it."""

import ast
import re
from collections.abc import Collection, Mapping
from typing import Any

from remixer_t5x.data import fingerprint
from remixer_t5x.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]
# Maps keys of the run record in a checkpoint to the settings that must not change when a run resumes, because the data
# position is saved as a number of batches.
FIXED_SETTINGS = {
    'batch_size': 'BATCH_SIZE',
    'feature_lengths': 'TASK_FEATURE_LENGTHS',
    'pack': 'pack',
    'length_buckets': 'LENGTH_BUCKETS',
    'task': 'MIXTURE_OR_TASK_NAME',
    'seed': 'SEED',
    'split': 'TRAIN_SPLIT',
}
RESET_ADVICE = (
    'train in another MODEL_DIR with INITIAL_CHECKPOINT_PATH set to this one, which keeps the parameters and resets '
    'the optimizer, the step and the data position'
)
# Settings whose changes are not reported: they do not affect the run, or the contents of their files are compared.
IGNORED_SETTINGS = (
    *('MODEL_DIR', 'KEEP_CHECKPOINTS', 'RESTORE', 'FILES', 'DATA_DIR', 'CACHE_DIR', 'VOCABULARY_PATH'),
    # config.gin contains the results of these functions, so a run that reads it does not bind their arguments.
    *('positions.max_input_length.lengths', 'positions.max_target_length.lengths'),
    'positions.max_target_length.model_type',
)
MAX_SHOWN_CHANGES = 6


def check_record_compatible(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises UserError if a run with the record `current` cannot resume from a checkpoint with the record `saved`."""
    old, new = saved.get('vocabulary'), current.get('vocabulary')
    settings = describe_config_changes(saved.get('config', ''), current.get('config', ''))
    settings = f' (changed: {settings})' if settings else ''
    if old != new:
        raise UserError(
            f'the checkpoint was trained with vocabulary {old}, but this run uses {new}; use the same '
            f'vocabulary{settings}, or another MODEL_DIR'
        )
    # Older checkpoints do not record the split.
    saved = {'split': current.get('split'), **saved}
    for key, setting in FIXED_SETTINGS.items():
        if saved.get(key) != current.get(key):
            raise UserError(
                f'the checkpoint was trained with {setting} = {saved.get(key)!r}, but this run uses '
                f'{current.get(key)!r}; use the same value, or {RESET_ADVICE}'
            )
    changed = fingerprint.describe_data_difference(saved.get('data') or {}, current.get('data') or {})
    if changed:
        raise UserError(
            f'the data has changed since the checkpoint: {changed}; restore the old data and settings{settings}, or '
            f'{RESET_ADVICE}'
        )


def parse_bindings(config: str) -> dict[str, str]:
    """Parses an operative gin config, in which continuation lines are indented. Maps setting names to values."""
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


def parse_literal(config: str, name: str) -> Any:
    """Returns the value of a setting, or of the macro that it refers to; None if it is missing or not a literal."""
    settings = parse_bindings(config)
    text = settings.pop(name, 'None')
    while text.startswith('%'):
        # Remove each macro, because the macros of a damaged file may refer to each other in a cycle.
        text = settings.pop(text[1:], 'None')
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def describe_config_changes(old: str, new: str, ignored: Collection[str] = ()) -> str:
    """Lists changed settings that are not in `ignored`, such as `LEARNING_RATE 0.001 -> 0.01`.

    Returns '' if no setting has changed, or if one of the two configurations is empty.
    """
    old_settings, new_settings = parse_bindings(old), parse_bindings(new)
    if not old_settings or not new_settings:
        return ''
    harmless = {
        *IGNORED_SETTINGS,
        *ignored,
        *(name for name in (*old_settings, *new_settings) if name.endswith(('.model_dir', '.restore'))),
    }
    names = [
        name
        for name in sorted({*old_settings, *new_settings} - harmless)
        if old_settings.get(name) != new_settings.get(name)
    ]
    changes = [f'{name} {old_settings.get(name, "(absent)")} -> {new_settings.get(name, "(absent)")}' for name in names]
    suffix = [f'and {len(names) - MAX_SHOWN_CHANGES} more'] if len(names) > MAX_SHOWN_CHANGES else []
    return ', '.join([*changes[:MAX_SHOWN_CHANGES], *suffix])


def describe_shape_difference(saved: Shapes, current: Shapes) -> str:
    """Describes an array that differs between a checkpoint and a model, and counts the other differing arrays.

    Returns '' if the names and shapes of all arrays are equal. Array names have the form
    `params/encoder/run_0/layer/...`.
    """
    differing = [name for name in sorted({*saved, *current}) if saved.get(name) != current.get(name)]
    if not differing:
        return ''
    # Prefer arrays that exist in both the checkpoint and the model, and prefer parameters to optimizer moments.
    name = min(differing, key=lambda name: (not (name in saved and name in current), not name.startswith('params/')))
    others = f' (and {len(differing) - 1} more differ)' if len(differing) > 1 else ''
    saved_shape, current_shape = saved.get(name, '(absent)'), current.get(name, '(absent)')
    return f'{name} has shape {saved_shape}, expected {current_shape}{others}'
