"""Which data changed between two runs, from their fingerprints. Does not load TensorFlow, because checkpoints use
it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# The record of `fingerprint` for one task: 'source', 'files' (their number), 'hash', and 'each', a hash by file name.
Identity = dict[str, Any]


def difference(old: Mapping[str, Identity], new: Mapping[str, Identity]) -> str | None:
    """Half a line with the first difference of two results of `data_fingerprint`, None if they are equal."""
    for name in sorted({*old, *new}):
        if name not in new:
            return f'task {name} was read before and is not now'
        if name not in old:
            return f'task {name} is read now and was not before'
        told = _task_difference(old[name], new[name])
        if told:
            return f'task {name} {told}'
    return None


def _task_difference(old: Identity, new: Identity) -> str | None:
    if old == new:
        return None
    if old.get('source') != new.get('source'):
        return f'was read by {old.get("source")} and is now by {new.get("source")}'
    if old.get('files') != new.get('files'):
        return f'had {_count(old)} and now has {_count(new)}'
    before, now = old.get('each') or {}, new.get('each') or {}
    gone, added = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
    if gone and added:
        return f'has the file {added[0]} in place of {gone[0]}{_more(gone)}'
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    if changed:
        return f'has other content in the file {changed[0]}{_more(changed)}'
    if before and before == now:
        return 'reads its files in another order'
    return f'has other files: {_count(new)} again, and other names, sizes or order'


def _more(names: Sequence[str]) -> str:
    return f' (and {len(names) - 1} more)' if len(names) > 1 else ''


def _count(identity: Identity) -> str:
    count = identity.get('files')
    return 'no files' if count is None else f'{count:,} file{"" if count == 1 else "s"}'
