"""`data get` against a server on this machine and against folders: what arrives is the published file, or nothing."""

import hashlib
import http.server
import io
import os
import re
import socket
import threading
import zipfile

import pytest

from remixer_t5x.errors import UserError
from remixer_tasks import catalogue
from remixer_tasks.benchmarks.dataset import TEST, TRAIN, Dataset, Download, Layout
from remixer_tasks.files import download

CONTENT = {'a.tsv': b'1\tx\n' * 300_000, 'b.tsv': b'2\ty\n'}


def archive(**more: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as file:
        for name, content in {'Toy/a.tsv': CONTENT['a.tsv'], 'Toy/b.tsv': CONTENT['b.tsv'], **more}.items():
            file.writestr(name, content)
    return out.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `asked` are the names that were asked for, `cut` those whose connection ends half way."""

    daemon_threads = True

    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        self.files, self.asked, self.cut = {}, [], set()

    def url(self, name):
        return f'http://127.0.0.1:{self.server_port}/{name}'


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802 (http.server calls it so)
        name = self.path[1:]
        self.server.asked.append(name)
        if name not in self.server.files:
            return self.send_error(404, 'Gone')
        content = self.server.files[name]
        self.send_response(200)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if name in self.server.cut else content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(nothing_elsewhere, monkeypatch):
    monkeypatch.setenv('no_proxy', '*')
    with Server() as server:
        server.files = dict(CONTENT)
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def nothing_elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv('REMIXER_T5X_DATA', raising=False)
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'no_tfds'))


def add(monkeypatch, downloads, inner=''):
    layouts = {TRAIN: [Layout((f'toy/{inner}a.tsv',), iter)], TEST: [Layout((f'toy/{inner}b.tsv',), iter)]}
    monkeypatch.setitem(
        catalogue.DATASETS, 'toy', Dataset('toy', {}, layouts, terms='free', downloads=tuple(downloads))
    )


@pytest.fixture
def plain(server, monkeypatch):
    add(monkeypatch, [Download(server.url(name), sha256(content), 'toy') for name, content in CONTENT.items()])


@pytest.fixture
def zipped(server, monkeypatch):
    server.files = {'Toy.zip': archive(**{'__MACOSX/._a': b'', 'Toy/.hidden': b'', 'Toy/no\r': b''})}
    add(monkeypatch, [Download(server.url('Toy.zip'), sha256(server.files['Toy.zip']), 'toy', unzip=True)], 'Toy/')


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_files_arrive_whole_and_it_is_said_where(plain, cache_folder, capsys):
    lines = download.get('toy')
    assert tree(cache_folder) == {f'data/toy/{name}': content for name, content in CONTENT.items()}
    assert lines == [
        f'toy is now in {cache_folder}/data, SHA-256 as published',
        f'train  {cache_folder}/data/toy/a.tsv',
        f'test   {cache_folder}/data/toy/b.tsv',
        'terms  free',
    ]
    assert 'downloading a.tsv: 1.2 MB' in capsys.readouterr().err
    assert not [path for path in (cache_folder / 'data').iterdir() if path.name != 'toy']


@pytest.mark.parametrize(('kind', 'folder'), [('plain', ''), ('zipped', 'Toy/')])
def test_what_is_there_is_not_asked_for_again(kind, folder, request, server, cache_folder):
    request.getfixturevalue(kind)
    download.get('toy')
    assert tree(cache_folder) == {f'data/toy/{folder}{name}': content for name, content in CONTENT.items()}
    asked = list(server.asked)
    assert download.get('toy')[0] == 'toy is here already, nothing was downloaded'
    assert server.asked == asked


@pytest.mark.parametrize('kind', ['plain', 'zipped'])
def test_nothing_is_unpacked_or_placed_before_its_checksum_is_right(kind, request, server, monkeypatch, cache_folder):
    request.getfixturevalue(kind)
    server.files = {name: content + b'!' for name, content in server.files.items()}
    monkeypatch.setattr(download, 'unpack', lambda *_: pytest.fail('unpacked'))
    monkeypatch.setattr(download, '_place', lambda *_: pytest.fail('placed'))
    with pytest.raises(UserError, match='must have SHA-256 .* got'):
        download.get('toy')
    assert tree(cache_folder) == {}


def test_what_a_killed_download_left_is_not_read(plain, server, cache_folder):
    """A folder of that name, with half of a file, is what SIGKILL leaves."""
    left = cache_folder / 'data' / '.get-abc' / 'a.tsv'
    left.parent.mkdir(parents=True)
    left.write_bytes(CONTENT['a.tsv'][:1000])
    download.get('toy')
    assert server.asked == ['a.tsv', 'b.tsv']
    assert (cache_folder / 'data' / 'toy' / 'a.tsv').read_bytes() == CONTENT['a.tsv']


def test_a_server_that_sends_without_end_is_left(plain, server, monkeypatch, cache_folder):
    monkeypatch.setattr(download, '_LARGEST', 1_100_000)
    with pytest.raises(UserError, match='has more than 1.1 MB, so it is not the published file'):
        download.get('toy')
    assert tree(cache_folder) == {}


def test_files_of_the_users_are_said_to_be_others_or_unchecked(plain, cache_folder):
    folder = cache_folder / 'data' / 'toy'
    folder.mkdir(parents=True)
    (folder / 'a.tsv').write_bytes(CONTENT['a.tsv'])
    (folder / 'b.tsv').write_bytes(b'mine')
    lines = download.get('toy')
    assert (
        lines[-1]
        == f'other      {folder}/b.tsv has SHA-256 {sha256(b"mine")}, and the published file {sha256(CONTENT["b.tsv"])}'
    )  # noqa: E501
    assert not any('a.tsv has' in line for line in lines)


def test_unpacked_files_are_said_to_be_unchecked(zipped, cache_folder):
    assert not any('unchecked' in line for line in download.get('toy'))
    lines = download.get('toy')
    assert lines[-1] == f'unchecked  {cache_folder}/data/toy/Toy/b.tsv: no SHA-256 of this file is known here'


def test_goes_on_with_the_file_that_failed(plain, server, cache_folder):
    held = server.files.pop('b.tsv')
    with pytest.raises(UserError, match='the server says 404 Gone; .* --from DIR'):
        download.get('toy')
    assert tree(cache_folder) == {'data/toy/a.tsv': CONTENT['a.tsv']}
    server.files['b.tsv'] = held
    download.get('toy')
    assert server.asked == ['a.tsv', 'b.tsv', 'b.tsv']


def test_a_connection_that_ends_early_leaves_nothing(plain, server, cache_folder):
    server.cut.add('a.tsv')
    with pytest.raises(UserError, match='the connection ended after 0.6 MB of 1.2 MB; type the command again'):
        download.get('toy')
    assert tree(cache_folder) == {}


def test_no_network_is_one_line(nothing_elsewhere, monkeypatch):
    with socket.socket() as bound:
        # Bound, not listening: the connection is refused.
        bound.bind(('127.0.0.1', 0))
        url = f'http://127.0.0.1:{bound.getsockname()[1]}/a.tsv'
        monkeypatch.setenv('no_proxy', '*')
        add(monkeypatch, [Download(url, sha256(b''), 'toy')])
        with pytest.raises(UserError) as error:
            download.get('toy')
    assert str(error.value) == (
        f'{url} cannot be reached (Connection refused); with a copy of the file in a folder DIR, type '
        f'remixer-t5x data get toy --from DIR (the file is a.tsv, SHA-256 {sha256(b"")})'
    )


@pytest.mark.parametrize('below', ['', 'toy'])
def test_takes_files_of_a_folder(plain, server, tmp_path, cache_folder, below):
    given = tmp_path / 'given' / below
    given.mkdir(parents=True)
    for name, content in CONTENT.items():
        (given / name).write_bytes(content)
    assert 'is now in' in download.get('toy', str(tmp_path / 'given'))[0]
    assert tree(cache_folder) == {f'data/toy/{name}': content for name, content in CONTENT.items()}
    assert 'already' in download.get('toy', str(tmp_path / 'given'))[0]
    assert tree(given) == CONTENT and server.asked == []


def test_a_folder_with_another_file_is_refused(plain, tmp_path, cache_folder):
    (tmp_path / 'a.tsv').write_bytes(b'other')
    with pytest.raises(UserError, match=f'{tmp_path}/a.tsv must have SHA-256 .* got {sha256(b"other")}'):
        download.get('toy', str(tmp_path))
    assert tree(cache_folder) == {}


def test_a_folder_without_the_file_says_what_belongs_there(zipped, tmp_path):
    with pytest.raises(UserError, match='Toy.zip is not there; get it from http://127.*/Toy.zip$'):
        download.get('toy', str(tmp_path))
    (tmp_path / 'toy' / 'Toy').mkdir(parents=True)
    (tmp_path / 'toy' / 'Toy' / 'a.tsv').write_bytes(b'')
    with pytest.raises(UserError, match='use the unpacked files that are there with REMIXER_T5X_DATA='):
        download.get('toy', str(tmp_path))
    with pytest.raises(UserError, match='is not a folder'):
        download.get('toy', str(tmp_path / 'nowhere'))


@pytest.mark.parametrize('kind, place', [('plain', 'toy/a.tsv'), ('zipped', 'toy/Toy/a.tsv')])
def test_a_file_of_the_users_is_not_replaced(kind, place, request, cache_folder):
    request.getfixturevalue(kind)
    mine = cache_folder / 'data' / place
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b'mine')
    with pytest.raises(UserError, match=f'{place} is there, but is not the published file'):
        download.get('toy')
    assert mine.read_bytes() == b'mine'


def test_a_folder_that_cannot_be_written(plain, tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot write to .*DATA_DIR'):
        download.get('toy', data_dir=str(tmp_path / 'file'))


def test_says_that_another_folder_is_read_first(plain, tmp_path, monkeypatch):
    for name, content in CONTENT.items():
        (tmp_path / 'toy').mkdir(exist_ok=True)
        (tmp_path / 'toy' / name).write_bytes(content)
    monkeypatch.setenv('REMIXER_T5X_DATA', str(tmp_path))
    assert download.get('toy')[0] == 'toy is here already, nothing was downloaded'
    lines = download.get('toy', str(tmp_path))
    assert lines[-1] == f'tasks still read {tmp_path}/toy/a.tsv, {tmp_path}/toy/b.tsv, which is searched first'


def test_without_a_download_it_is_said_what_to_put_where(nothing_elsewhere, cache_folder):
    with pytest.raises(UserError) as error:
        download.get('abductive_nli_v001')
    assert 'put abductive_nli/train.jsonl + abductive_nli/train-labels.lst, ' in str(error.value)
    assert f'into {cache_folder}/data' in str(error.value)
    assert str(error.value).endswith('what you put there is not checked')


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match="'conjnly' is not the name of .*; the nearest names are conjnli, conj_nli"):
        download.get('conjnly')
    assert download.find('conj_nli_v001') is download.find('conjnli')


@pytest.mark.parametrize('name', [name for name, dataset in catalogue.DATASETS.items() if dataset.downloads])
def test_every_download_goes_where_its_task_looks(name):
    dataset = catalogue.DATASETS[name]
    paths = {path for layouts in dataset.splits.values() for layout in layouts for path in layout.paths}
    for file in dataset.downloads:
        assert file.url.startswith('https://') and re.fullmatch('[0-9a-f]{64}', file.sha256)
        if file.unzip:
            assert file.url.endswith('.zip') and any(path.startswith(file.folder) for path in paths)
        else:
            assert os.path.join(file.folder, file.url.rsplit('/', 1)[1]) in paths


@pytest.mark.parametrize('name', ['cogs_v001', 'conj_nli_v001'])
def test_real_files_are_the_published_ones(real_data, request, name, cache_folder):
    # Hides the folder from the tasks, so that they look where the files went.
    request.getfixturevalue('nothing_elsewhere')
    download.get(name, str(real_data))
    assert all(str(cache_folder) in origin for origin in catalogue.available(name).values())
