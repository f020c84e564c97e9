"""Hypothesis strategies for the contents of untrusted JSON files, and special files in their place."""

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
# Characters that tokenizers treat specially: normalized characters, white space and parts of added tokens.
ODD_CHARACTERS = (
    *('\ufeff', '\x00', '\x1c', '\x85', '\xa0', '\u2028', '\u200b', 'e\u0301'),
    *('é', 'ﬁ', 'ｗ', 'İ', 'ß', '你', '😀', '▁', "'s"),
)
# Keys in the files of runs, checkpoints, outputs and Hugging Face folders.
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
FRAGMENTS = st.sampled_from(
    [b'\n', b'\r', b'\0', b'\xef\xbb\xbf', b'\xff', b'[', b'{"a":', b'}', b'"', b'\xe2\x80\xa8', b' ']
)
# Random bytes, unusual JSON values, several lines of these, and contents for which a reader once failed.
CONTENTS = (
    st.binary(max_size=60)
    | VALUES.map(str.encode)
    | st.lists(VALUES.map(str.encode) | FRAGMENTS, max_size=5).map(b'\n'.join)
    | st.lists(FRAGMENTS, max_size=8).map(b''.join)
    | st.sampled_from([b'[' * 9_000, b'{"a":' * 5_000, b'9' * 5000, b'[' * 900 + b']' * 900, b'3', b'null', b'[]'])
)


def altered_json(record):
    """Returns a strategy for JSON objects like `record` with one or two values replaced by unusual ones."""
    changes = st.dictionaries(st.sampled_from(sorted(record)), VALUES, min_size=1, max_size=2)
    original = {name: json.dumps(value) for name, value in record.items()}
    return changes.map(lambda changed: '{' + ', '.join(f'"{n}": {v}' for n, v in {**original, **changed}.items()) + '}')


def result_or_one_line_error(read, *arguments):
    """Returns the result of `read`, or None after a UserError, which must be one short printable line."""
    try:
        return read(*arguments)
    except UserError as error:
        text = str(error)
        assert len(text.splitlines()) == 1 and len(text) < 2000, text
        text.encode()
        return None


def create_special_path(kind, path):
    """Creates a pipe, a folder, a sparse file of 40 GB, or a link to a device, a missing file or itself at `path`."""
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
    """An object that creates the file `path` when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)
