"""Alignment of words and answers with tokens, for every kind of vocabulary."""

import json

import numpy as np
import pytest
import seqio

from remixer_t5x.data import token_alignment
from remixer_t5x.errors import UserError
from remixer_tasks.vocabulary.huggingface_tokenizer import WordPieceVocabulary
from tests.support import references
from tests.support.hf_folders import SPIECE

BYTES, PIECES = seqio.ByteVocabulary(extra_ids=0), seqio.SentencePieceVocabulary(str(SPIECE), extra_ids=0)
SQUAD = 'question: who is it? context: it is Ada (1815), I think'


class Uncased(seqio.ByteVocabulary):
    """Prepends id 9 to every text, as BERT does, and changes the length of texts."""

    bos_id = 9

    def _encode(self, s):
        return [9, *super()._encode(s.lower().replace('ß', 'ss'))]


@pytest.mark.parametrize('vocabulary', [BYTES, PIECES, Uncased(extra_ids=0)], ids=['bytes', 'pieces', 'uncased'])
def test_each_token_has_its_word_and_characters(vocabulary):
    text = 'this  is\ta Straße-test'
    encoded = token_alignment.encode_words(vocabulary, text, 64)
    words = text.split()
    assert [encoded.words[at] for at in encoded.find_first_tokens()] == [0, 1, 2, 3]
    assert encoded.ids[-1] == vocabulary.eos_id and encoded.words[-1] == -1
    for word, (start, end) in zip(encoded.words, encoded.offsets, strict=True):
        assert (start == end) if word < 0 else text[start:end] in words[word]
    starts = [encoded.offsets[at][0] for at in encoded.find_first_tokens()]
    assert starts == [text.index(word, start) for word, start in zip(words, starts, strict=True)]
    short = token_alignment.encode_words(vocabulary, text, 6)
    assert short.ids == [*encoded.ids[:5], vocabulary.eos_id] and short.num_tokens == len(encoded.ids)


def test_labels_are_at_the_first_token_of_each_word():
    arrays = token_alignment.make_tag_arrays('ab c def', 'O X O', BYTES, 6, ('O', 'X'), 'task')
    assert arrays['label_weights'].tolist() == [1, 0, 1, 1, 0, 0]
    assert arrays['labels'].tolist() == [0, 0, 1, 0, 0, 0]
    # U+200B has no tokens.
    arrays = token_alignment.make_tag_arrays('\u200b it is', 'X O X', PIECES, 8, ('O', 'X'), 'task')
    encoded = token_alignment.encode_words(PIECES, '\u200b it is', 8)
    assert [encoded.words[at] for at in encoded.find_first_tokens()] == [1, 2]
    assert arrays['labels'][encoded.find_first_tokens()].tolist() == [0, 1]
    for target, message in (('O X', 'one tag per word'), ('O Y O', 'LABELS must include .* add Y')):
        with pytest.raises(UserError, match=message):
            token_alignment.make_tag_arrays('ab c def', target, BYTES, 6, ('O', 'X'), 'task')


@pytest.mark.parametrize(
    ('vocabulary', 'answer', 'span'),
    [
        *((BYTES, 'Ada', 'Ada'), (BYTES, '1815', '1815'), (BYTES, None, ''), (BYTES, 'think', 'think')),
        # The unknown piece stands for several characters, so the span is the whole word.
        *((PIECES, 'it', 'it'), (PIECES, '1815', '(1815),'), (PIECES, None, ''), (PIECES, 'think', 'think')),
    ],
)
def test_the_span_of_an_answer_covers_its_tokens(vocabulary, answer, span):
    """A question without answer ('') has position 0."""
    context = SQUAD.partition('context: ')[2]
    length = token_alignment.encode_words(vocabulary, SQUAD, 99).num_tokens
    answers = (
        {'text': [answer], 'answer_start': [context.index(answer)]} if answer else {'text': [], 'answer_start': []}
    )
    arrays = token_alignment.make_span_arrays(SQUAD, json.dumps(answers), vocabulary, length)
    encoded = token_alignment.encode_words(vocabulary, SQUAD, length)
    start, end = int(arrays['start_positions'][0]), int(arrays['end_positions'][0])
    assert arrays['label_weights'].tolist() == [1]
    if span:
        assert SQUAD[encoded.offsets[start][0] : encoded.offsets[end][1]] == span
        assert np.all(encoded.compute_context_mask()[start : end + 1])
    else:
        assert start == end == 0 and not encoded.compute_context_mask()[0]


@pytest.fixture
def word_pieces(tmp_path):
    letters = 'abcdefghijklmnopqrstuvwxyz:'
    pieces = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *letters, *(f'##{letter}' for letter in letters)]
    (tmp_path / 'vocab.txt').write_text('\n'.join(pieces))
    return str(tmp_path / 'vocab.txt')


@pytest.mark.parametrize(('length', 'stride'), [(60, 4), (60, 1), (60, 90), (512, 128)])
def test_windows_equal_transformers(length, stride, word_pieces):
    references.require('transformers', 'tokenizers')
    import tokenizers
    import transformers

    backend = tokenizers.BertWordPieceTokenizer(word_pieces)._tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    rng, vocabulary = np.random.default_rng(0), WordPieceVocabulary(word_pieces)
    for words in range(1, 40, 3):
        context = ' '.join(''.join(rng.choice(list('abc'), rng.integers(1, 5))) for _ in range(words))
        question = 'question: who is it context: '
        encoded = token_alignment.encode_question(vocabulary, question + context, length, stride)
        # transformers counts the overlap, and adds a [SEP] after the question.
        room = length - len(vocabulary.encode(question)) - 1
        windows = tokenizer(
            question, context, truncation='only_second', max_length=length + 1, stride=room - min(room, stride),
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        assert len(windows['input_ids']) == len(encoded.windows) and encoded.num_tokens <= length
        for row, window in enumerate(encoded.windows):
            is_context = [part == 1 for part in windows.sequence_ids(row)]
            offsets = [
                (begin + len(question), end + len(question))
                for (begin, end), inside in zip(windows['offset_mapping'][row], is_context, strict=True)
                if inside
            ]
            assert [window.offsets[at] for at in np.flatnonzero(window.compute_context_mask())] == offsets
            first_separator = windows['input_ids'][row].index(vocabulary.eos_id)
            expected = [id for at, id in enumerate(windows['input_ids'][row]) if at != first_separator]
            assert window.ids == expected


@pytest.mark.parametrize('vocabulary', [BYTES, PIECES, Uncased(extra_ids=0)], ids=['bytes', 'pieces', 'uncased'])
@pytest.mark.parametrize('answer', ['1815', 'it is Ada (1815), I think'])
def test_windows_with_the_answer_are_labelled(answer, vocabulary):
    """As run_squad labels them: the tokens of the whole answer, or 0."""
    length = token_alignment.encode_words(vocabulary, SQUAD.partition('it is Ada')[0], 99).num_tokens + 14
    first = SQUAD.index(answer, SQUAD.index('context: '))
    target = json.dumps({'text': [answer], 'answer_start': [first - SQUAD.index('it is Ada')]})
    arrays = token_alignment.make_span_arrays(SQUAD, target, vocabulary, length, stride=3)
    windows = token_alignment.encode_question(vocabulary, SQUAD, length, stride=3).windows
    assert arrays['encoder_input_tokens'].shape == (len(windows), length)
    labels = np.stack([arrays['start_positions'], arrays['end_positions']], axis=1).tolist()
    for window, (start, end) in zip(windows, labels, strict=True):
        characters = {at for begin, stop in window.offsets for at in range(begin, stop)}
        if {at for at in range(first, first + len(answer)) if SQUAD[at] != ' '} <= characters:
            assert answer in SQUAD[window.offsets[start][0] : window.offsets[end][1]]
        else:
            assert start == end == 0
    assert arrays['label_weights'].tolist() == [1] * len(windows)


def test_long_questions_are_truncated_to_half_of_the_length():
    encoded = token_alignment.encode_question(BYTES, SQUAD, 20, 4)
    assert encoded.num_tokens == 20 + len('question:whoisit?context:') - 10
    assert all(window.ids[:10] == encoded.whole.ids[:10] and len(window.ids) <= 20 for window in encoded.windows)
    assert {at for window in encoded.windows for at in window.ids[10:]} == {*encoded.whole.ids[25:]}


@pytest.mark.parametrize('text', ['question: which context: this? context: a Paris', 'context: a Paris context: b'])
def test_question_and_context_may_contain_the_prefix_of_the_context(text):
    target = json.dumps({'text': ['Paris'], 'answer_start': [2]})
    arrays = token_alignment.make_span_arrays(text, target, BYTES, 60)
    first, last = (int(arrays[f'{name}_positions'][0]) for name in ('start', 'end'))
    assert BYTES.decode(arrays['encoder_input_tokens'][0, first : last + 1]) == 'Paris'
    encoded = token_alignment.encode_question(BYTES, text, 60).whole
    assert encoded.compute_context_mask()[first : last + 1].all()


def test_invalid_texts_raise_an_error():
    for start in (5, 999):
        with pytest.raises(UserError, match=f"answer_start must .* got {start} for 'Ada' in 'question: .*;"):
            token_alignment.make_span_arrays(SQUAD, json.dumps({'text': ['Ada'], 'answer_start': [start]}), BYTES, 60)
    with pytest.raises(UserError, match="INPUTS must contain 'context: '"):
        token_alignment.encode_question(BYTES, 'question: who?', 60)
    with pytest.raises(UserError, match='INPUTS must be two texts separated by a tab.* pass --gin.INPUTS="'):
        token_alignment.encode_pair(BYTES, 'one text', 8)
    with pytest.raises(ValueError, match='finite and at least 0'):
        token_alignment.make_pair_arrays('a\tb', 'nan', BYTES, 4)
