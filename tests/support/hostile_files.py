"""What a file of somebody else may contain instead of JSON, as a strategy, and what may be in its place."""

import json
import os
import pathlib

from hypothesis import strategies as st

from remixer_t5x.errors import UserError

NUMBERS = [
    *('0', '1', '-1', '3.5', '1e999', '-1e999', 'NaN', 'Infinity', '1e308'),
    *('9' * 400, '9' * 5000, '1' + '0' * 40),
]
TEXTS = ['a', '', '\\ud800', '\\ud83d x', '\\u2028', '\\u001b[31m', 'train', '../x', 'F32', '\\u00b2', '|V2000000000']
# Characters that normalisers, white space and added tokens of tokenizers are sensitive to.
ODD_CHARACTERS = (
    *('\ufeff', '\x00', '\x1c', '\x85', '\xa0', '\u2028', '\u200b', 'e\u0301'),
    *('é', 'ﬁ', 'ｗ', 'İ', 'ß', '你', '😀', '▁', "'s"),
)
# Names that the files of a run, a checkpoint, an output or a Hugging Face folder have.
NAMES = [
    *('kind', 'step', 'timing', 'clock', 'loss', 'prediction', 'input', 'target', 'score', 'index', 'input_hash'),
    *('checkpoint', 'decoder', 'config', 'vocabulary', 'converted_from', 'versions', 'shape', 'chunks', 'dtype'),
    *('weight_map', 'extra_ids', 'num_layers', 'zarr_format', 'best', 'data', 'a.txt', '__metadata__', 'text'),
]
VALUES = st.recursive(
    st.sampled_from([*NUMBERS, *(f'"{text}"' for text in TEXTS), 'null', 'true', '[]', '{}']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f'[{", ".join(items)}]')
        | st.lists(st.tuples(st.sampled_from([*NAMES, '\\ud800']), inner), max_size=4).map(
            lambda pairs: '{' + ', '.join(f'"{name}": {value}' for name, value in pairs) + '}'
        )
    ),
    max_leaves=8,
)
PIECES = st.sampled_from(
    [b'\n', b'\r', b'\0', b'\xef\xbb\xbf', b'\xff', b'[', b'{"a":', b'}', b'"', b'\xe2\x80\xa8', b' ']
)
# Any bytes; JSON of odd values; several lines of these; and what broke a reader once.
CONTENTS = (
    st.binary(max_size=60)
    | VALUES.map(str.encode)
    | st.lists(VALUES.map(str.encode) | PIECES, max_size=5).map(b'\n'.join)
    | st.lists(PIECES, max_size=8).map(b''.join)
    | st.sampled_from([b'[' * 9_000, b'{"a":' * 5_000, b'9' * 5000, b'[' * 900 + b']' * 900, b'3', b'null', b'[]'])
)


def altered(record):
    """JSON objects like `record`, in which a few names have odd values."""
    changes = st.dictionaries(st.sampled_from(sorted(record)), VALUES, min_size=1, max_size=2)
    kept = {name: json.dumps(value) for name, value in record.items()}
    return changes.map(lambda odd: '{' + ', '.join(f'"{n}": {v}' for n, v in {**kept, **odd}.items()) + '}')


def one_line_or_result(read, *arguments):
    """What `read` returns, or None if it raised UserError with one short line that can be printed."""
    try:
        return read(*arguments)
    except UserError as error:
        text = str(error)
        assert len(text.splitlines()) == 1 and len(text) < 2000, text
        text.encode()
        return None


def place_odd_thing(kind, path):
    """Makes `path` a pipe, a folder, a link to a device or nowhere, or a file of 40 GB without any blocks."""
    if kind == 'pipe':
        os.mkfifo(path)
    elif kind == 'folder':
        path.mkdir()
    elif kind == 'sparse':
        with path.open('wb') as file:
            file.truncate(40 * 10**9)
    else:
        path.symlink_to({'device': '/dev/zero', 'nowhere': '/nonexistent/x', 'itself': path.name}[kind])


class Malicious:
    """Unpickling one touches `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


ODD_THINGS = ('pipe', 'folder', 'sparse', 'device', 'nowhere', 'itself')
