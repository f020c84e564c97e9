"""Words and answers of texts are aligned with tokens, for every kind of vocabulary."""

import json

import numpy as np
import pytest
import seqio

from remixer_t5x.data import token_alignment
from remixer_t5x.errors import UserError
from tests.support.hf_folders import SPIECE

BYTES, PIECES = seqio.ByteVocabulary(extra_ids=0), seqio.SentencePieceVocabulary(str(SPIECE), extra_ids=0)
SQUAD = 'question: who is it? context: it is Ada (1815), I think'


class Uncased(seqio.ByteVocabulary):
    """Begins every text with id 9 as BERT's vocabulary does, and changes the length of texts."""

    bos_id = 9

    def _encode(self, s):
        return [9, *super()._encode(s.lower().replace('ß', 'ss'))]


@pytest.mark.parametrize('vocabulary', [BYTES, PIECES, Uncased(extra_ids=0)], ids=['bytes', 'pieces', 'uncased'])
def test_each_token_has_its_word_and_characters(vocabulary):
    text = 'this  is\ta Straße-test'
    encoded = token_alignment.encode_words(vocabulary, text, 64)
    words = text.split()
    assert [encoded.words[at] for at in encoded.first_tokens()] == [0, 1, 2, 3]
    assert encoded.ids[-1] == vocabulary.eos_id and encoded.words[-1] == -1
    for word, (start, end) in zip(encoded.words, encoded.offsets, strict=True):
        assert (start == end) if word < 0 else text[start:end] in words[word]
    starts = [encoded.offsets[at][0] for at in encoded.first_tokens()]
    assert starts == [text.index(word, start) for word, start in zip(words, starts, strict=True)]
    short = token_alignment.encode_words(vocabulary, text, 6)
    assert short.ids == [*encoded.ids[:5], vocabulary.eos_id] and short.num_tokens == len(encoded.ids)


def test_labels_are_at_the_first_tokens_of_words():
    arrays = token_alignment.tag_arrays('ab c def', 'O X O', BYTES, 6, ('O', 'X'), 'task')
    assert arrays['label_weights'].tolist() == [1, 0, 1, 1, 0, 0]
    assert arrays['labels'].tolist() == [0, 0, 1, 0, 0, 0]
    for target, message in (('O X', 'a tag for each word'), ('O Y O', 'LABELS must include .* add Y')):
        with pytest.raises(UserError, match=message):
            token_alignment.tag_arrays('ab c def', target, BYTES, 6, ('O', 'X'), 'task')


@pytest.mark.parametrize(
    ('vocabulary', 'answer', 'span'),
    [
        *((BYTES, 'Ada', 'Ada'), (BYTES, '1815', '1815'), (BYTES, None, ''), (BYTES, 'think', None)),
        # Its unknown piece has several characters, so the answer is the whole word.
        *((PIECES, 'it', 'it'), (PIECES, '1815', '(1815),'), (PIECES, None, ''), (PIECES, 'think', None)),
    ],
)
def test_answer_is_found_in_the_tokens(vocabulary, answer, span):
    """A truncated answer has no weight (None); an unanswerable question has position 0."""
    context = SQUAD.partition('context: ')[2]
    length = token_alignment.encode_words(vocabulary, SQUAD, 99).num_tokens - 2 * (span is None)
    answers = (
        {'text': [answer], 'answer_start': [context.index(answer)]} if answer else {'text': [], 'answer_start': []}
    )
    arrays = token_alignment.span_arrays(SQUAD, json.dumps(answers), vocabulary, length)
    encoded = token_alignment.encode_words(vocabulary, SQUAD, length)
    start, end = int(arrays['start_positions']), int(arrays['end_positions'])
    assert arrays['label_weights'] == (span is not None)
    if span:
        assert SQUAD[encoded.offsets[start][0] : encoded.offsets[end][1]] == span
        assert np.all(encoded.is_context()[start : end + 1])
    else:
        assert start == end == 0 and not encoded.is_context()[0]


def test_invalid_texts_raise():
    with pytest.raises(UserError, match="INPUTS must contain 'context: '"):
        token_alignment.context_start('question: who?')
    with pytest.raises(UserError, match='INPUTS must be two texts with a tab'):
        token_alignment.encode_pair(BYTES, 'one text', 8)
