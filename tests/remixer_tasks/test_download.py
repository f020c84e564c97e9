"""`data get` from a local server or a folder writes the published files, or nothing."""

import functools
import hashlib
import http.server
import io
import os
import re
import threading
import zipfile

import pytest

from remixer_t5x.errors import UserError
from remixer_tasks import catalogue
from remixer_tasks.benchmarks.text_task import TEST, TRAIN, FileLayout, LabelledDataset, PublishedFile
from remixer_tasks.files import download
from tests.support.error_lines import error_message

CONTENT = {'a.tsv': b'1\tx\n' * 300_000, 'b.tsv': b'2\ty\n'}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def archive() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as file:
        for name, content in {'Toy/a.tsv': CONTENT['a.tsv'], 'Toy/b.tsv': CONTENT['b.tsv']}.items():
            file.writestr(name, content)
    return out.getvalue()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the files of a folder; records their names."""

    def log_request(self, *_):
        self.server.requested.append(self.path[1:])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(no_other_data, monkeypatch, tmp_path):
    """Returns a server of the folder `server.folder`; `server.requested` lists the names of the requested files."""
    monkeypatch.setenv('no_proxy', '*')
    folder = tmp_path / 'served'
    folder.mkdir()
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Handler, directory=str(folder))) as server:
        server.folder, server.requested = folder, []
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def publish(server, name, content, folder='toy', **options):
    """Serves a file, and returns its description in a dataset."""
    (server.folder / name).write_bytes(content)
    return PublishedFile(f'http://127.0.0.1:{server.server_port}/{name}', sha256(content), folder, **options)


@pytest.fixture
def no_other_data(tmp_path, monkeypatch):
    """Hides all other folders in which tasks search for data."""
    monkeypatch.delenv('REMIXER_T5X_DATA', raising=False)
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'no_tfds'))


def register_dataset(monkeypatch, downloads, folder=''):
    layouts = {TRAIN: [FileLayout((f'toy/{folder}a.tsv',), iter)], TEST: [FileLayout((f'toy/{folder}b.tsv',), iter)]}
    monkeypatch.setitem(
        catalogue.DATASETS, 'toy', LabelledDataset('toy', {}, layouts, terms='free', downloads=tuple(downloads))
    )


@pytest.fixture
def plain(server, monkeypatch):
    register_dataset(monkeypatch, [publish(server, name, content) for name, content in CONTENT.items()])


@pytest.fixture
def zipped(server, monkeypatch):
    register_dataset(monkeypatch, [publish(server, 'Toy.zip', archive(), unzip=True)], 'Toy/')


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_downloads_are_verified_and_their_paths_are_shown(plain, cache_folder, capsys):
    lines = download.download_files('toy')
    assert tree(cache_folder) == {f'data/toy/{name}': content for name, content in CONTENT.items()}
    assert lines == [
        f'toy is now in {cache_folder}/data, SHA-256 verified',
        f'train  {cache_folder}/data/toy/a.tsv',
        f'test   {cache_folder}/data/toy/b.tsv',
        'terms  free',
    ]
    assert 'downloading a.tsv: 1.2 MB' in capsys.readouterr().err
    assert not [path for path in (cache_folder / 'data').iterdir() if path.name != 'toy']


def test_existing_files_are_not_downloaded_again(zipped, server, cache_folder):
    download.download_files('toy')
    assert tree(cache_folder) == {f'data/toy/Toy/{name}': content for name, content in CONTENT.items()}
    requests_before = list(server.requested)
    assert download.download_files('toy')[0] == 'toy already exists, nothing was downloaded'
    assert server.requested == requests_before


def test_a_faulty_download_leaves_nothing(plain, server, cache_folder):
    (server.folder / 'a.tsv').write_bytes(b'other')
    assert 'must have SHA-256' in error_message(download.download_files, 'toy')
    assert tree(cache_folder) == {}


def test_a_repeated_command_downloads_only_the_missing_file(plain, server, cache_folder):
    (server.folder / 'b.tsv').rename(server.folder / 'gone')
    with pytest.raises(UserError, match='cannot be read .File not found.* get toy --from DIR .the file is b.tsv, SHA'):
        download.download_files('toy')
    assert tree(cache_folder) == {'data/toy/a.tsv': CONTENT['a.tsv']}
    (server.folder / 'gone').rename(server.folder / 'b.tsv')
    download.download_files('toy')
    assert server.requested == ['a.tsv', 'b.tsv', 'b.tsv']


def test_files_are_copied_from_a_folder_with_the_published_files(plain, server, tmp_path, cache_folder):
    source = tmp_path / 'source' / 'toy'
    source.mkdir(parents=True)
    copy = functools.partial(download.download_files, 'toy', str(tmp_path / 'source'))
    assert 'must contain the file a.tsv; get it from http://127' in error_message(copy)
    (source / 'a.tsv').write_bytes(b'other')
    assert f'got {sha256(b"other")}' in error_message(copy)
    assert tree(cache_folder) == {}
    for name, content in CONTENT.items():
        (source / name).write_bytes(content)
    assert 'is now in' in copy()[0] and 'already' in copy()[0]
    assert tree(cache_folder) == {f'data/toy/{name}': content for name, content in CONTENT.items()}
    assert tree(source) == CONTENT and server.requested == []


def test_an_existing_file_is_not_replaced(zipped, cache_folder):
    existing = cache_folder / 'data/toy/Toy/a.tsv'
    existing.parent.mkdir(parents=True)
    existing.write_bytes(b'mine')
    assert 'toy/Toy/a.tsv exists, but is not' in error_message(download.download_files, 'toy')
    assert existing.read_bytes() == b'mine'


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('toy', ['cannot write to', 'DATA_DIR']),
        ('abductive_nli_v001', ['put abductive_nli/train.jsonl + abductive_nli/train-labels.lst, ', 'into /dev/null']),
        ('conjnly', ["got 'conjnly'; did you mean conjnli?"]),
    ],
)
def test_impossible_downloads_are_reported(plain, name, expected):
    """An unwritable folder, a dataset without downloads, and an unknown dataset."""
    message = error_message(lambda: download.download_files(name, data_dir='/dev/null'))
    assert all(text in message for text in expected)


@pytest.mark.parametrize('name', [name for name, dataset in catalogue.DATASETS.items() if dataset.downloads])
def test_every_download_is_written_where_its_task_reads(name):
    dataset = catalogue.DATASETS[name]
    paths = {path for layouts in dataset.splits.values() for layout in layouts for path in layout.paths}
    for file in dataset.downloads:
        assert file.url.startswith('https://') and re.fullmatch('[0-9a-f]{64}', file.sha256)
        if file.unzip:
            assert file.url.endswith('.zip') and any(path.startswith(file.folder) for path in paths)
        else:
            assert os.path.join(file.folder, file.url.rsplit('/', 1)[1]) in paths


@pytest.mark.parametrize('name', ['cogs_v001', 'conj_nli_v001'])
def test_real_files_have_the_published_hashes(real_data, no_other_data, name, cache_folder):
    download.download_files(name, str(real_data))
    assert all(str(cache_folder) in origin for origin in catalogue.locate_splits(download.find_dataset(name)).values())
