"""Getting published files: from their address or from a folder, checked by SHA-256, put where `sources` looks last.

A file appears at its place in one piece and only with the right checksum, and one that is there is never replaced.
Archives are unpacked after their checksum was found right, by `archives`.
"""

import contextlib
import difflib
import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from remixer_t5x import temporary
from remixer_t5x.errors import UserError
from remixer_tasks import catalogue
from remixer_tasks.benchmarks.sources import sources
from remixer_tasks.benchmarks.sources.dataset import Dataset, Download
from remixer_tasks.files import archives
from remixer_tasks.files.notice import Notice

_CHUNK = 1 << 20
# Of silence, in connecting and in between.
_TIMEOUT_SECONDS = 30
_MB = 1e6
# Of one file, where the server does not say its size: the largest in the table has 0.4 GB.
_LARGEST = 20 * 10**9


def get(name: str, source: str | None = None, data_dir: str | None = None) -> list[str]:
    """Puts the files of a task or data set below `catalogue.download_folder(data_dir)`.

    Args:
        name: a task, as in 'cogs_v001', or a data set, as in 'super_glue/CB'.
        source: a folder that holds the published files, None downloads them.

    Returns:
        Lines to show: what was done, its terms, and where each split is.

    Raises:
        UserError: an unknown name; a data set without known files; a file that cannot be had or written, or that is
            not the published one.
    """
    dataset = find(name)
    folder = Path(catalogue.download_folder(data_dir))
    if source is None and all(_origins(dataset, data_dir).values()):
        lines = _said(dataset, _origins(dataset, data_dir))
        return [f'{dataset.name} is here already, nothing was downloaded', *lines, *_unchecked(dataset, data_dir)]
    if not dataset.downloads:
        raise UserError(_by_hand(dataset, folder))
    new = sum(_get_one(dataset, download, folder, source, name) for download in dataset.downloads)
    done = f'is now in {folder}, SHA-256 as published' if new else f'is in {folder} already, nothing was copied'
    got = _origins(dataset, str(folder))
    lines = [f'{dataset.name} {done}', *_said(dataset, got)]
    first = _origins(dataset, data_dir)
    elsewhere = [str(first[split]) for split in first if first[split] != got[split]]
    if elsewhere:
        lines.append(f'tasks still read {", ".join(elsewhere)}, which is searched first')
    return lines


def find(name: str) -> Dataset:
    """The data set of that name, or of the task of that name. Raises UserError with the nearest known names."""
    named = {**catalogue.DATASETS, **{task.name: task.dataset for task in catalogue.TASKS.values()}}
    if name not in named:
        near = difflib.get_close_matches(str(name), named, n=3, cutoff=0.4)
        advice = f'the nearest names are {", ".join(near)}' if near else 'type remixer-t5x data list for all names'
        raise UserError(f'{name!r} is not the name of a task or data set; {advice}')
    return named[name]


def _origins(dataset: Dataset, data_dir: str | None) -> dict[str, str | None]:
    source = sources.LabelledSource(dataset, tuple(dataset.splits), data_dir)
    return {split: source.origin(split) for split in source.splits}


def _said(dataset: Dataset, origins: dict[str, str | None]) -> list[str]:
    width = max(len(word) for word in (*origins, 'terms')) + 2
    lines = [f'{split:<{width}}{origin or "not among the files of this data set"}' for split, origin in origins.items()]
    return [*lines, f'{"terms":<{width}}{dataset.terms}']


def _unchecked(dataset: Dataset, data_dir: str | None) -> list[str]:
    """A line for each file that was found here and is not, or not known to be, the published one."""
    checksums = {_file_name(download): download.sha256 for download in dataset.downloads if not download.unzip}
    found = [sources.find_raw(dataset, split, data_dir) for split in dataset.splits]
    lines = []
    for path in sorted({path for raw in found if raw for path in raw[1]}):
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


def _get_one(dataset: Dataset, download: Download, folder: Path, source: str | None, name: str) -> bool:
    """Whether anything was new."""
    if _is_there(dataset, download, folder):
        return False
    with _below(folder) as temporary:
        file = temporary / _file_name(download)
        if source is None:
            _fetch(download, file, name)
        else:
            _copy(dataset, download, Path(str(source)).expanduser(), file)
        target = folder / download.folder
        if not download.unzip:
            _place(file, target / file.name)
            return True
        unpacked = temporary / 'unpacked'
        archives.unpack(file, unpacked)
        for path in sorted(path for path in unpacked.rglob('*') if path.is_file()):
            _place(path, target / path.relative_to(unpacked))
    return True


def _file_name(download: Download) -> str:
    return os.path.basename(urllib.parse.urlparse(download.url).path)


def _is_there(dataset: Dataset, download: Download, folder: Path) -> bool:
    """Raises UserError where another file has the place."""
    if download.unzip:
        return all(sources.find_raw(dataset, split, str(folder)) for split, found in dataset.splits.items() if found)
    place = folder / download.folder / _file_name(download)
    if not place.is_file():
        return False
    if _sha256(place) != download.sha256:
        raise _occupied(place)
    return True


def _occupied(place: Path) -> UserError:
    return UserError(f'{place} is there, but is not the published file; move it away and type the command again')


def _fetch(download: Download, file: Path, name: str) -> None:
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
        # An OSError's text begins with its number, which tells a user nothing.
        reason = getattr(reason, 'strerror', None) or reason
        raise UserError(f'{download.url} cannot be reached ({reason}); {offline}') from error
    with response:
        length = int(response.headers.get('Content-Length') or 0)
        read = _reporting_loss(response.read, download.url)
        _write(read, length, file, f'downloading {_file_name(download)}')
    if length and file.stat().st_size != length:
        raise UserError(
            f'{download.url}: the connection ended after {_size(file.stat().st_size)} of {_size(length)}; '
            'type the command again'
        )
    actual = _sha256(file)
    if actual != download.sha256:
        raise UserError(
            f'{download.url} has SHA-256 {actual} instead of {download.sha256}: it was damaged on its way, or is '
            'another version; type the command again'
        )


def _reporting_loss(read: Callable[[int], bytes], url: str) -> Callable[[int], bytes]:
    """Errors of the connection must not look like errors of the disk, which are OSErrors too."""

    def reading(size: int) -> bytes:
        try:
            return read(size)
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f'{url}: the connection broke ({error}); type the command again') from error

    return reading


def _copy(dataset: Dataset, download: Download, source: Path, file: Path) -> None:
    """From `source`, or its folder of the same name. Raises UserError where it is not, or is another file."""
    if not source.is_dir():
        raise UserError(f'--from {source} is not a folder; give the folder with {file.name}')
    places = [source / download.folder / file.name, source / file.name]
    found = [place for place in places if place.is_file()]
    if not found:
        advice = f'get it from {download.url}'
        if any(sources.find_raw(dataset, split, str(source)) for split in dataset.splits):
            advice += f', or use the unpacked files that are there with REMIXER_T5X_DATA={source}'
        raise UserError(f'--from {source}: {file.name} is not there; {advice}')
    try:
        sums = [_sha256(place) for place in found]
    except OSError as error:
        raise UserError(f'--from {source}: {error.filename} cannot be read ({error.strerror})') from error
    if download.sha256 not in sums:
        raise UserError(
            f'--from {source}: {found[0]} has SHA-256 {sums[0]} instead of {download.sha256}; '
            f'it is damaged or another version, get it from {download.url}'
        )
    with open(found[sums.index(download.sha256)], 'rb') as stream:
        _write(stream.read, found[0].stat().st_size, file, f'copying {file.name}')


def _write(read: Callable[[int], bytes], length: int, file: Path, what: str) -> None:
    notice = Notice(what)
    total = f' of {_size(length)}' if length else ''
    result = 'stopped'
    try:
        with open(file, 'wb') as out:
            while chunk := read(_CHUNK):
                out.write(chunk)
                if out.tell() > _LARGEST:
                    raise UserError(f'{file.name} has more than {_size(_LARGEST)}, so it is not the published file')
                notice.update(lambda: f'{_size(out.tell())}{total}')
            result = _size(out.tell())
    finally:
        notice.done(result)


def _size(count: int) -> str:
    return f'{count / _MB:.1f} MB'


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
def _below(folder: Path) -> Iterator[Path]:
    """A temporary folder on the disk of `folder`; what is wrong with that disk becomes a UserError."""
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix='.get-', dir=folder))
        yield temporary
    except OSError as error:
        raise UserError(
            f'cannot write to {folder} ({error.strerror or error}): set REMIXER_T5X_CACHE, or DATA_DIR where it is '
            'given, to a folder with space that you may write to'
        ) from error
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
