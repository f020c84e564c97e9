"""Temporary paths of killed processes are removed by later processes; those of running processes are kept."""

import os
import pathlib
import re
import signal
import subprocess
import sys

from remixer_t5x import temporary_files
from remixer_tasks.files import cache
from tests.support import paths

OWNER_PROGRAM = """
import pathlib, sys, time
from remixer_t5x import temporary_files
with temporary_files.reserve_temporary_path(pathlib.Path(sys.argv[1]), 'x.') as path:
    path.mkdir()
    (path / 'large').write_text('x')
    print('made', flush=True)
    sys.stdin.read()
"""


def start_owner(folder):
    """Starts a process that owns a temporary path in `folder`."""
    process = subprocess.Popen(
        [sys.executable, '-c', OWNER_PROGRAM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'made\n'
    return process


def test_the_temporary_path_of_a_killed_process_is_removed(tmp_path):
    with start_owner(tmp_path) as killed, start_owner(tmp_path) as running:
        assert len(list(tmp_path.glob('x.*.tmp'))) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with cache.create_cache_entry(tmp_path / 'entry') as path:
            # Only the path of the running process is left.
            assert len(list(tmp_path.glob('x.*.tmp'))) == 1
            path.write_text('content')
        running.stdin.close()
        running.wait()
    assert [path.name for path in tmp_path.iterdir()] == ['entry']


def test_moved_and_failed_temporary_paths_leave_no_files(tmp_path):
    with temporary_files.reserve_temporary_path(tmp_path, 'a.') as path:
        path.write_text('content')
        path.rename(tmp_path / 'kept')
    try:
        with temporary_files.reserve_temporary_path(tmp_path, 'a.') as path:
            path.mkdir()
            (path / 'b').write_text('')
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ['kept']


def test_a_link_instead_of_an_entry_is_removed_without_its_target(tmp_path):
    """In a shared temporary folder, another user may have created the link."""
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'elsewhere' / 'file').write_text('stays')
    (tmp_path / 'x.tmp').symlink_to(tmp_path / 'elsewhere')
    pathlib.Path(tmp_path / 'x.tmp.lock').write_text('')
    os.mkfifo(tmp_path / 'y.tmp.lock')
    with temporary_files.reserve_temporary_path(tmp_path, 'a.'):
        pass
    assert not (tmp_path / 'x.tmp').is_symlink() and (tmp_path / 'elsewhere' / 'file').read_text() == 'stays'


def test_a_position_that_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    from remixer_t5x.data import resumable_iterator

    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    (tmp_path / 'position-1.remixer_t5x').mkdir()
    (tmp_path / 'position-1.remixer_t5x' / 'position.index').write_text('x')
    (tmp_path / 'position-1.remixer_t5x.lock').write_text('')
    with resumable_iterator._create_temporary_folder('a task') as folder:
        assert pathlib.Path(folder).is_dir()
        assert not (tmp_path / 'position-1.remixer_t5x').exists()
    assert not list(tmp_path.iterdir())


def test_folders_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr(os, 'fsync', lambda descriptor: calls.append(os.readlink(f'/proc/self/fd/{descriptor}')))
    monkeypatch.setattr(os, 'replace', lambda a, b: (calls.append('rename'), replace(a, b)))
    (tmp_path / 'a/b').mkdir(parents=True)
    (tmp_path / 'a/b/file').write_text('x')
    temporary_files.sync_and_rename(tmp_path / 'a', tmp_path / 'c')
    assert calls == [*(str(tmp_path / name) for name in ('a/b/file', 'a/b', 'a')), 'rename', str(tmp_path)]
    calls.clear()
    temporary_files.sync_and_rename(tmp_path / 'c/b/file', tmp_path / 'c/file')
    assert calls == [str(tmp_path / 'c/b/file'), 'rename', str(tmp_path / 'c')]
    assert (tmp_path / 'c/file').read_text() == 'x'


# Files that rename without `temporary_files`, and why.
RENAMES = {
    'remixer_t5x/temporary_files.py': 'commit itself',
    'remixer_t5x/checkpoints/checkpoint_manager.py': 'moves a damaged checkpoint away',
}


def test_every_file_that_is_renamed_is_committed():
    files = [*(paths.ROOT / 'remixer_t5x').rglob('*.py'), *(paths.ROOT / 'tasks').rglob('*.py')]
    renaming = {path for path in files if re.search(r'\bos\.(replace|renames?)\(|\.rename\(', path.read_text())}
    assert {path.relative_to(paths.ROOT).as_posix() for path in renaming} == set(RENAMES)
