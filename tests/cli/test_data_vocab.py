"""`remixer-t5x data` and `vocab` through the shipped gin files, on a user's own text."""

import numpy as np
import pytest

from remixer_t5x.cli import main
from remixer_t5x.cli.data import preview

TEXT = '\n\n'.join(f'Paragraph {number} tells of {number * 7919 % 10007} naïve things.' for number in range(400))


@pytest.fixture
def own_text(tmp_path, monkeypatch):
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'a.txt').write_text(TEXT)
    return ['--gin_file=data/own_text.gin', f'--gin.FILES={tmp_path}/*.txt']


BYTES = ['--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384']


def test_data_shows_text_ids_and_efficiency(own_text, capsys):
    assert main.main(['data', *own_text, *BYTES, '--num_examples=1']) == 0
    shown = capsys.readouterr().out
    assert 'own_text_span_corruption, split train' in shown
    assert '<extra_id_0>' in shown and '</s>' in shown and 'ids: ' in shown
    assert 'inputs: 9' in shown and '1.00 examples per row' in shown


def test_vocab_shows_special_ids_and_pieces(own_text, capsys):
    assert main.main(['vocab', *own_text, '--gin.VOCAB_SIZE=300', '--text=Paragraph 7']) == 0
    shown = capsys.readouterr().out
    assert 'ids          300' in shown
    assert '<extra_id_0> is 299, <extra_id_99> is 200' in shown
    assert '▁' in shown


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (['--split=test'], "must be one of train, validation, got 'test'"),
        (['--num_examples=-1'], "'-1' is not a whole number from 0"),
        (['--gin.FILES=/nowhere/*.txt'], 'FILES must match a file, got /nowhere/*.txt'),
        (['--gin.MIXTURE_OR_TASK_NAME=no_such_task'], "got 'no_such_task'"),
        (["--gin.TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 64}"], "use {'inputs': 512, 'targets': 114}"),
    ],
)
def test_mistakes(own_text, capsys, flags, said):
    assert main.main(['data', *own_text, *BYTES, *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith('error: ') and said in error


def test_packing_efficiency():
    rows = [
        {
            'encoder_input_tokens': tokens,
            'decoder_target_tokens': tokens[:2],
            'encoder_segment_ids': segments,
            'decoder_segment_ids': segments[:2],
        }
        for tokens, segments in [(np.array([5, 1, 7, 0]), np.array([1, 1, 2, 0]))]
    ]
    assert preview.efficiency(rows) == [
        'inputs: 75.0% of 4 slots are tokens, 2.00 examples per row (1 rows measured)',
        'targets: 100.0% of 2 slots are tokens, 1.00 examples per row (1 rows measured)',
    ]
