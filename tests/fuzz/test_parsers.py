"""All parsers accept any bytes: they return a result or raise a UserError of one line.

The explicit examples once raised other exceptions.
"""

import gzip
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remixer_tasks import local_files, pair_inputs, vocabularies
from remixer_tasks.files import text_lines
from tests.support.untrusted_inputs import result_or_one_line_error

FUZZ = settings(max_examples=120, deadline=None)
# Bytes with a meaning in one of the formats, and random bytes.
PIECES = st.sampled_from(
    [b'{"text": "a"}', b'{"prediction": "a"}', b'"', b'""', b',', b'\t', b'\n', b'\r\n', b'\r', b'\0', b'\xef\xbb\xbf',
     b'\xff\xfe', b'\xff', b'[', b'{', b'}', b'text', b'a,b', b'\\ud800', b'{"text": "\\ud800"}', b'null', b'1e999',
     b'{"text": ""}', b'{"a\\nb": 1}', '\u2028'.encode(), b'\x1b[31m', b' ']
)  # fmt: skip
BYTES = st.binary(max_size=80) | st.lists(PIECES | st.binary(max_size=6), max_size=12).map(b''.join)
LONG_NUMBER = b'{"text": ' + b'9' * 5000 + b'}\n'
DEEP = b'[' * 100_000


@pytest.fixture(autouse=True, scope='module')
def limit_lines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_lines, 'MAX_CHARACTERS', 40)
        yield


def write_file(tmp_path_factory, content, name='fuzz'):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    return str(path)


@FUZZ
@given(BYTES, st.sampled_from(local_files.FORMATS), st.sampled_from(local_files.TXT_DOCUMENTS), st.booleans())
@example(LONG_NUMBER, 'jsonl', 'line', True)
@example(LONG_NUMBER, 'jsonl', 'line', False)
@example(DEEP, 'jsonl', 'line', False)
@example(b'{"' + b'x' * 5000 + b'\\n": 1}', 'jsonl', 'line', False)
@example(b'PAR1' + bytes(20) + b'PAR1', 'parquet', 'line', False)
def test_any_document_parses_or_raises_a_one_line_error(tmp_path_factory, content, kind, txt_documents, strict):
    path = write_file(tmp_path_factory, content)
    for field in ('text', 1):
        layout = local_files.TextLayout(kind, field, txt_documents)
        skipped = text_lines.BadRecords(strict)
        texts = result_or_one_line_error(lambda: list(local_files.read_documents(path, layout, skipped)))  # noqa: B023
        assert len(skipped.describe_skipped_records().splitlines()) < 2
        for document in texts or ():
            assert document.strip() and document.encode()
            assert kind == 'parquet' or len(document.encode()) <= 3 * text_lines.MAX_CHARACTERS


@FUZZ
@given(BYTES)
@example(b'\x1f\x8b\x08')
@example(gzip.compress(b'text ' * 1000)[:30])
def test_gzipped_documents_and_texts(tmp_path_factory, content):
    for data in (content, gzip.compress(content)):
        path = write_file(tmp_path_factory, data, 'fuzz.txt.gz')
        skipped = text_lines.BadRecords(False)
        layout = local_files.TextLayout()
        documents = result_or_one_line_error(lambda: list(local_files.read_documents(path, layout, skipped)))  # noqa: B023
        assert all(document.strip() and document.encode() for document in documents or ())
        texts = result_or_one_line_error(lambda: list(pair_inputs.TextInputs(path)))  # noqa: B023
        assert all(len(text) <= text_lines.MAX_CHARACTERS for text in texts or ())


@FUZZ
@given(st.binary(max_size=200))
@example(b'\x0a\x02\x08\x00')
@example(b'')
def test_any_vocabulary_file_loads_or_raises_a_one_line_error(tmp_path_factory, content):
    # Models are cached by path.
    path = write_file(tmp_path_factory, content, f'{abs(hash(content))}.model')
    assert result_or_one_line_error(lambda: vocabularies.sentencepiece(path).vocab_size) is None
    os.unlink(path)
