"""Checks that untrusted folders and names do not lead out of the folder that the user named.

The folder itself may be a link, because the user chose it. `check_inside` reads only names and kinds of entries and
opens no files, so a checkpoint of thousands of files takes milliseconds. Buckets have no links.
"""

import os
import pathlib
import stat
from collections.abc import Iterator

from remixer_t5x.errors import UserError

_COPY = 'make a copy that contains the files themselves (cp -rL), if you trust them'


def check_inside(folder: str | os.PathLike[str]) -> None:
    """Raises UserError if anything in `folder` is a link to a place outside of it, or a pipe, socket or device.

    In Hugging Face's cache, a link from snapshots/<revision> into the blobs folder next to it counts as inside.
    """
    root = os.fspath(folder)
    if '://' in root or not os.path.isdir(root):
        return
    roots = allowed_roots(root)
    for entry in _entries(root):
        if entry.is_symlink():
            check_link(entry.path, roots, root)
        elif not entry.is_file(follow_symlinks=False):
            raise UserError(
                f'{_on_one_line(entry.path)} is a pipe, socket or device; a folder to read may contain only files'
            )


def inside(folder: str | os.PathLike[str], name: object, source: str) -> pathlib.Path:
    """The path of the file that an index calls `name`, in `folder`.

    Args:
        folder: on this machine.
        name: as written in an index or a specification; not trusted.
        source: the file that contains the name, for errors.

    Raises:
        UserError: `name` is not text, is absolute, has '..' or a forbidden character, or is a link that leaves
            `folder`.
    """
    root = os.fspath(folder)
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise UserError(f'{source} names the file {_shorten(name)}; allowed are names of files in {root}')
    parts = name.replace('\\', '/').split('/')
    if '..' in parts or not parts[0] or ':' in parts[0]:
        raise UserError(
            f'{source} names the file {_shorten(name)}, which is outside of {root}; allowed are files in it'
        )
    path = os.path.join(root, name)
    check_link(path, allowed_roots(root), root)
    return pathlib.Path(path)


def allowed_roots(folder: str) -> tuple[str, ...]:
    """Real folders that entries of `folder` may lead to: the folder itself, and the shared files of Hugging Face's
    cache.
    """
    real = os.path.realpath(folder)
    blobs = os.path.join(os.path.dirname(os.path.dirname(real)), 'blobs')
    is_cache = os.path.basename(os.path.dirname(real)) == 'snapshots' and os.path.isdir(blobs)
    return (real, os.path.realpath(blobs)) if is_cache and not os.path.islink(blobs) else (real,)


def check_link(path: str, roots: tuple[str, ...], folder: str) -> None:
    """Raises UserError unless the real `path` is in one of `roots`, and is not a pipe, socket or device."""
    target = os.path.realpath(path)
    if not any(target == root or target.startswith(root.rstrip('/') + '/') for root in roots):
        raise UserError(f'{_on_one_line(path)} is a link that leaves {folder}, to {_on_one_line(target)}; {_COPY}')
    try:
        mode = os.stat(target).st_mode
    except OSError:
        # The code that reads the file reports a missing file.
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f'{_on_one_line(path)} is a pipe, socket or device; a folder to read may contain only files')


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Every entry below `folder` except folders, without following links."""
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        yield entry
        except OSError as error:
            raise UserError(
                f'{_on_one_line(place)} cannot be read ({error.strerror}); check the rights there'
            ) from error


def _on_one_line(path: str) -> str:
    """The path on one line, even if the name has control characters."""
    return path if path.isprintable() else ascii(path)


def _shorten(name: object) -> str:
    text = ascii(name)
    return text if len(text) <= 100 else f'{text[:100]}...'
