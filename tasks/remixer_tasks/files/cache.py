"""Where derived files are kept (parsed corpora, trained vocabularies), and how they get there in one piece.

An entry's name is a hash of everything its content depends on, so an entry is never changed, only added: a run that is
killed half way leaves a temporary name that no reader looks at and the next run removes, and two runs that make the
same entry at the same time end with one of the two, which are equal.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from remixer_t5x import temporary, untrusted_files
from remixer_t5x.errors import UserError, reason

# Names and sizes of an entry's files.
SEAL = 'files.json'
# Ends the names of folders that a later process continues, for a week.
_KEPT = '.unfinished'
_KEPT_SECONDS = 7 * 24 * 3600.0


def root() -> Path:
    """The cache folder: $REMIXER_T5X_CACHE, or ~/.cache/remixer_t5x."""
    return Path(os.environ.get('REMIXER_T5X_CACHE') or '~/.cache/remixer_t5x').expanduser()


def key(*parts: Any) -> str:
    """A name for what `parts` (JSON values) determine: 32 hexadecimal digits of a SHA-256."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def adding(entry: Path) -> Iterator[Path]:
    """Yields a temporary path; what was made there (a file or a folder) becomes `entry` when the block ends well.

    Raises UserError when the cache folder cannot be written or its disk is full.
    """
    with writing():
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary.remove_abandoned(entry.parent, _KEPT, _KEPT_SECONDS)
        with temporary.entry(entry.parent, f'{entry.name}.') as path:
            yield path
            _move(path, entry)


@contextlib.contextmanager
def continuing(entry: Path, wait: Callable[[], object]) -> Iterator[Path | None]:
    """As `adding`, for a folder whose content is kept if the block does not end well: the next process continues it.

    One process at a time has the folder; `wait` is called before this one waits for another. Yields None if `entry` is
    there after that. What nobody has continued for a week is removed. Where the cache folder has no locks, the content
    is not kept.

    Raises UserError when the cache folder cannot be written or its disk is full.
    """
    with writing():
        entry.parent.mkdir(parents=True, exist_ok=True)
        path = entry.with_name(entry.name + _KEPT)
        with temporary.kept(path, wait) as is_alone:
            if is_alone:
                temporary.remove_abandoned(entry.parent, _KEPT, _KEPT_SECONDS)
                yield None if entry.exists() else path
                if not entry.exists():
                    _move(path, entry)
                return
    with adding(entry) as path:
        path.mkdir()
        yield path


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Raises UserError for an OSError that says that the cache folder cannot be written or its disk is full."""
    try:
        yield
    except OSError as error:
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if error.errno in (*full, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise UserError(
                f'cannot write to the cache {root()} ({os.strerror(error.errno)}): set '
                'REMIXER_T5X_CACHE to a folder with space that you may write to'
            ) from error
        raise


def seal(folder: Path) -> None:
    """Notes the files of `folder` and their sizes in it, for `check`."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != SEAL}
    (folder / SEAL).write_text(json.dumps(sizes))


def check(folder: Path) -> None:
    """Raises UserError where a file that was there when `folder` was sealed is gone, or has another size.

    One that was made before there were seals is taken as it is.
    """
    try:
        sizes = untrusted_files.parse(untrusted_files.read_bytes(folder / SEAL))
        for name, size in sizes.items():
            if (folder / name).stat().st_size != size:
                raise UserError(f'{folder / name} was cut off or changed; {repair(folder)}')
    except FileNotFoundError as error:
        if not str(error.filename).endswith(SEAL):
            raise UserError(f'{error.filename} is gone; {repair(folder)}') from error
    except UserError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        # Names of files may be anything here, also too long for the disk.
        raise UserError(f'{folder / SEAL} cannot be read ({reason(error)}); {repair(folder)}') from error


def repair(folder: Path) -> str:
    """What to do about a damaged entry."""
    return f'delete the folder {folder}, and it is made again'


def _move(made: Path, entry: Path) -> None:
    try:
        temporary.commit(made, entry)
    except OSError:
        # A folder does not replace a non-empty folder: another run was first, with the same content.
        if not entry.is_dir():
            raise
