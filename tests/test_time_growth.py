"""The time of readers, tokenizers and metrics grows at most as n^1.3 for adversarial texts of n = 1 kB to 100 kB.

Only ratios of CPU times are compared, each the minimum of several, so that a busy machine does not fail a test.
"""

import contextlib
import importlib.metadata
import json
import pathlib
import random
import time

import pytest

from remixer_t5x import untrusted_files
from remixer_t5x.checkpoints import compatibility
from remixer_t5x.errors import UserError
from remixer_tasks import local_files
from remixer_tasks.benchmarks import text_metrics
from remixer_tasks.files import cache, row_files, text_lines
from remixer_tasks.pair_inputs import TextInputs
from tests.remixer_tasks.test_every_vocabulary import VOCABULARIES

SIZES = (1_000, 10_000, 100_000)
# The largest allowed exponent, and the time to which shorter times are rounded up.
EXPONENT, FLOOR_SECONDS = 1.3, 0.01
LETTERS = ''.join(random.Random(0).choices('the', k=1_000))
# Texts are repeated up to the size; functions return a text of about that size.
TEXTS = {
    'letters': LETTERS,
    'one letter': 'a',
    'spaces': ' ',
    'words': 'the, ',
    'apostrophes': "'",
    'two-byte letters': 'é',
    'combining marks': '\u0301',
    'Chinese': '模型',
    'lines': 10 * 'a . ' + '\n',
    'blank lines': 20 * ' ' + '\n',
}
CONTENTS = {
    **TEXTS,
    'NUL lines': 20 * '\0' + '\n',
    'quotes': '"',
    'open quote': lambda size: 'a,b\n"' + 'x x x x x x x x\n' * (size // 16),
    'columns': lambda size: ','.join(f'c{number}' for number in range(size // 7)) + '\n1\n',
    'tabs': '\t',
    'open brackets': '{"text": [',
    'array': lambda size: '[' + '{"text": "a"}, ' * (size // 15) + '{}]',
    'long number': lambda size: '{"text": 1.' + '1' * size + '}',
    'escapes': lambda size: '{"text": "' + '\\ud800' * (size // 6) + '"}',
    'names': lambda size: '{' + ', '.join(f'"c{number}": 0' for number in range(size // 12)) + ', "c0": 1}',
    'continued value': lambda size: 'A = \\\n' + (20 * ' ' + '1\\\n') * (size // 23),
}


def processor_seconds(function, argument):
    begun = time.process_time()
    try:
        function(argument)
    except UserError as error:
        assert '\n' not in str(error)
    return time.process_time() - begun


def find_steep(function, texts, prepare=lambda text: text):
    """Returns the texts for which the CPU time of `function(prepare(text))` grows too fast, with its seconds."""
    steep = {}
    for name, text in texts.items():
        seconds = [FLOOR_SECONDS]
        for size in SIZES:
            argument = prepare(text(size) if callable(text) else (text * (size // len(text) + 1))[:size])
            limit = max(seconds[-1], FLOOR_SECONDS) * 10**EXPONENT
            tries = []
            while not tries or (tries[-1] > limit and len(tries) < 4):
                tries.append(processor_seconds(function, argument))
            seconds.append(min(tries))
            if seconds[-1] > limit:
                steep[name] = seconds[1:]
                break
    return steep


def test_the_exponent_of_time_growth_is_measured(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, 'process_time', lambda: clock[0])

    def spend(exponent):
        return lambda text: clock.append(clock.pop() + (len(text) / SIZES[1]) ** exponent)

    assert find_steep(spend(1.4), {'a': 'a'}).keys() == {'a'} and not find_steep(spend(1.2), {'a': 'a'})


def make_reader(read, *arguments):
    """Returns a function that reads all items of a file."""

    def read_all(path):
        for _ in read(path, *arguments):
            pass

    return read_all


def parse_json_file(path):
    with contextlib.suppress(untrusted_files.InvalidJsonError):
        untrusted_files.parse_json(pathlib.Path(path).read_bytes())


MALFORMED = text_lines.BadRecords(False)
READERS = {
    **{
        f'{kind} of txt': make_reader(
            local_files.read_documents, local_files.TextLayout('txt', txt_documents=kind), MALFORMED
        )
        for kind in ('paragraph', 'line', 'file')
    },
    **{
        f'texts of {form}': make_reader(local_files.read_documents, local_files.TextLayout(form), MALFORMED)
        for form in ('jsonl', 'tsv')
    },
    **{
        f'rows of {form}': make_reader(row_files.read_rows, row_files.RowLayout(form), MALFORMED)
        for form in ('jsonl', 'tsv', 'csv')
    },
    'another encoding': make_reader(text_lines.read_valid_lines, MALFORMED, 'latin-1'),
    'texts of infer': make_reader(TextInputs),
    'JSON lines': make_reader(untrusted_files.read_json_lines),
    'JSON': parse_json_file,
    'gin of a checkpoint': lambda path: compatibility.parse_bindings(pathlib.Path(path).read_text()),
}


@pytest.mark.parametrize('name', READERS)
def test_readers_take_time_in_proportion_to_the_file(name, tmp_path, monkeypatch):
    monkeypatch.setattr(text_lines, '_CHUNK', 1000)

    def write(text):
        (tmp_path / 'text.txt').write_text(text)
        return str(tmp_path / 'text.txt')

    assert not find_steep(READERS[name], CONTENTS, write)


def test_dividing_files_into_jobs_takes_time_in_proportion_to_their_number():
    files = {'small files': lambda count: [cache.FileState(f'{number}.txt', 100, 0) for number in range(count)]}
    assert not find_steep(lambda files: local_files.split_into_jobs(files, local_files.TextLayout(), 8_000), files)


@pytest.mark.parametrize('name', ['sentencepiece', 'bytes', 'words', 'wordpiece', 'gpt2'])
def test_tokenizers_take_time_in_proportion_to_the_text(name, tmp_path):
    if name == 'sentencepiece' and importlib.metadata.version('sentencepiece') < '0.2.3':
        pytest.skip('sentencepiece before 0.2.3, which the extra `beam` requires, takes quadratic time')
    vocabulary = VOCABULARIES[name](tmp_path)
    vocabulary.decode(vocabulary.encode('the'))
    assert not find_steep(lambda text: vocabulary.decode(vocabulary.encode(text)), TEXTS)


@pytest.mark.parametrize('name', text_metrics.METRICS_BY_NAME)
def test_metrics_take_time_in_proportion_to_the_text(name):
    """ROUGE-L's longest common subsequence is quadratic in the number of words, by definition."""
    texts = {kind: text for kind, text in TEXTS.items() if name != 'rouge'}
    targets = (lambda text: json.dumps({'text': [text]})) if name == 'span_answers' else str
    assert not find_steep(
        lambda text: text_metrics.METRICS_BY_NAME[name]([targets(text), targets('a')], [text + ' b', 'b']), texts
    )
