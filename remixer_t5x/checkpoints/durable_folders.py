"""Commits checkpoint folders durably, and verifies the checksums of their files.

On a local disk, a checkpoint is committed in this order: all files are written; `files.json` is written with the size
and SHA-256 of each file; all files and folders are synced; the folder is renamed to its step number; the parent folder
is synced. If a folder named after a step number exists after a power loss, all of its files are complete.

Buckets do not support atomic renames, so all objects are written directly to the final folder, without `files.json`.
Orbax's marker file, which is written last, commits the checkpoint.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from remixer_t5x import temporary_files, untrusted_files
from remixer_t5x.errors import UserError, root_cause_message
from remixer_t5x.run_folder import object_store

FILE_LIST = 'files.json'


class DamagedCheckpointError(UserError):
    """Raised if files of a checkpoint are missing or differ from the files that were written."""


class DurableFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """An Orbax temporary folder on a disk, which lists and syncs all files before a rename commits the folder."""

    async def finalize(self) -> None:
        final: epath.Path = self.get_final()
        if ocp.path.atomicity.TMP_DIR_SUFFIX in final.parent.name:
            # Do not commit an item of a checkpoint separately, because the checkpoint is committed as a whole.
            return await super().finalize()
        # `super().finalize` writes the last files and renames the folder. Use a second temporary name, so that
        # `commit_checkpoint` can sync all files first. The next start also removes folders with this name.
        written = final.parent / f'{self._tmp_path.name}.written'
        self._final_path = written
        try:
            await super().finalize()
        finally:
            self._final_path = final
        commit_checkpoint(pathlib.Path(written), pathlib.Path(final))


def build_manager_options(
    folder: epath.Path, keep: int | None = None, background: bool = False
) -> ocp.CheckpointManagerOptions:
    """Returns Orbax's options for `folder`, which keep the newest `keep` checkpoints (all if `keep` is None)."""
    is_remote = object_store.is_remote(folder)
    return ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=background,
        async_options=ocp.options.AsyncOptions(barrier_sync_fn=_build_barrier()),
        temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath if is_remote else DurableFolder,
    )


def _build_barrier() -> Callable[..., None]:
    """Returns a modified Orbax barrier, at which a process that failed to write its shards does not wait.

    Otherwise, all processes would block until Orbax's timeout of twenty minutes.
    """
    orbax_barrier = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        if sys.exception() is None:
            return orbax_barrier(key=key, timeout_ms=timeout_ms)
        with contextlib.suppress(Exception):
            orbax_barrier(key=key, timeout_ms=1)

    return barrier


def is_step_name(name: str) -> bool:
    """Returns whether a folder name is a step number. `20` is a step number; `020` and `²` are not."""
    return re.fullmatch('0|[1-9][0-9]{0,17}', name) is not None


def get_step(folder: epath.Path) -> int:
    """Returns the step of a checkpoint folder, or 0 if the folder was renamed."""
    return int(folder.name) if is_step_name(folder.name) else 0


def commit_checkpoint(written: pathlib.Path, final: pathlib.Path) -> None:
    """Writes FILE_LIST to the folder `written`, syncs all files, and renames the folder to `final`."""
    files = {}
    for path in sorted(filter(pathlib.Path.is_file, written.rglob('*'))):
        with path.open('rb') as file:
            digest = hashlib.file_digest(file, 'sha256').hexdigest()
        files[path.relative_to(written).as_posix()] = [path.stat().st_size, digest]
    (written / FILE_LIST).write_text(json.dumps(files))
    temporary_files.sync_and_rename(written, final)
    # Also sync the parent folders, because `checkpoints` and MODEL_DIR may be new.
    for folder in list(final.parents)[1:3]:
        temporary_files.sync_to_disk(folder)


def verify_file_checksums(folder: epath.Path) -> None:
    """Raises DamagedCheckpointError, which names the first missing, truncated or changed file of a local checkpoint.

    Raises UserError if FILE_LIST contains files outside of the folder.
    """
    for name, (size, digest) in sorted(_read_file_list(folder).items()):
        path = untrusted_files.resolve_path_inside(pathlib.Path(folder), name, str(folder / FILE_LIST))
        problem = ''
        try:
            with untrusted_files.open_file(path) as file:
                size_now = os.fstat(file.fileno()).st_size
                if size_now != size:
                    problem = f'has {size_now:,} bytes instead of {size:,}'
                elif hashlib.file_digest(file, 'sha256').hexdigest() != digest:
                    problem = 'does not match its checksum'
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            problem = 'is missing' if is_missing else f'cannot be read ({root_cause_message(error)})'
        if problem:
            raise DamagedCheckpointError(f'the checkpoint at {folder} is damaged: {name} {problem}')


def _read_file_list(folder: epath.Path) -> dict[str, list[Any]]:
    try:
        listed = untrusted_files.parse_json(untrusted_files.read_bytes(folder / FILE_LIST))
        entries = listed.items() if isinstance(listed, dict) else [('', None)]
        for name, entry in entries:
            if not (isinstance(entry, list) and [*map(type, entry)] == [int, str] and name.isprintable()):
                raise untrusted_files.InvalidJsonError('it is not a list of files')
    except (OSError, untrusted_files.InvalidJsonError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        problem = 'is missing' if is_missing else f'cannot be read ({root_cause_message(error)})'
        raise DamagedCheckpointError(f'the checkpoint at {folder} is damaged: {FILE_LIST} {problem}') from error
    return listed
