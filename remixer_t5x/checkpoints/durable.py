"""Checkpoint folders that survive a power loss, and whose files are compared with checksums before they are read.

On a local disk the order is: all files are written; `files.json` lists each with its size and SHA-256; every file and
folder is synced; the folder is renamed to its step's number, which makes it a checkpoint; the folder above is synced.
If the name exists after a power loss, all its bytes do. Object stores (`gs://`) keep checksums themselves, have no
rename, and are left to Orbax's own marker.
"""

import contextlib
import hashlib
import json
import os
import pathlib

import orbax.checkpoint as ocp
from etils import epath

from remixer_t5x.checkpoints import safe_paths
from remixer_t5x.errors import UserError

LIST = 'files.json'


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


def options(folder: epath.Path, keep: int | None = None, background: bool = False) -> ocp.CheckpointManagerOptions:
    """Options for Orbax to write checkpoints into `folder` and keep the newest `keep` (None keeps all)."""
    return ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=background,
        temporary_path_class=None if '://' in str(folder) else DurableFolder,
    )


def commit(written: pathlib.Path, final: pathlib.Path) -> None:
    """Lists and syncs everything in `written`, then renames it to `final`."""
    files = {}
    for path in _files(written):
        with path.open('rb') as file:
            digest = hashlib.file_digest(file, 'sha256').hexdigest()
            os.fsync(file.fileno())
            files[path.relative_to(written).as_posix()] = [os.fstat(file.fileno()).st_size, digest]
    with (written / LIST).open('w') as file:
        json.dump(files, file)
        file.flush()
        os.fsync(file.fileno())
    for below, _, _ in os.walk(written, topdown=False):
        _sync_folder(below)
    os.rename(written, final)
    # The folders above, up to MODEL_DIR's own entry, may be new too.
    for folder in list(final.parents)[:3]:
        _sync_folder(folder)


def check(folder: epath.Path) -> None:
    """Raises Damaged with the name of the first file that is missing, truncated, or changed.

    Reads every file once, but does not check a folder on an object store. Raises UserError if the list names files
    outside of the folder.
    """
    if '://' in str(folder):
        return
    path = pathlib.Path(folder)
    try:
        listed = json.loads((path / LIST).read_text())
        if not (isinstance(listed, dict) and all(len(entry) == 2 for entry in listed.values())):
            raise ValueError('it is not a list of files')
    except (OSError, ValueError, TypeError) as error:
        reason = 'is missing' if isinstance(error, FileNotFoundError) else f'cannot be read ({error})'
        raise Damaged(f'the checkpoint at {folder} is damaged: {LIST} {reason}') from error
    for name, (size, digest) in sorted(listed.items()):
        found = _difference(safe_paths.inside(path, name, str(path / LIST)), size, digest)
        if found:
            raise Damaged(f'the checkpoint at {folder} is damaged: {name} {found}')


def _difference(path: pathlib.Path, size: int, digest: str) -> str | None:
    try:
        with path.open('rb') as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                return f'has {found:,} bytes instead of {size:,}'
            if hashlib.file_digest(file, 'sha256').hexdigest() != digest:
                return 'differs from what was written'
    except FileNotFoundError:
        return 'is missing'
    except OSError as error:
        return f'cannot be read ({error.strerror or error})'
    return None


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob('*') if path.is_file())


def _sync_folder(path: str | pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems cannot sync folders.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
