"""Large text is parsed in volumes: the same files for any size of a volume, and after any number of kills."""

import contextlib
import json
import os
import pathlib
import signal
import threading
import time
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x import temporary
from remixer_t5x.errors import UserError
from remixer_tasks import local_files
from remixer_tasks.corpora import parsing, text_corpus, text_shards, volumes
from remixer_tasks.files import cache, parts
from tests.support import real_processes

KINDS = ('passage', 'paragraph', 'line')


class Killed(BaseException):
    """Ends a parse as a kill does, as far as its files are concerned."""


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """A folder of files; two lines cannot be read, one has no text, and one file has none."""
    folder = tmp_path_factory.mktemp('text')
    documents = [f'the word {number * 7919 % 10007} is next to\n{number}' for number in range(120)]
    (folder / 'a.txt').write_text('\n\n'.join(documents[:60]))
    (folder / 'b.txt').write_text('\n\n\n')
    rows = [json.dumps({'text': document}) for document in documents[60:90]]
    rows[10:10] = ['{"text": "cut', '{"text": " "}']
    rows[20:20] = ['7']
    (folder / 'c.jsonl').write_text('\n'.join(rows))
    (folder / 'd.txt').write_text('\n\n'.join(documents[90:]))
    return folder


def parse(text, folder, volume=None, kill_at=None, **kept):
    """{name: bytes} of all files of the corpus, in a cache of its own; None if it was killed. `volume`: bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('REMIXER_T5X_CACHE', str(folder))
        patch.setattr(text_shards, 'SHARDS', 4)
        # Passages of several paragraphs.
        patch.setattr(parsing, 'PASSAGES', 20)
        if volume:
            patch.setattr(parts, 'BYTES', 200)
        # Nothing here survives the machine, and syncing takes most of the time.
        patch.setattr(temporary, 'sync', lambda path: None)
        patch.setattr(parsing, 'VOLUME', volume or 1 << 30)
        if kill_at is not None:
            kill_after(patch, kill_at)
        with contextlib.suppress(Killed):
            kept = {'txt_documents': 'passage', 'validation_fraction': 0.1} | kept
            (first, *_) = local_files.corpus(str(text / '*.*'), **kept).shards('train')
            return contents(os.path.dirname(first))
    return None


def contents(folder):
    names = sorted(set(os.listdir(folder)) - {cache.SEAL})
    return {name: pathlib.Path(folder, name).read_bytes() for name in names}


def kill_after(patch, count):
    """The parse ends before the next of `count` changes to its folder: a document, a rename, a removal."""
    left = [count]

    def counted(change):
        def act(*given, **named):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return change(*given, **named)

        return act

    patch.setattr(text_shards.Shards, 'add', counted(text_shards.Shards.add))
    patch.setattr(os, 'replace', counted(os.replace))
    for module in (volumes, text_corpus):
        patch.setattr(
            module, 'temporary', types.SimpleNamespace(**{**vars(temporary), 'remove': counted(temporary.remove)})
        )
    unlink = pathlib.Path.unlink
    last = counted(unlink)
    # Files of volumes alone: what removes a temporary folder also frees its lock, as the end of a process does.
    patch.setattr(
        pathlib.Path, 'unlink', lambda path, **named: (last if '-of-' in path.name else unlink)(path, **named)
    )


@pytest.fixture(scope='module')
def at_once(text, tmp_path_factory):
    """What a parse in one volume, of files that are not cut, gives for each kind of document."""
    return {kind: parse(text, tmp_path_factory.mktemp(kind), txt_documents=kind) for kind in KINDS}


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    volume=st.integers(300, 1500),
    kills=st.lists(st.tuples(st.integers(0, 250), st.integers(300, 1500)), max_size=2),
)
def test_files_do_not_depend_on_volumes_or_kills(text, at_once, tmp_path_factory, kind, volume, kills):
    folder, expected = tmp_path_factory.mktemp('cache'), at_once[kind]
    for kill_at, other in kills:
        # Another size of a volume, as another version of the program may have.
        parse(text, folder, min(volume, other) if kill_at % 2 else volume, kill_at, txt_documents=kind)
    assert parse(text, folder, volume, txt_documents=kind) == expected
    assert len(os.listdir(folder / 'corpora')) == 1


def test_files_have_all_documents_and_few_are_held_out(text, at_once, capsys):
    counts = json.loads(at_once['paragraph']['counts.json'])
    assert counts == {'train': counts['train'], 'validation': 120 - counts['train'], 'skipped': 2, 'empty': 2}
    assert 5 < counts['validation'] < 25


@pytest.mark.parametrize('held_out', ['of a share that holds nothing out', 'in files'])
def test_a_kill_at_any_place(tmp_path, held_out):
    text = tmp_path / 'text'
    text.mkdir()
    (text / 'a.txt').write_text('\n\n'.join(f'document {number} ' * 20 for number in range(4)))
    (tmp_path / 'other.txt').write_text('\n\n'.join(f'other {number} ' * 20 for number in range(3)))
    how = {'validation_files': str(tmp_path / 'other.txt')} if held_out == 'in files' else {'validation_fraction': 1e-9}
    how['txt_documents'] = 'paragraph'
    expected = parse(text, tmp_path / 'whole', **how)
    for kill_at in range(100):
        folder = tmp_path / f'killed {kill_at}'
        if parse(text, folder, 400, kill_at, **how) is not None:
            break
        assert parse(text, folder, 400, **how) == expected
    assert 12 < kill_at < 99


def parse_until_the_third_volume_is_half_written(text, folder):
    """The process that is killed."""
    add, before = text_shards.Shards.add, []

    def stop(shards, *document):
        add(shards, *document)
        if (shards._folder.parent / '000001').exists():
            before.append(document)
        if len(before) == 5:
            print('half written', flush=True)
            signal.pause()

    text_shards.Shards.add = stop
    parse(text, folder, 500, txt_documents='paragraph')


def test_a_killed_process_leaves_whole_volumes(text, at_once, tmp_path, monkeypatch, capsys):
    process = real_processes.Process(
        parse_until_the_third_volume_is_half_written, text, tmp_path / 'killed', output=tmp_path / 'log'
    )
    process.until(lambda: 'half written' in process.output())
    assert process.kill() == -signal.SIGKILL
    (volumes_folder,) = (tmp_path / 'killed' / 'corpora').glob('*.unfinished/*')
    assert sorted(os.listdir(volumes_folder)) == ['000000', '000001', 'unfinished']
    # Nobody has to wait for the killed process, and what it finished is not written again.
    written, finish = [], volumes.Volumes._finish
    monkeypatch.setattr(volumes.Volumes, '_finish', lambda *given: (written.append(given[2]), finish(*given)))
    assert parse(text, tmp_path / 'killed', 500, txt_documents='paragraph') == at_once['paragraph']
    count = written[-1] + 1
    assert written == list(range(2, count)) and count > 4
    said = capsys.readouterr().err
    assert f'parsed 2 of {count} volumes\n' in said and f'parsed {count} of {count} volumes\n' in said
    assert os.listdir(tmp_path / 'killed' / 'corpora') == [volumes_folder.parent.name.removesuffix('.unfinished')]


@pytest.mark.parametrize('damaged', ['', '[]', '{}', '7', '[1, 2, 3]', '["", {"a": 7}, {}]', '[' * 9999, None, 'cut'])
def test_a_damaged_volume_is_read_again(text, at_once, tmp_path, damaged):
    assert parse(text, tmp_path, 500, kill_at=60, txt_documents='paragraph') is None
    (volume,) = tmp_path.glob('corpora/*/*/000001')
    path = volume / 'volume.json' if damaged != 'cut' else next(volume.glob('train-*'))
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damaged == 'cut' else damaged.encode())
    assert parse(text, tmp_path, 500, txt_documents='paragraph') == at_once['paragraph']


def test_a_file_that_changes_meanwhile_is_refused(text, tmp_path, monkeypatch):
    (tmp_path / 'text').mkdir()
    path = tmp_path / 'text' / 'a.txt'
    path.write_text('\n\n'.join(f'document {number}' for number in range(400)))
    add = text_shards.Shards.add
    monkeypatch.setattr(text_shards.Shards, 'add', lambda *given: (add(*given), path.write_text('other\n\ntext')))
    with pytest.raises(UserError, match=r'a.txt changed while it was read; type the command again') as error:
        parse(tmp_path / 'text', tmp_path / 'cache', 2000, txt_documents='paragraph')
    assert '\n' not in str(error.value)


def test_where_there_are_no_locks_nothing_is_kept(text, at_once, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError('no locks available')

    monkeypatch.setattr(temporary.fcntl, 'flock', refuse)
    assert parse(text, tmp_path, 500, kill_at=60, txt_documents='line') is None
    assert os.listdir(tmp_path / 'corpora') == []
    assert parse(text, tmp_path, 500, txt_documents='line') == at_once['line']
    assert len(os.listdir(tmp_path / 'corpora')) == 1


def test_a_second_process_waits_for_the_first_and_takes_what_it_made(tmp_path):
    waits, found = threading.Event(), []

    def second():
        with cache.continuing(tmp_path / 'entry', waits.set) as path:
            found.append(path)

    with cache.continuing(tmp_path / 'entry', pytest.fail) as path:
        (path / 'content').write_text('content')
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(real_processes.PATIENCE)
    thread.join()
    assert found == [None] and os.listdir(tmp_path) == ['entry'] and os.listdir(tmp_path / 'entry') == ['content']


def test_what_nobody_continues_for_a_week_is_removed(tmp_path):
    for name in ('old', 'mine', 'new'):
        with contextlib.suppress(Killed), cache.continuing(tmp_path / name, pytest.fail) as path:
            (path / 'content').write_text('content')
            raise Killed
    for name, days in (('old', 8), ('mine', 8), ('new', 6)):
        ago = time.time() - days * 24 * 3600
        os.utime(tmp_path / f'{name}.unfinished.lock', (ago, ago))
    with cache.continuing(tmp_path / 'mine', pytest.fail) as path:
        assert (path / 'content').read_text() == 'content'
    kept = {'new.unfinished', 'new.unfinished.lock'}
    assert set(os.listdir(tmp_path)) == {'mine', *kept}
