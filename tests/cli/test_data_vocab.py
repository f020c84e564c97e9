"""`remixer-t5x data` and `vocab` with local text files and every objective."""

import numpy as np
import pytest
import seqio

from remixer_t5x.cli import data, main
from tests.support.paths import ROOT

# Expected output for objectives without end tokens in the targets, or with prompts.
EXPECTED = {
    'masked_lm': ('  inputs, 48 tokens: ', '<extra_id_0>'),
    'ul2': ('  inputs, ', ('[NLU]', '[NLG]', '[S2S]')),
}
TEXT = '\n\n'.join(f'Paragraph {number} tells of {number * 7919 % 10007} naïve things.' for number in range(400))


@pytest.fixture
def own_text(tmp_path, monkeypatch, clean_environment):
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'a.txt').write_text(TEXT)
    return ['--gin_file=data/own_text.gin', f'--gin.FILES={tmp_path}/*.txt']


BYTES = ['--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384']


@pytest.mark.parametrize('objective', sorted(path.stem for path in (ROOT / 'configs' / 'objectives').iterdir()))
def test_every_objective_is_shown_with_ids_and_efficiency(objective, own_text, capsys):
    lengths = {'targets': 48} if objective == 'causal_lm' else {'inputs': 48, 'targets': 48}
    flags = [f'--gin.TASK_FEATURE_LENGTHS={lengths}', '--gin.DATA_NAME=mine', '--num_examples=3']
    assert main.main(['data', *own_text, f'--gin_file=objectives/{objective}.gin', *BYTES, *flags]) == 0
    out = capsys.readouterr().out
    line, word = EXPECTED.get(objective, ('  targets, ', '</s>'))
    assert out.startswith(f'mine_{objective}, split train, one example per row\n')
    assert line in out and 'ids: ' in out and '1.00 examples per row' in out
    assert any(each in out for each in ([word] if isinstance(word, str) else word))


PAIRS = ['--gin_file=data/own_pairs.gin', '--gin.INPUTS=text', '--gin.TARGETS=label']
CLASSIFIER = ["--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", '--gin_file=model_types/classifier.gin']


def test_examples_of_a_classifier_are_shown_and_unknown_labels_are_reported(own_text, tmp_path, capsys):
    (tmp_path / 'rows.tsv').write_text('text\tlabel\na\tyes\nb\tno\nc\tyes\nd\tno\n')
    command = ['data', *PAIRS, f'--gin.PAIRS={tmp_path}/rows.tsv', *BYTES, *CLASSIFIER, '--split=train']
    assert main.main([*command, "--gin.LABELS=('yes', 'no')", '--num_examples=1']) == 0
    assert 'inputs, 2 tokens: ' in capsys.readouterr().out
    assert main.main([*command, "--gin.LABELS=('maybe',)"]) == 2
    error = capsys.readouterr().err
    assert 'LABELS must include the targets of own_pairs, got maybe; add ' in error and ']' not in error


def test_a_mixture_of_text_pairs_is_shown_for_embedding_models(own_text, tmp_path, capsys):
    (tmp_path / 'rows.tsv').write_text('a\tb\tweight\nx\ty\t1\nz\tw\t0.5\nu\tv\t1\n')
    settings = ["--gin.INPUTS='{a}\\t{b}'", '--gin.TARGETS=weight', "--gin.MODEL_TYPE='embedding'", *CLASSIFIER[:1]]
    mixture = ['--gin_file=data/own_pairs.gin', '--gin_file=data/text_tasks.gin', '--gin.TASKS=[@text_pairs.task()]']
    command = ['data', *mixture, f'--gin.PAIRS={tmp_path}/rows.tsv', *BYTES, *settings, '--num_examples=1']
    assert main.main(command) == 0
    assert 'inputs, 2 tokens: ' in capsys.readouterr().out


def test_vocab_shows_special_ids_and_pieces(own_text, capsys):
    assert main.main(['vocab', *own_text, '--gin.VOCAB_SIZE=300', '--text=Paragraph 7']) == 0
    output = capsys.readouterr().out
    assert 'ids          300' in output
    assert '<extra_id_0> is 299, <extra_id_99> is 200' in output
    assert '▁' in output
    assert main.main(['vocab', *own_text, *BYTES, '--text=7<extra_id_3>']) == 0
    assert capsys.readouterr().out.endswith("2 tokens\n      58  '7'\n     355  <extra_id_3>\n")


def test_ids_of_a_vocabulary_without_texts_are_shown():
    assert data.decode_ids([5, 6, 1], seqio.PassThroughVocabulary(50, eos_id=1)) == '[5, 6] </s>'


def test_the_packing_efficiency_is_computed():
    tokens, segments = np.array([5, 1, 7, 0]), np.array([1, 1, 2, 0])
    row = {'encoder_input_tokens': tokens, 'encoder_segment_ids': segments}
    row |= {'decoder_target_tokens': tokens[:2], 'decoder_segment_ids': segments[:2]}
    assert data.describe_packing_efficiency([row]) == [
        'inputs: 75.0% of 4 slots are tokens, 2.00 examples per row (1 row measured)',
        'targets: 100.0% of 2 slots are tokens, 1.00 examples per row (1 row measured)',
    ]
