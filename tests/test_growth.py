"""Tokenizers, readers and metrics take time in proportion to the length of their text, also for unfavourable texts.

ROUGE-L is not here: its longest common subsequence is quadratic by definition.
"""

import itertools
import json
import time

import pytest

from remixer_t5x import untrusted_files
from remixer_t5x.evaluate.text_inputs import TextInputs
from remixer_tasks.benchmarks import pair_metrics
from tests.remixer_tasks.test_every_vocabulary import VOCABULARIES

SIZES = (10_000, 100_000, 1_000_000)
# Texts are repetitions of these: one word, one run of spaces, short words, empty lines, letters of two bytes.
TEXTS = {'one word': 'th', 'spaces': ' ', 'words': 'the, ', 'line ends': '\n', 'accents': 'é'}
# At most this exponent of the length; times below the floor are noise.
EXPONENT, FLOOR_SECONDS = 1.3, 0.05


def check_growth(function, text):
    seconds = []
    for size in SIZES:
        argument = (text * size)[:size]
        begun = time.process_time()
        function(argument)
        seconds.append(time.process_time() - begun)
    for shorter, longer in itertools.pairwise(seconds):
        assert longer <= max(shorter, FLOOR_SECONDS) * 10**EXPONENT, seconds


@pytest.mark.parametrize('text', TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize('name', ['sentencepiece', 'words', 'wordpiece', 'byte_pairs'])
def test_tokenizers_take_time_in_proportion_to_the_text(name, text, tmp_path):
    if name == 'wordpiece':
        pytest.importorskip('tokenizers', reason="pip install 'remixer-t5x[wordpiece]'")
    vocabulary = VOCABULARIES[name](tmp_path)
    vocabulary.encode('the')
    check_growth(vocabulary.encode, text)


@pytest.mark.parametrize('text', TEXTS.values(), ids=TEXTS)
def test_readers_and_metrics_take_time_in_proportion_to_the_text(text, tmp_path):
    path = tmp_path / 'text'

    def read_lines(content):
        path.write_text(content)
        list(TextInputs(str(path)))

    def read_json(content):
        path.write_text(json.dumps({'text': content}) + '\n' + content)
        list(untrusted_files.json_lines(path))

    for function in (read_lines, read_json, lambda content: pair_metrics.squad([content], [content])):
        check_growth(function, text)
