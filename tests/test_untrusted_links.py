"""Links and file names that lead out of an untrusted folder are refused."""

import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_t5x.untrusted_files import check_links_inside, resolve_path_inside
from tests.support.error_lines import error_message


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'given' / 'deep' / 'deeper').mkdir(parents=True)
    (tmp_path / 'given' / 'file').write_text('x')
    (tmp_path / 'secret').write_text('s')
    return tmp_path / 'given'


@pytest.mark.parametrize('target', ['/etc/passwd', '../../../secret', '../../../given_too/file'])
def test_a_link_out_of_its_folder_is_rejected(folder, tmp_path, target):
    """This includes links to a folder whose name has the folder's name as a prefix, and broken links."""
    (tmp_path / 'given_too').mkdir()
    (folder / 'deep' / 'deeper' / 'link').symlink_to(target)
    assert 'deeper/link is a link to ' in error_message(check_links_inside, folder)


def test_links_inside_the_folder_and_to_the_folder_are_allowed(folder, tmp_path):
    (folder / 'deep' / 'link').symlink_to('../file')
    (folder / 'deep' / 'loop').symlink_to('..')
    (folder / 'absolute').symlink_to(folder / 'file')
    (tmp_path / 'chosen by the user ü').symlink_to(folder)
    check_links_inside(folder)
    check_links_inside(tmp_path / 'chosen by the user ü')
    assert resolve_path_inside(folder, 'deep/link', 'an index').read_text() == 'x'


def test_a_chain_of_links_is_followed_to_its_end(folder, tmp_path):
    (folder / 'a').symlink_to('b')
    (folder / 'b').symlink_to(tmp_path / 'secret')
    assert 'is a link to ' in error_message(check_links_inside, folder)
    assert 'is a link to ' in error_message(resolve_path_inside, folder, 'a', 'an index')


def test_a_pipe_is_rejected_without_opening_it(folder):
    os.mkfifo(folder / 'deep' / 'pipe')
    assert 'is a pipe, socket or device' in error_message(check_links_inside, folder)
    assert 'is a pipe, socket or device' in error_message(resolve_path_inside, folder, 'deep/pipe', 'an index')


def test_links_to_the_blobs_of_a_hugging_face_cache_are_allowed(tmp_path):
    snapshot = tmp_path / 'models--x' / 'snapshots' / '0123'
    snapshot.mkdir(parents=True)
    (tmp_path / 'models--x' / 'blobs').mkdir()
    (tmp_path / 'models--x' / 'blobs' / 'abc').write_text('x')
    (snapshot / 'config.json').symlink_to('../../blobs/abc')
    check_links_inside(snapshot)
    (snapshot / 'other').symlink_to('../../refs')
    assert 'is a link to ' in error_message(check_links_inside, snapshot)


@pytest.mark.parametrize('name', ['/etc/passwd', 'a/../../x', '', 'a\0b', 7, '..\\x', '\x1b[31m'])
def test_names_that_lead_out_of_the_folder_are_rejected(folder, name):
    assert 'an index names the file' in error_message(resolve_path_inside, folder, name, 'an index')


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30) | st.lists(st.sampled_from(['..', '.', 'a', '', 'deep']), max_size=5).map('/'.join))
@example('./../x')
def test_any_name_is_resolved_inside_or_rejected(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp()
    try:
        path = resolve_path_inside(folder, name, 'an index')
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert os.path.realpath(path).startswith(os.path.realpath(folder))
