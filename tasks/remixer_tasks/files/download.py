"""Fetches published files, from their URL or a folder, into the folder that `sources` searches last.

A file is moved into place after its SHA-256 was verified, and never replaces another. A zip archive is extracted after
its checksum was verified, and safely: no path traversal, bounded output.
"""

import contextlib
import difflib
import hashlib
import http.client
import lzma
import os
import shutil
import stat
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from remixer_t5x import temporary
from remixer_t5x.errors import UserError
from remixer_tasks import catalogue
from remixer_tasks.benchmarks import sources
from remixer_tasks.benchmarks.dataset import Dataset, Download
from remixer_tasks.files.notice import Notice

_CHUNK = 1 << 20
# Without a byte from the server.
_TIMEOUT_SECONDS = 30
# Bytes of one file; the largest in the table has 0.4 GB.
_LARGEST = 20 * 10**9
# Texts are published at 3 to 10 times the size of their archive; deflate reaches 1,032 times for zeros.
MAX_RATIO = 200
MAX_BYTES = 50 * 10**9
MAX_FILES = 100_000


def get(name: str, source: str | None = None, data_dir: str | None = None) -> list[str]:
    """Fetches the files of a task or data set into `catalogue.download_folder(data_dir)`.

    Args:
        name: a task, as in 'cogs_v001', or a data set, as in 'super_glue/CB'.
        source: a folder that contains the published files; None downloads them.

    Returns:
        Lines to show: what was done, the terms, and where each split is.

    Raises:
        UserError: an unknown name; a data set without known files; a file that cannot be fetched or written, or that is
            not the published file.
    """
    dataset = find(name)
    folder = Path(catalogue.download_folder(data_dir))
    if source is None and all(_origins(dataset, data_dir).values()):
        lines = _describe(dataset, _origins(dataset, data_dir))
        return [f'{dataset.name} is here already, nothing was downloaded', *lines, *_unchecked(dataset, data_dir)]
    if not dataset.downloads:
        raise UserError(_by_hand(dataset, folder))
    new = sum(_fetch_one(dataset, download, folder, source, name) for download in dataset.downloads)
    done = f'is now in {folder}, SHA-256 as published' if new else f'is in {folder} already, nothing was copied'
    got = _origins(dataset, str(folder))
    lines = [f'{dataset.name} {done}', *_describe(dataset, got)]
    first = _origins(dataset, data_dir)
    elsewhere = [str(first[split]) for split in first if first[split] != got[split]]
    if elsewhere:
        lines.append(f'tasks still read {", ".join(elsewhere)}, which is searched first')
    return lines


def find(name: str) -> Dataset:
    """The data set with this name, or of the task with this name. Raises UserError with the nearest known names."""
    named = {**catalogue.DATASETS, **{task.name: task.dataset for task in catalogue.TASKS.values()}}
    if name not in named:
        near = difflib.get_close_matches(str(name), named, n=3, cutoff=0.4)
        advice = f'the nearest names are {", ".join(near)}' if near else 'type remixer-t5x data list for all names'
        raise UserError(f'{name!r} is not the name of a task or data set; {advice}')
    return named[name]


def _origins(dataset: Dataset, data_dir: str | None) -> dict[str, str | None]:
    source = sources.LabelledSource(dataset, tuple(dataset.splits), data_dir)
    return {split: source.origin(split) for split in source.splits}


def _describe(dataset: Dataset, origins: dict[str, str | None]) -> list[str]:
    width = max(len(word) for word in (*origins, 'terms')) + 2
    lines = [f'{split:<{width}}{origin or "not among the files of this data set"}' for split, origin in origins.items()]
    return [*lines, f'{"terms":<{width}}{dataset.terms}']


def _unchecked(dataset: Dataset, data_dir: str | None) -> list[str]:
    """Describes each local file that differs from the published file, or whose SHA-256 is unknown."""
    checksums = {_file_name(download): download.sha256 for download in dataset.downloads if not download.unzip}
    raws = [sources.find_raw(dataset, split, data_dir) for split in dataset.splits]
    lines = []
    for path in sorted({path for raw in raws if raw for path in raw[1]}):
        published = checksums.get(os.path.basename(path))
        if published is None:
            lines.append(f'unchecked  {path}: no SHA-256 of this file is known here')
        elif (actual := _sha256(Path(path))) != published:
            lines.append(f'other      {path} has SHA-256 {actual}, and the published file {published}')
    return lines


def _by_hand(dataset: Dataset, folder: Path) -> str:
    files = ', '.join(' + '.join(layouts[0].paths) for layouts in dataset.splits.values() if layouts)
    parts = [f'put {files} into {folder}'] if files else []
    if dataset.tfds:
        parts.append(f'prepare TFDS data set {dataset.tfds}')
    return (
        f'no download of {dataset.name} with a known SHA-256 is known here: {", or ".join(parts)} ({dataset.terms}); '
        'what you put there is not checked'
    )


def _fetch_one(dataset: Dataset, download: Download, folder: Path, source: str | None, name: str) -> bool:
    """Fetches one file unless it is here; whether it was fetched."""
    if _is_there(dataset, download, folder):
        return False
    with _temporary_folder(folder) as temporary:
        file = temporary / _file_name(download)
        if source is None:
            origin = download.url
            _download(download, file, name)
        else:
            origin = str(_find_copy(dataset, download, Path(source).expanduser()))
            shutil.copyfile(origin, file)
        if (actual := _sha256(file)) != download.sha256:
            raise UserError(
                f'{origin} must have SHA-256 {download.sha256}, got {actual}: it is damaged or another version; get it '
                f'from {download.url} again'
            )
        target = folder / download.folder
        if not download.unzip:
            _place(file, target / file.name)
            return True
        unpacked = temporary / 'unpacked'
        unpack(file, unpacked)
        for path in sorted(path for path in unpacked.rglob('*') if path.is_file()):
            _place(path, target / path.relative_to(unpacked))
    return True


def _file_name(download: Download) -> str:
    return os.path.basename(urllib.parse.urlparse(download.url).path)


def _is_there(dataset: Dataset, download: Download, folder: Path) -> bool:
    """Whether the file is here. Raises UserError for another file in its place."""
    if download.unzip:
        return all(sources.find_raw(dataset, split, str(folder)) for split, files in dataset.splits.items() if files)
    place = folder / download.folder / _file_name(download)
    if not place.is_file():
        return False
    if _sha256(place) != download.sha256:
        raise _occupied(place)
    return True


def _occupied(place: Path) -> UserError:
    return UserError(f'{place} is there, but is not the published file; move it away and type the command again')


def _download(download: Download, file: Path, name: str) -> None:
    request = urllib.request.Request(download.url, headers={'User-Agent': 'remixer-t5x'})
    offline = (
        f'with a copy of the file in a folder DIR, type remixer-t5x data get {name} --from DIR '
        f'(the file is {_file_name(download)}, SHA-256 {download.sha256})'
    )
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        raise UserError(f'{download.url}: the server says {error.code} {error.reason}; {offline}') from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, 'reason', None) or error
        reason = getattr(reason, 'strerror', None) or reason
        raise UserError(f'{download.url} cannot be reached ({reason}); {offline}') from error
    with response:
        length = int(response.headers.get('Content-Length') or 0)
        _write(response, length, file, download.url)
    if length and file.stat().st_size != length:
        raise UserError(
            f'{download.url}: the connection ended after {_size(file.stat().st_size)} of {_size(length)}; '
            'type the command again'
        )


def _write(response: http.client.HTTPResponse, length: int, file: Path, url: str) -> None:
    notice = Notice(f'downloading {file.name}')
    total = f' of {_size(length)}' if length else ''
    result = 'stopped'
    try:
        with open(file, 'wb') as out:
            while True:
                try:
                    chunk = response.read(_CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise UserError(f'{url}: the connection broke ({error}); type the command again') from error
                if not chunk:
                    break
                out.write(chunk)
                if out.tell() > _LARGEST:
                    raise UserError(f'{file.name} has more than {_size(_LARGEST)}, so it is not the published file')
                notice.update(lambda: f'{_size(out.tell())}{total}')
            result = _size(out.tell())
    finally:
        notice.done(result)


def _find_copy(dataset: Dataset, download: Download, source: Path) -> Path:
    """The file in `source` or its folder of the data set. Raises UserError if it is missing."""
    name = _file_name(download)
    if not source.is_dir():
        raise UserError(f'--from {source} is not a folder; give the folder with {name}')
    for place in (source / download.folder / name, source / name):
        if place.is_file():
            if not os.access(place, os.R_OK):
                raise UserError(f'--from {source}: {place} cannot be read; check the rights there')
            return place
    advice = f'get it from {download.url}'
    if any(sources.find_raw(dataset, split, str(source)) for split in dataset.splits):
        advice += f', or use the unpacked files that are there with REMIXER_T5X_DATA={source}'
    raise UserError(f'--from {source}: {name} is not there; {advice}')


def _size(count: int) -> str:
    return f'{count / 1e6:.1f} MB'


def _sha256(path: Path) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _place(file: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        temporary.commit(file, place)
    elif not place.is_file() or _sha256(place) != _sha256(file):
        raise _occupied(place)


@contextlib.contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder in `folder`. Raises UserError if the disk cannot be written."""
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix='.get-', dir=folder))
        yield temporary
    except OSError as error:
        raise UserError(
            f'cannot write to {folder} ({error.strerror or error}): set REMIXER_T5X_CACHE, or DATA_DIR if it '
            'is set, to a folder with space that you may write to'
        ) from error
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, ValueError),
    *(FileExistsError, NotADirectoryError),
)


def unpack(archive: Path, folder: Path) -> None:
    """Extracts the zip `archive` into `folder`, without the operating system's hidden files.

    Raises UserError, having written nothing outside of `folder`, for an archive that is damaged or encrypted, has a
    path outside of the folder, a link or a device, or expands far beyond the size of text.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
            for member in members:
                _check_name(archive, member)
            _check_sizes(archive, members)
            for member in members:
                if not (member.is_dir() or _is_hidden(member.filename)):
                    _extract(opened, member, folder / member.filename)
    except UserError:
        raise
    except _UNREADABLE as error:
        raise UserError(f'{archive.name} cannot be unpacked ({ascii(str(error))[:150]}); get it again') from error


def _is_hidden(name: str) -> bool:
    parts = name.split('/')
    return parts[0] == '__MACOSX' or parts[-1].startswith('.') or not parts[-1].isprintable()


def _check_name(archive: Path, member: zipfile.ZipInfo) -> None:
    name = member.filename
    parts = name.replace('\\', '/').split('/')
    if not name or not parts[0] or '..' in parts or ':' in parts[0]:
        raise UserError(f'{archive.name} has a file {ascii(name)[:100]}, outside of its folder; it is not unpacked')
    # The upper half has the mode of the file, if the archive was made on Unix.
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise UserError(f'{archive.name} has a link or device {ascii(name)[:100]}; it is not unpacked')


def _check_sizes(archive: Path, members: list[zipfile.ZipInfo]) -> None:
    """Checks the declared sizes, which `_extract` enforces."""
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
