import json
import pathlib
import shutil
import string

import pytest
import tensorflow as tf

from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_tasks import vocabularies
from remixer_tasks.corpora.text_corpus import ParsedCorpus


def corpus(words=2000, name='words'):
    lines = [f'the word {number * 7919 % 10007} stands beside {number * 104729 % 9973}' for number in range(words)]
    return ParsedCorpus(name, f'{name} {words}', lambda malformed: iter(lines))


def test_a_trained_vocabulary_has_its_size_and_the_ids_of_t5():
    vocabulary = vocabularies.trained(corpus(), 400)
    assert vocabulary.vocab_size == 400
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert vocabulary.encode('<extra_id_0>') == [399]
    assert vocabulary.encode('<extra_id_99>') == [300]
    ids = vocabulary.encode('the word 17 stands')
    assert max(ids) < 300 and vocabulary.decode(ids) == 'the word 17 stands'


def test_characters_that_the_text_lacks_have_ids():
    """Labels such as `not_entailment` must come back, or no answer would equal them."""
    text = 'not_entailment ' + string.printable.strip()
    assert '_' not in ''.join(corpus().training_documents())
    for size in (228, 400):
        vocabulary = vocabularies.trained(corpus(), size)
        assert vocabulary.unk_id not in vocabulary.encode(text)
        assert vocabulary.decode(vocabulary.encode(text)) == text


def test_training_is_lazy_cached_and_deterministic(cache_folder, monkeypatch, capsys):
    first = vocabularies.trained(corpus(), 400)
    assert not cache_folder.exists(), 'nothing is read or trained before the first use'
    model = first.sp_model
    assert 'training a vocabulary of 300 pieces' in capsys.readouterr().err
    assert vocabularies.trained(corpus(), 400).sp_model == model
    assert capsys.readouterr().err == ''
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(cache_folder) + '2')
    again = vocabularies.trained(corpus(), 400)
    assert again.sp_model == model
    assert again.sentencepiece_model_file != first.sentencepiece_model_file


def test_a_vocabulary_is_trained_while_a_graph_is_traced():
    vocabulary = vocabularies.trained(corpus(), 400)
    dataset = tf.data.Dataset.from_tensors('the word').map(vocabulary.encode_tf)
    assert next(dataset.as_numpy_iterator()).tolist() == vocabulary.encode('the word')


def test_vocabularies_of_other_texts_or_sizes_differ():
    paths = {
        vocabularies.trained(corpus(words), size).sentencepiece_model_file for words in (10, 20) for size in (400, 500)
    }
    assert len(paths) == 4


@pytest.mark.parametrize(('size', 'message'), [(227, 'at least 228'), (30000, 'allows at most .* got 29900')])
def test_impossible_sizes_are_rejected(size, message):
    with pytest.raises(UserError, match=message) as error:
        vocabularies.trained(corpus(), size).vocab_size  # noqa: B018
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('missing.model', 'No such file or directory; use a local file'),
        ('text.model', 'this is not a SentencePiece model.*; use a local file'),
        ('empty.model', 'this is not a SentencePiece model.*; use a local file'),
    ],
)
def test_unreadable_model_files_are_rejected(tmp_path, name, message):
    (tmp_path / 'text.model').write_text('no model')
    (tmp_path / 'empty.model').write_text('')
    vocabulary = vocabularies.sentencepiece(str(tmp_path / name))
    with pytest.raises(UserError, match=message) as error:
        vocabulary.vocab_size  # noqa: B018
    assert '\n' not in str(error.value)


def test_ids_of_the_model_of_t5(real_data: pathlib.Path):
    vocabulary = vocabularies.sentencepiece(str(real_data / 't5_spm' / 'spiece.model'))
    assert vocabulary.vocab_size == 32100
    # As in the documentation of T5's released tokenizer.
    assert vocabulary.encode('<extra_id_0>') == [32099]
    assert vocabulary.encode('Thank you') == [1562, 25]


def byte_pair_files(folder):
    folder.mkdir()
    pieces = [*map(chr, range(33, 127)), 'Ġ', 'th', 'the', '<|endoftext|>']
    (folder / 'vocab.json').write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (folder / 'merges.txt').write_text('#version: 0.2\nt h\nth e\n')
    return vocabularies.byte_pairs(str(folder), len(pieces) - 1)


def wordpiece_file(folder):
    pytest.importorskip('tokenizers', reason='BERT needs the package tokenizers')
    folder.mkdir()
    pieces = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'the', 'word', '##s']
    (folder / 'vocab.txt').write_text('\n'.join(pieces) + '\n')
    return vocabularies.wordpiece(str(folder / 'vocab.txt'))


@pytest.mark.parametrize(
    'make',
    [
        lambda folder: vocabularies.trained(corpus(), 400),
        lambda folder: vocabularies.trained(corpus(), 310, extra_ids=10),
        lambda folder: vocabularies.byte(extra_ids=7),
        lambda folder: vocabularies.words(corpus()),
        byte_pair_files,
        wordpiece_file,
    ],
    ids=['trained', '10 sentinels', 'bytes', 'words', 'byte pairs', 'wordpiece'],
)
def test_a_saved_vocabulary_gives_the_same_ids_without_its_sources(make, tmp_path, monkeypatch):
    vocabulary = make(tmp_path / 'source')
    texts = ['the word 17 stands', 'the  unknown', '', 'x']
    ids, record = [vocabulary.encode(text) for text in texts], task_vocabulary.vocabulary_record(vocabulary)
    assert task_vocabulary.save_vocabulary(vocabulary, tmp_path / 'run/vocabulary')
    shutil.rmtree(tmp_path / 'source', ignore_errors=True)
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'empty'))
    shutil.move(tmp_path / 'run', tmp_path / 'moved')
    for place in ('moved', 'moved/vocabulary'):
        again = vocabularies.saved(str(tmp_path / place))
        assert task_vocabulary.vocabulary_record(again) == record and again.eos_id == vocabulary.eos_id
        assert [again.encode(text) for text in texts] == ids
        assert [again.encode_tf(text).numpy().tolist() for text in texts] == ids
        assert [again.decode(row) for row in ids] == [vocabulary.decode(row) for row in ids]
    assert not (tmp_path / 'empty').exists()


@pytest.mark.parametrize(
    'text',
    ['{}', '{"kind": "new"}', '{"kind": "bytes", "extra_ids": -1}', '{"kind": "bytes", "extra_ids": 99999}', 'x'],
)
def test_a_damaged_saved_vocabulary_is_rejected(tmp_path, text):
    (tmp_path / 'vocabulary.json').write_text(text)
    with pytest.raises(UserError) as error:
        vocabularies.saved(str(tmp_path))
    assert 'vocabulary.json' in str(error.value) and '\n' not in str(error.value)
