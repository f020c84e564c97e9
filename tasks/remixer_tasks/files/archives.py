"""Unpacking a zip archive so that nothing in it lands outside of its folder, and that it ends.

Names are looked at before anything is written. No data set of ours is published as a tar archive, so none is read.
"""

import lzma
import os
import stat
import zipfile
import zlib
from pathlib import Path

from remixer_t5x.errors import UserError

# Texts are published at 3 to 10 times the size of their archive; deflate reaches 1,032 times for zeros.
MAX_RATIO = 200
MAX_BYTES = 50 * 10**9
MAX_FILES = 100_000
_CHUNK = 1 << 20
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError)


def unpack(archive: Path, folder: Path) -> None:
    """Writes the files of the zip `archive` below `folder`, without what an operating system left in it.

    Raises UserError, having written nothing outside of `folder`, for an archive that is damaged or encrypted, has a
    name that leaves the folder, a link or a device, or unpacks to much more than it could hold of text.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
            for member in members:
                _check_name(archive, member)
            _check_sizes(archive, members)
            for member in members:
                if not (member.is_dir() or _is_left_over(member.filename)):
                    _extract(opened, member, folder / member.filename)
    except UserError:
        raise
    except (*_DAMAGED, NotImplementedError, RuntimeError, ValueError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f'{archive.name} cannot be unpacked ({ascii(str(error))[:150]}); get it again') from error


def _is_left_over(name: str) -> bool:
    parts = name.split('/')
    return parts[0] == '__MACOSX' or parts[-1].startswith('.') or not parts[-1].isprintable()


def _check_name(archive: Path, member: zipfile.ZipInfo) -> None:
    name = member.filename
    parts = name.replace('\\', '/').split('/')
    if not name or not parts[0] or '..' in parts or ':' in parts[0]:
        raise UserError(f'{archive.name} has a file {ascii(name)[:100]}, outside of its folder; it is not unpacked')
    # The upper half has what Unix says of the file, if the archive was made there.
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise UserError(f'{archive.name} has a link or device {ascii(name)[:100]}; it is not unpacked')


def _check_sizes(archive: Path, members: list[zipfile.ZipInfo]) -> None:
    """By what the archive declares, which bounds what is written: of a member no more is read."""
    total, packed = sum(member.file_size for member in members), os.path.getsize(archive)
    if len(members) > MAX_FILES:
        raise UserError(f'{archive.name} has {len(members):,} files, allowed are {MAX_FILES:,}; it is not unpacked')
    if total > MAX_BYTES or total > max(MAX_RATIO * packed, _CHUNK):
        raise UserError(f'{archive.name} unpacks from {packed:,} to {total:,} bytes; it is not unpacked')


def _extract(opened: zipfile.ZipFile, member: zipfile.ZipInfo, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    left = member.file_size
    with opened.open(member) as packed, open(place, 'xb') as out:
        while chunk := packed.read(_CHUNK):
            left -= len(chunk)
            if left < 0:
                raise zipfile.BadZipFile(f'{member.filename} is larger than declared')
            out.write(chunk)
