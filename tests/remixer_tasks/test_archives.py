"""Archives that would leave their folder or never end are refused, and nothing is written elsewhere."""

import io
import stat
import zipfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_tasks.files import download


def zipped(*members, compression=zipfile.ZIP_DEFLATED):
    """Members are (name or ZipInfo, content)."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', compression) as file:
        for name, content in members:
            file.writestr(name, content)
    return out.getvalue()


def of_kind(name, kind):
    info = zipfile.ZipInfo(name)
    info.external_attr = (kind | 0o644) << 16
    return info


GOOD = zipped(('Toy/a.txt', b'text ' * 100), ('Toy/deep/b.txt', b''))
DAMAGED = bytearray(GOOD)
DAMAGED[45] ^= 0xFF
ENCRYPTED = bytearray(GOOD)
for place in (GOOD.index(b'PK\x03\x04') + 6, GOOD.index(b'PK\x01\x02') + 8):
    ENCRYPTED[place] |= 1
# Names are kept by `ZipInfo` as they are, but for what ends them.
BAD = {
    'above': (zipped(('a', b''), ('../x', b'')), "has a file '../x', outside"),
    'hidden above': (zipped(('a/../../x', b'')), 'outside of its folder'),
    'absolute': (zipped(('/etc/x', b'')), "has a file '/etc/x', outside"),
    'backslashes': (zipped(('..\\x', b'')), 'outside of its folder'),
    'a drive': (zipped(('C:/x', b'')), 'outside of its folder'),
    'a link': (zipped((of_kind('a', stat.S_IFLNK), b'/etc/passwd')), "a link or device 'a'"),
    'a device': (zipped((of_kind('a', stat.S_IFCHR), b'')), 'a link or device'),
    'a pipe': (zipped((of_kind('a', stat.S_IFIFO), b'')), 'a link or device'),
    'a bomb': (zipped(('a', bytes(30_000_000))), 'bytes; it is not unpacked'),
    'a name twice': (zipped(('a', b'1'), ('b/a', b'2')).replace(b'b/a', b'a\0z'), 'cannot be unpacked'),
    'a file and a folder': (zipped(('a', b'1'), ('a/b', b'2')), 'cannot be unpacked'),
    'cut off': (GOOD[:-30], 'cannot be unpacked'),
    'damaged': (bytes(DAMAGED), 'cannot be unpacked'),
    'encrypted': (bytes(ENCRYPTED), 'cannot be unpacked'),
    'a tar': (b'\x1f\x8b' + bytes(600), 'cannot be unpacked'),
    'empty': (b'', 'cannot be unpacked'),
}


def unpacked(folder, content):
    archive = folder / 'toy.zip'
    archive.write_bytes(content)
    download.unpack(archive, folder / 'in' / 'side')


@pytest.mark.parametrize('kind', BAD)
def test_bad_archives_are_refused(tmp_path, kind):
    content, said = BAD[kind]
    with pytest.raises(UserError) as error:
        unpacked(tmp_path, content)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1
    outside = {path.name for path in tmp_path.rglob('*') if path.is_file() and 'side' not in path.parts}
    assert outside == {'toy.zip'}


def test_a_good_one_is_unpacked(tmp_path):
    unpacked(tmp_path, GOOD)
    assert (tmp_path / 'in/side/Toy/a.txt').read_bytes() == b'text ' * 100
    assert (tmp_path / 'in/side/Toy/deep/b.txt').read_bytes() == b''


def test_a_size_that_lies_writes_no_more_than_was_declared(tmp_path):
    content = bytearray(zipped(('a', bytes(3_000_000)), compression=zipfile.ZIP_STORED))
    # The size without compression stands 22 bytes into a local and 24 into a central header.
    for mark, offset in ((b'PK\x03\x04', 22), (b'PK\x01\x02', 24)):
        place = content.index(mark) + offset
        content[place : place + 4] = (1000).to_bytes(4, 'little')
    with pytest.raises(UserError, match='cannot be unpacked'):
        unpacked(tmp_path, bytes(content))
    assert (tmp_path / 'in/side/a').stat().st_size <= 1000


@pytest.mark.parametrize(('limit', 'value'), [('MAX_FILES', 1), ('MAX_BYTES', 400)])
def test_limits(tmp_path, monkeypatch, limit, value):
    monkeypatch.setattr(download, limit, value)
    with pytest.raises(UserError, match='it is not unpacked'):
        unpacked(tmp_path, GOOD)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.integers(0, len(GOOD) - 1), st.integers(0, 255), max_size=3), st.integers(0, len(GOOD)))
@example({}, 0)
def test_any_damage_is_one_line(tmp_path_factory, changes, length):
    folder = tmp_path_factory.mktemp('zip')
    content = bytes(changes.get(place, byte) for place, byte in enumerate(GOOD))[:length]
    try:
        unpacked(folder, content)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    assert not any('..' in path.parts or path.is_symlink() for path in folder.rglob('*'))
