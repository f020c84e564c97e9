"""Checkpoint folders that survive a power loss, and whose files are known to be as they were written.

On a local disk the order is: all files are written; `files.json` lists each with its size and SHA-256; every file and
folder is synced; the folder is renamed to its step's number, which is what makes it a checkpoint; the folder above is
synced. A name that is there after a power loss therefore has all its bytes. Object stores (`gs://`) keep checksums
themselves, have no rename, and are left to Orbax's own marker.
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
    """A checkpoint is not as it was written."""


class DurableFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder, synced before and after the rename that commits it."""

    async def finalize(self) -> None:
        final: epath.Path = self.get_final()
        if ocp.path.atomicity.TMP_DIR_SUFFIX in final.parent.name:
            # An item of a checkpoint whose own folder is still temporary, which is committed as a whole.
            return await super().finalize()
        # Orbax writes its last files and renames in one call: what it takes for the end is another temporary name,
        # which a start removes like the first.
        written = final.parent / f'{self._tmp_path.name}.written'
        self._final_path = written
        try:
            await super().finalize()
        finally:
            self._final_path = final
        commit(pathlib.Path(written), pathlib.Path(final))


def options(folder: epath.Path, keep: int | None = None, background: bool = False) -> ocp.CheckpointManagerOptions:
    """How Orbax is to write checkpoints into `folder`: the newest `keep` (None: all) stay."""
    return ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=background,
        temporary_path_class=None if '://' in str(folder) else DurableFolder,
    )


def commit(written: pathlib.Path, final: pathlib.Path) -> None:
    """Renames `written` to `final` once all it holds is listed and on the disk."""
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
    # Those above, up to MODEL_DIR's own entry, may be as new.
    for folder in list(final.parents)[:3]:
        _sync_folder(folder)


def check(folder: epath.Path) -> None:
    """Raises Damaged naming the first file of the checkpoint that is missing, cut, or has other bytes.

    Reads every file once. A folder on an object store is not looked at. Raises UserError for a list that names files
    outside of the folder.
    """
    if '://' in str(folder):
        return
    path = pathlib.Path(folder)
    try:
        listed = json.loads((path / LIST).read_text())
        if not (isinstance(listed, dict) and all(len(entry) == 2 for entry in listed.values())):
            raise ValueError('it is no list of files')
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
                return 'has other bytes than were written'
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
        # Some network file systems sync no folders.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
