"""Checks that links and file names in an untrusted folder do not lead outside of the folder.

The folder itself may be a link, because the user chose it. `check_links_inside` takes milliseconds for thousands of
files, because it lists folders without opening files. Buckets have no links.
"""

import os
import pathlib
import stat

from remixer_t5x.errors import UserError, one_line


def check_links_inside(folder: str | os.PathLike[str]) -> None:
    """Raises UserError if `folder` contains a link to a path outside of the folder, or a pipe, socket or device.

    In Hugging Face's cache, links from snapshots/<revision> into the neighboring blobs folder are allowed.
    """
    root = os.fspath(folder)
    if '://' in root or not os.path.isdir(root):
        return
    roots = _allowed_roots(root)
    waiting = [root]
    while waiting:
        try:
            with os.scandir(current := waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif not entry.is_file(follow_symlinks=False):
                        _check_link_target(entry.path, roots, root)
        except OSError as error:
            raise UserError(f'{one_line(current)} cannot be read ({error.strerror}); check its permissions') from error


def resolve_inside(folder: str | os.PathLike[str], name: object, source: str) -> pathlib.Path:
    """Returns the path of a file in `folder` whose `name` comes from an untrusted file.

    Raises UserError if `name` is not a string, is absolute, contains '..' or a forbidden character, or is a link to a
    path outside of `folder`. The error message names the untrusted file, `source`.
    """
    root = os.fspath(folder)
    parts = name.replace('\\', '/').split('/') if isinstance(name, str) and name.isprintable() else []
    if not parts or not str(name).strip() or '..' in parts or not parts[0] or ':' in parts[0]:
        raise UserError(
            f'{source} names the file {name!a:.100}, which is invalid or outside of {root}; correct the name'
        )
    path = os.path.join(root, str(name))
    _check_link_target(path, _allowed_roots(root), root)
    return pathlib.Path(path)


def _allowed_roots(folder: str) -> tuple[str, ...]:
    """Returns the folders into which links may point: `folder`, and the blobs folder of Hugging Face's cache."""
    real = os.path.realpath(folder)
    blobs = os.path.join(os.path.dirname(os.path.dirname(real)), 'blobs')
    is_cache = os.path.basename(os.path.dirname(real)) == 'snapshots' and os.path.isdir(blobs)
    return (real, blobs) if is_cache and not os.path.islink(blobs) else (real,)


def _check_link_target(path: str, roots: tuple[str, ...], folder: str) -> None:
    target = os.path.realpath(path)
    if not any(target == root or target.startswith(root.rstrip('/') + '/') for root in roots):
        raise UserError(
            f'{one_line(path)} is a link to {one_line(target)}, which is outside of {folder}; if you trust it, copy '
            'the folder with the linked files (cp -rL)'
        )
    # Ignore missing files, which are reported when they are read.
    if os.path.exists(target) and not stat.S_ISREG(mode := os.stat(target).st_mode) and not stat.S_ISDIR(mode):
        raise UserError(f'{one_line(path)} is a pipe, socket or device, not a file; remove it')
