"""Folders and names that came from somebody else: nothing in them may point out of the folder that the user named.

The folder itself may be reached through links, as the user chose it. `check_inside` looks at names and kinds of entries
alone and opens no file, so a checkpoint of thousands of files takes milliseconds; folders far away have no links.
"""

import os
import pathlib
import stat
from collections.abc import Iterator

from remixer_t5x.errors import UserError

_COPY = 'make a copy that holds the files themselves (cp -rL), if you trust them'


def check_inside(folder: str | os.PathLike[str]) -> None:
    """Raises UserError where anything below `folder` is a link to a place outside of it, or a pipe, socket or device.

    A link of Hugging Face's cache, from snapshots/<revision> into blobs beside it, is inside.
    """
    root = os.fspath(folder)
    if '://' in root or not os.path.isdir(root):
        return
    roots = allowed_roots(root)
    for entry in _entries(root):
        if entry.is_symlink():
            check_link(entry.path, roots, root)
        elif not entry.is_file(follow_symlinks=False):
            raise UserError(f'{_shown(entry.path)} is a pipe, socket or device; a folder to read holds files alone')


def inside(folder: str | os.PathLike[str], name: object, said_by: str) -> pathlib.Path:
    """The path of what a file calls `name` within `folder`.

    Args:
        folder: on this machine.
        name: as an index or a specification has it, not to be trusted.
        said_by: where the name stands, for errors.

    Raises:
        UserError: it is no text, absolute, has '..' or a character that no name has, or is a link that leaves `folder`.
    """
    root = os.fspath(folder)
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise UserError(f'{said_by} names the file {_cut(name)}; allowed are names of files in {root}')
    parts = name.replace('\\', '/').split('/')
    if '..' in parts or not parts[0] or ':' in parts[0]:
        raise UserError(f'{said_by} names the file {_cut(name)}, which is outside of {root}; allowed are files in it')
    path = os.path.join(root, name)
    check_link(path, allowed_roots(root), root)
    return pathlib.Path(path)


def allowed_roots(folder: str) -> tuple[str, ...]:
    """Real folders that entries of `folder` may lead to: itself, and in Hugging Face's cache the files it shares."""
    real = os.path.realpath(folder)
    blobs = os.path.join(os.path.dirname(os.path.dirname(real)), 'blobs')
    is_cache = os.path.basename(os.path.dirname(real)) == 'snapshots' and os.path.isdir(blobs)
    return (real, os.path.realpath(blobs)) if is_cache and not os.path.islink(blobs) else (real,)


def check_link(path: str, roots: tuple[str, ...], folder: str) -> None:
    """Raises UserError unless `path` really lies in one of `roots`, and is no pipe, socket or device."""
    target = os.path.realpath(path)
    if not any(target == root or target.startswith(root.rstrip('/') + '/') for root in roots):
        raise UserError(f'{_shown(path)} is a link that leaves {folder}, to {_shown(target)}; {_COPY}')
    try:
        mode = os.stat(target).st_mode
    except OSError:
        # What is not there is told by who wants to read it.
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f'{_shown(path)} is a pipe, socket or device; a folder to read holds files alone')


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Everything below `folder` but folders, without following links."""
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
            raise UserError(f'{_shown(place)} cannot be read ({error.strerror}); check the rights there') from error


def _shown(path: str) -> str:
    """On one line, whatever the name has in it."""
    return path if path.isprintable() else ascii(path)


def _cut(name: object) -> str:
    text = ascii(name)
    return text if len(text) <= 100 else f'{text[:100]}...'
