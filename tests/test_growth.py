"""No reader, tokenizer or metric takes more than nearly linear time in the length of a text, whatever the text is.

Processor time of ten times the text may be 10 ** 1.3 times as long. Less than FLOOR seconds are not looked at, and the
least of three attempts counts, so that a busy machine does not matter; a quadratic loop over a megabyte of text takes
minutes.
"""

import contextlib
import functools
import time

import pytest

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks import answer_metrics, answers, pair_metrics
from remixer_tasks.corpora import documents, parsing
from remixer_tasks.files import raw_rows, row_files
from remixer_tasks.files.malformed import Malformed
from tests.remixer_tasks import test_every_vocabulary

FLOOR, ATTEMPTS, EXPONENT = 0.3, 3, 1.3
SIZES = (10_000, 100_000, 1_000_000)
TEXTS = {
    'one long line': 'word ',
    'letters without spaces': 'abcdefgh',
    'one letter': 'a',
    'many lines': 'a\n',
    'blank lines': '\n',
    'spaces': ' ',
    'digits': '7',
    'quotes': '"',
    'open brackets': '[{"text": ',
    'commas and tabs': ',\t',
    'carriage returns': '\r',
    'backslashes': '\\',
    'not ASCII': 'é你',
    'marks': "<extra_id_0>'s",
    'NULs': '\0',
}


def seconds(call, text):
    start = time.process_time()
    with contextlib.suppress(UserError):
        call(text)
    return time.process_time() - start


def check(call, texts=TEXTS, prepare=lambda text: text):
    """Fails for a text for which `call` takes super-linear time."""
    for name, unit in texts.items():
        before = 0.0
        for size in SIZES:
            text = prepare(unit * (size // len(unit)))
            limit = max(FLOOR, 10**EXPONENT * max(before, FLOOR / 10))
            took = seconds(call, text)
            for _ in range(ATTEMPTS - 1):
                if took > limit:
                    took = min(took, seconds(call, text))
            assert took <= limit, f'{name}: {size:,} characters take {took:.2f} s, a tenth of them {before:.2f} s'
            before = took


def exhaust(rows):
    for _ in rows:
        pass


def of_file(read, path):
    """Calls `read` with the path of a file that has the text."""

    def call(text):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        exhaust(read(str(path)))

    return call


def in_parts(path, layout):
    for piece in parsing._cut(path, layout, parsing._state(path), 4096):
        exhaust(documents.read(path, layout, Malformed(False), piece.part))


@pytest.mark.parametrize('txt_documents', documents.TXT_DOCUMENTS)
@pytest.mark.parametrize('longest', [1000, 50_000_000])
def test_text_files(tmp_path, txt_documents, longest):
    layout = documents.Layout('txt', txt_documents=txt_documents, longest=longest)
    check(of_file(lambda path: documents.read(path, layout, Malformed(False)), tmp_path / 'a'))


@pytest.mark.parametrize('form', ['txt', 'jsonl'])
def test_text_files_in_parts(tmp_path, form):
    """Which of the parts has a line is found without reading the line once for each part."""
    layout = documents.Layout(form, txt_documents='passage')
    check(of_file(lambda path: in_parts(path, layout) or (), tmp_path / 'a'))


def test_passages():
    check(lambda text: exhaust(parsing._passages(text.split('\n'), 8000)))


@pytest.mark.parametrize('form', ['jsonl', 'tsv', 'csv'])
def test_rows_of_users(tmp_path, form):
    read = functools.partial(row_files.read, layout=row_files.RowLayout(form), malformed=Malformed(False))
    check(of_file(read, tmp_path / 'a'))
    check(
        of_file(read, tmp_path / 'a'), prepare=lambda text: f'text,x\n{text}' if form == 'csv' else f'text\tx\n{text}'
    )


@pytest.mark.parametrize('read', [raw_rows.jsonl, raw_rows.tsv, raw_rows.comma_separated, raw_rows.lines])
def test_rows_of_published_files(tmp_path, read):
    check(of_file(read, tmp_path / 'a'))


def test_json():
    check(parse_json)
    for form in ('{"text": "%s"}', '[%s]', '{"text": %s}'):
        check(parse_json, prepare=lambda text, form=form: form % text)
    check(parse_json, {'escapes': '\\ud800', 'rows': '1,'}, lambda text: f'["{text}"]')


def parse_json(text):
    with contextlib.suppress(untrusted_files.NotJson):
        untrusted_files.parse(text, odd_numbers=True)


@pytest.fixture(scope='module', params=test_every_vocabulary.VOCABULARIES)
def vocabulary(request, tmp_path_factory):
    if request.param == 'wordpiece':
        pytest.importorskip('tokenizers', reason="tokenizers is not installed: pip install 'remixer-t5x[wordpiece]'")
    return test_every_vocabulary.VOCABULARIES[request.param](tmp_path_factory.mktemp(request.param))


def test_tokenizers(vocabulary):
    check(vocabulary.encode)
    check(lambda text: vocabulary.encode_tf(text).numpy())
    check(lambda text: vocabulary.decode(vocabulary.encode(text)))


@pytest.mark.parametrize('name', pair_metrics.NAMED)
def test_metrics(name):
    if name in ('rouge', 'bleu'):
        library = {'rouge': 'rouge_score', 'bleu': 'sacrebleu'}[name]
        pytest.importorskip(library, reason=f"{library} is not installed: pip install 'remixer-t5x[generation]'")
    # The longest common subsequence of ROUGE-L is quadratic in words by its definition.
    words = {'one long line', 'many lines', 'open brackets', 'marks', 'commas and tabs', 'not ASCII'}
    texts = {kind: unit for kind, unit in TEXTS.items() if name != 'rouge' or kind not in words}
    check(lambda text: pair_metrics.NAMED[name]([text, 'a'], [text, text]), texts)


def test_answers():
    check(answer_metrics.normalize)
    check(answers.number)
    check(lambda text: answers.ClassId(('yes', 'no'))(text))
