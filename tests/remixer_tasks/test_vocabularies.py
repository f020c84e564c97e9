import pathlib
import string

import pytest

from remixer_tasks import text_pairs, vocabularies
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from tests.support.error_lines import error_message


def corpus(num_lines=2000, **settings):
    lines = [f'the word {number * 7919 % 10007} stands beside {number * 104729 % 9973}' for number in range(num_lines)]
    return ParsedCorpus('words', f'words {num_lines}', lambda malformed: iter(lines), **settings)


def test_a_trained_vocabulary_has_its_size_and_the_ids_of_t5():
    """Characters that the text lacks have ids; otherwise, no answer could equal a label such as `not_entailment`."""
    vocabulary = vocabularies.trained(corpus(), 400)
    assert vocabulary.vocab_size == 400
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert vocabulary.encode('<extra_id_0>') == [399]
    assert vocabulary.encode('<extra_id_99>') == [300]
    ids = vocabulary.encode('the word 17 stands')
    assert max(ids) < 300 and vocabulary.decode(ids) == 'the word 17 stands'
    assert '_' not in ''.join(corpus().read_training_documents())
    text = 'not_entailment ' + string.printable.strip()
    assert vocabulary.unk_id not in vocabulary.encode(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_training_is_lazy_cached_and_deterministic(cache_folder, monkeypatch, capsys):
    """A larger fraction holds out documents on which the first vocabulary was trained."""
    few, other = (text_pairs.PairTexts(corpus(500, **each)) for each in ({}, {'validation_fraction': 0.5}))
    first = vocabularies.trained(few, 300)
    assert not cache_folder.exists(), 'nothing is read or trained before the first use'
    model = first.sp_model
    assert 'training a vocabulary of 200 pieces' in capsys.readouterr().err
    assert vocabularies.trained(few, 300).sp_model == model
    assert capsys.readouterr().err == ''
    many = vocabularies.trained(other, 300)
    assert first != many and model != many.sp_model
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(cache_folder) + '2')
    again = vocabularies.trained(few, 300)
    assert again.sp_model == model and again.sentencepiece_model_file != first.sentencepiece_model_file


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: vocabularies.trained(corpus(), 150), 'smaller than required_chars. 50 vs 98'),
        (lambda: vocabularies.trained(corpus(), 30000), 'cannot train 29900 pieces besides sentinels (Vocab'),
        (lambda: vocabularies.sentencepiece('/missing.model'), 'No such file or directory); use a local file'),
        (lambda: vocabularies.sentencepiece(__file__), 'cannot be read as a SentencePiece model'),
    ],
)
def test_impossible_sizes_and_unreadable_models_are_rejected(make, message):
    assert message in error_message(lambda: make().vocab_size)


def test_ids_of_t5s_sentencepiece_model(real_data: pathlib.Path):
    vocabulary = vocabularies.sentencepiece(str(real_data / 't5_spm' / 'spiece.model'))
    assert vocabulary.vocab_size == 32100
    # From the documentation of T5's tokenizer.
    assert vocabulary.encode('<extra_id_0>') == [32099]
    assert vocabulary.encode('Thank you') == [1562, 25]
