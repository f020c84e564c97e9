"""Checkpoint folders that survive a power loss, and whose files are compared with checksums before they are read.

On a local disk the order is: all files are written; `files.json` lists each with its size and SHA-256; every file and
folder is synced; the folder is renamed to its step's number, which makes it a checkpoint; the folder above is synced.
If the name exists after a power loss, all its bytes do.

A bucket has no rename. There all objects are written under the step's number; `files.json` lists each with its size and
the CRC32C that the bucket computed; Orbax's marker comes last and makes it a checkpoint.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from remixer_t5x import safe_paths, temporary, untrusted_files
from remixer_t5x.errors import UserError, reason
from remixer_t5x.run_folder import object_store

LIST = 'files.json'


# Orbax writes these after the list, or adds to them.
_AFTER_LIST = ('_CHECKPOINT_METADATA', 'commit_success.txt')


class Damaged(UserError):
    """The files of a checkpoint differ from what was written."""


class DurableFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder, synced before and after the rename that commits it."""

    async def finalize(self) -> None:
        final: epath.Path = self.get_final()
        if ocp.path.atomicity.TMP_DIR_SUFFIX in final.parent.name:
            # This item belongs to a checkpoint whose folder is still temporary and is committed as a whole.
            return await super().finalize()
        # Orbax writes its last files and renames in one call. It renames to another temporary name, which the next
        # start removes like the first.
        written = final.parent / f'{self._tmp_path.name}.written'
        self._final_path = written
        try:
            await super().finalize()
        finally:
            self._final_path = final
        commit(pathlib.Path(written), pathlib.Path(final))


class ListedFolder(ocp.path.atomicity.CommitFileTemporaryPath):
    """Orbax's folder in a bucket, which the marker completes; the list of its objects comes before the marker."""

    async def finalize(self) -> None:
        final: epath.Path = self.get_final()
        # An item (`state`, `data`, `run`) belongs to the list of its step.
        if is_step(final.name):
            contents = object_store.contents(final) or {}
            listed = {name: entry for name, entry in contents.items() if name not in _AFTER_LIST}
            (final / LIST).write_text(json.dumps(listed))
        await super().finalize()


def options(
    folder: epath.Path, keep: int | None = None, background: bool = False, committed: Callable[[], None] | None = None
) -> ocp.CheckpointManagerOptions:
    """Options for Orbax to write checkpoints into `folder` and keep the newest `keep` (None keeps all).

    The first process calls `committed()` for a complete checkpoint. Raises UserError if the folder is a file, or has
    an entry that Orbax would take for a step but cannot read as one, such as `²`.
    """
    with object_store.reading(folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f'{folder} is a file, and not the folder of the checkpoints; move it away')
        names = [child.name for child in (folder.iterdir() if folder.is_dir() else ())]
    for name in names:
        if name.isdigit() and not is_step(name):
            raise UserError(f'{folder} has an entry {name!a:.60}, which is not the step of a checkpoint; move it away')
    return ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=background,
        async_options=ocp.options.AsyncOptions(barrier_sync_fn=_barrier()),
        temporary_path_class=_reporting(ListedFolder if object_store.is_remote(folder) else DurableFolder, committed),
    )


def _barrier() -> Callable[..., None]:
    """Returns Orbax's barrier, which does not wait in a process whose part of a checkpoint could not be written.

    The other processes wait for that part, so all would block until Orbax's timeout of twenty minutes.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        if sys.exception() is None:
            return wait(key=key, timeout_ms=timeout_ms)
        with contextlib.suppress(Exception):
            wait(key=key, timeout_ms=1)

    return barrier


def _reporting(kind: Any, committed: Callable[[], None] | None) -> Any:
    """Orbax takes a class of folders, so what is called after one is complete is in the class."""
    if committed is None:
        return kind
    report: Callable[[], None] = committed

    class Reporting(kind):
        async def finalize(self) -> None:
            await super().finalize()
            if is_step(self.get_final().name):
                report()

    return Reporting


def is_step(name: str) -> bool:
    """Whether a folder of this name can be the checkpoint of a step: `20`, but neither `020` nor `²`."""
    return re.fullmatch('0|[1-9][0-9]{0,17}', name) is not None


def commit(written: pathlib.Path, final: pathlib.Path) -> None:
    """Lists and syncs everything in `written`, then renames it to `final`."""
    files = {}
    for path in sorted(filter(pathlib.Path.is_file, written.rglob('*'))):
        with path.open('rb') as file:
            digest = hashlib.file_digest(file, 'sha256').hexdigest()
        files[path.relative_to(written).as_posix()] = [path.stat().st_size, digest]
    (written / LIST).write_text(json.dumps(files))
    temporary.commit(written, final)
    # These folders, up to MODEL_DIR's own entry, may be new too.
    for folder in list(final.parents)[1:3]:
        temporary.sync(folder)


def check(folder: epath.Path) -> None:
    """Raises Damaged with the name of the first file that is missing, truncated, or changed.

    Reads every file on a disk once; of a bucket, it reads the sizes and checksums that the bucket reports. Raises
    UserError if the list names files outside of the folder.
    """
    listed = _read_list(folder)
    # Without credentials a public bucket can be read, but not be asked for checksums.
    reported = object_store.contents(folder) if object_store.is_remote(folder) else None
    for name, (size, digest) in sorted(listed.items()):
        if not object_store.is_remote(folder):
            reason = _difference(pathlib.Path(folder), name, size, digest)
        else:
            reason = _difference_in_bucket(reported, name, size, digest) if reported is not None else None
        if reason:
            raise Damaged(f'the checkpoint at {folder} is damaged: {name} {reason}')


def _read_list(folder: epath.Path) -> dict[str, tuple[int, str]]:
    try:
        listed = untrusted_files.parse(untrusted_files.read_bytes(folder / LIST))
        entries = listed.values() if isinstance(listed, dict) else [None]
        if not all(isinstance(entry, list) and [*map(type, entry)] == [int, str] for entry in entries):
            raise untrusted_files.NotJson('it is not a list of files')
    except (OSError, untrusted_files.NotJson) as error:
        is_missing = isinstance(error, FileNotFoundError)
        problem = 'is missing' if is_missing else f'cannot be read ({reason(error)})'
        raise Damaged(f'the checkpoint at {folder} is damaged: {LIST} {problem}') from error
    return listed


def _difference_in_bucket(contents: Mapping[str, Any], name: str, size: int, digest: str) -> str | None:
    if name not in contents:
        return 'is missing'
    size_now, digest_now = contents[name]
    if size_now != size:
        return f'has {size_now:,} bytes instead of {size:,}'
    # The list of a checkpoint that was copied from a disk has checksums of another kind.
    is_same_kind = digest.startswith(object_store.CRC32C)
    return 'differs from what was written' if is_same_kind and digest_now != digest else None


def _difference(folder: pathlib.Path, name: str, size: int, digest: str) -> str | None:
    path = safe_paths.inside(folder, name, str(folder / LIST))
    try:
        with untrusted_files.opened(path) as file:
            size_now = os.fstat(file.fileno()).st_size
            if size_now != size:
                return f'has {size_now:,} bytes instead of {size:,}'
            # The list of a checkpoint that was copied from a bucket has checksums of another kind.
            if digest.startswith(object_store.CRC32C):
                return None
            if hashlib.file_digest(file, 'sha256').hexdigest() != digest:
                return 'differs from what was written'
    except FileNotFoundError:
        return 'is missing'
    except OSError as error:
        return f'cannot be read ({error.strerror or error})'
    return None
