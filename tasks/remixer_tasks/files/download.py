"""Downloads or copies published files into the folder that `text_task` searches last.

Only a file with the expected SHA-256 is moved to the folder or extracted. Existing files are never replaced.
"""

import hashlib
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

from remixer_t5x import temporary_files
from remixer_t5x.errors import UserError, suggest_similar_name
from remixer_tasks import catalogue
from remixer_tasks.benchmarks.text_task import LabelledDataset, PublishedFile
from remixer_tasks.files.cache import ProgressNotice

_CHUNK = 1 << 20
# Maximum time in seconds to wait for data from the server.
_TIMEOUT_SECONDS = 30


def download_files(name: str, source: str | None = None, data_dir: str | None = None) -> list[str]:
    """Downloads or copies the files of a task or dataset into `catalogue.get_download_folder(data_dir)`.

    Args:
        name: name of a task, such as 'cogs_v001', or of a dataset, such as 'super_glue/CB'.
        source: a folder that contains the published files; None downloads them.

    Returns:
        Lines to print: a summary, the files that tasks read for each split, and the terms of use.
    """
    dataset = find_dataset(name)
    folder = Path(catalogue.get_download_folder(data_dir))
    origins = catalogue.locate_splits(dataset, data_dir)
    if source is None and all(origins.values()):
        return [f'{dataset.name} already exists, nothing was downloaded', *_describe_splits(dataset, origins)]
    if not dataset.downloads:
        files = ', '.join(' + '.join(layouts[0].paths) for layouts in dataset.splits.values() if layouts)
        parts = [f'put {files} into {folder}'] if files else []
        parts += [f'prepare TFDS dataset {dataset.tfds}'] if dataset.tfds else []
        raise UserError(
            f'{dataset.name} must be downloaded by hand ({dataset.terms}): {", or ".join(parts)}; its SHA-256 is '
            'unknown, so the files are not verified'
        )
    new = sum(_fetch_file(download, folder, source, name) for download in dataset.downloads)
    status = f'is now in {folder}, SHA-256 verified' if new else f'is already in {folder}, nothing was copied'
    return [f'{dataset.name} {status}', *_describe_splits(dataset, catalogue.locate_splits(dataset, data_dir))]


def find_dataset(name: str) -> LabelledDataset:
    """Returns the dataset `name`, or the dataset of the task `name`. Raises UserError for an unknown name."""
    named = {**catalogue.DATASETS, **{task.name: task.dataset for task in catalogue.TASKS.values()}}
    if name not in named:
        advice = suggest_similar_name(name, named) or '; run remixer-t5x data list for all names'
        raise UserError(f'NAME must be a task or dataset, got {name!r}{advice}')
    return named[name]


def _describe_splits(dataset: LabelledDataset, origins: dict[str, str | None]) -> list[str]:
    width = max(len(word) for word in (*origins, 'terms')) + 2
    lines = [f'{split:<{width}}{origin or "not among the files of this dataset"}' for split, origin in origins.items()]
    return [*lines, f'{"terms":<{width}}{dataset.terms}']


def _fetch_file(download: PublishedFile, folder: Path, source: str | None, name: str) -> bool:
    """Downloads or copies one file unless it is already in `folder`; returns whether the file is new."""
    file_name, target = os.path.basename(urllib.parse.urlparse(download.url).path), folder / download.folder
    if (target / file_name).is_file() and _compute_file_sha256(target / file_name) == download.sha256:
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_files.reserve_temporary_path(folder, '.get-') as temporary_folder:
            temporary_folder.mkdir()
            file = temporary_folder / file_name
            origin = download.url
            if source is not None:
                origin = _find_local_copy(Path(source).expanduser(), file_name, download).absolute().as_uri()
            offline = (
                f'if a folder DIR contains a copy of the file, run remixer-t5x data get {name} --from DIR '
                f'(the file is {file_name}, SHA-256 {download.sha256})'
            )
            _download_file(origin, file, offline)
            if (actual := _compute_file_sha256(file)) != download.sha256:
                raise UserError(
                    f'{origin} must have SHA-256 {download.sha256}, got {actual}: it is damaged or another version; '
                    f'get it from {download.url} again'
                )
            if not download.unzip:
                _move_file_into_place(file, target / file_name)
                return True
            extracted = temporary_folder / 'extracted'
            with zipfile.ZipFile(file) as archive:
                archive.extractall(extracted)
            for path in sorted(path for path in extracted.rglob('*') if path.is_file()):
                _move_file_into_place(path, target / path.relative_to(extracted))
    except OSError as error:
        raise UserError(
            f'cannot write to {folder} ({error}); set REMIXER_T5X_CACHE, or DATA_DIR if it is set, to a writable '
            'folder with free space'
        ) from error
    return True


def _move_file_into_place(file: Path, target_file: Path) -> None:
    target_file.parent.mkdir(parents=True, exist_ok=True)
    if not target_file.exists():
        temporary_files.sync_and_rename(file, target_file)
    elif not target_file.is_file() or _compute_file_sha256(target_file) != _compute_file_sha256(file):
        raise UserError(f'{target_file} exists, but is not the published file; move it and run the command again')


def _download_file(url: str, file: Path, offline: str) -> None:
    notice, result = ProgressNotice(f'downloading {file.name}'), 'stopped'
    request = urllib.request.Request(url, headers={'User-Agent': 'remixer-t5x'})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response, open(file, 'wb') as out:
            length = int(response.headers.get('Content-Length') or 0)
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                notice.update_progress(lambda: f'{_format_megabytes(out.tell())} of {_format_megabytes(length)}')
            result = _format_megabytes(out.tell())
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        cause = getattr(error, 'reason', error)
        raise UserError(
            f'{url} cannot be read ({getattr(cause, "strerror", None) or cause}); run the command again, or, {offline}'
        ) from error
    finally:
        notice.print_result(result)


def _format_megabytes(count: int) -> str:
    return f'{count / 1e6:.1f} MB'


def _find_local_copy(source: Path, name: str, download: PublishedFile) -> Path:
    """Returns the path of the file `name` in `source` or in its subfolder. Raises UserError if the file is missing."""
    for path in (source / name, source / download.folder / name):
        if path.is_file():
            return path
    raise UserError(f'{source} must contain the file {name}; get it from {download.url} (SHA-256 {download.sha256})')


def _compute_file_sha256(path: Path) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()
