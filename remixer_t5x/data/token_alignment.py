"""Aligns the words and characters of a text with its tokens, for models that return an output for each token.

Each word is encoded separately, as tokenizers in transformers do with `is_split_into_words=True`, so each token belongs
to exactly one word.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError

_WORD_PATTERN = re.compile(r'\S+')
# Prefix of the context in input texts such as 'question: ... context: ...'.
CONTEXT_PREFIX = 'context: '
# Separates the two texts of a pair.
PAIR_SEPARATOR = '\t'


class EncodedText(NamedTuple):
    """A text and its tokens.

    Attributes:
        text: the original text.
        ids: the truncated token ids, including the end token.
        words: the index of each token's word; -1 for special tokens.
        offsets: the character range of each token in `text`; (0, 0) for special tokens.
        num_tokens: number of tokens before truncation.
    """

    text: str
    ids: list[int]
    words: list[int]
    offsets: list[tuple[int, int]]
    num_tokens: int

    def find_first_tokens(self) -> list[int]:
        """Returns the position of the first token of each word that remains after truncation."""
        return [at for at, word in enumerate(self.words) if word >= 0 and (at == 0 or self.words[at - 1] != word)]

    def compute_context_mask(self) -> np.ndarray:
        """Returns a [tokens] bool array that is True for tokens after the first CONTEXT_PREFIX.

        Later occurrences are more likely to belong to the long context than to the question. Raises UserError if the
        text does not contain CONTEXT_PREFIX.
        """
        if CONTEXT_PREFIX not in self.text:
            raise UserError(
                f"INPUTS must contain '{CONTEXT_PREFIX}' before the context, got {self.text!r:.60}; for example "
                "'question: {question} context: {context}'"
            )
        start = self.text.index(CONTEXT_PREFIX) + len(CONTEXT_PREFIX)
        return np.asarray([end > begin >= start for begin, end in self.offsets], bool)


class EncodedQuestion(NamedTuple):
    """A question with its context, split into windows that do not exceed the input length.

    Attributes:
        whole: the question and the full context, not truncated.
        windows: the windows; each consists of the tokens of the question and of one section of the context.
        num_tokens: number of tokens in the longest window before the question was truncated.
    """

    whole: EncodedText
    windows: list[EncodedText]
    num_tokens: int


def encode_words(vocabulary: Any, text: str, length: int) -> EncodedText:
    """Encodes `text` word by word, and truncates the result to `length` tokens, including the end token."""
    ids: list[int] = []
    words: list[int] = []
    offsets: list[tuple[int, int]] = []
    for index, match in enumerate(_WORD_PATTERN.finditer(text)):
        pieces = [int(piece) for piece in vocabulary.encode(match[0])]
        if pieces[:1] == [vocabulary.bos_id]:
            if index == 0:
                ids, words, offsets = pieces[:1], [-1], [(0, 0)]
            pieces = pieces[1:]
        ids += pieces
        words += [index] * len(pieces)
        offsets += _compute_piece_offsets(vocabulary, pieces, match)
    end = task_vocabulary.get_end_ids(vocabulary)
    limit, num_tokens = length - len(end), len(ids) + len(end)
    words, offsets = words[:limit] + [-1] * len(end), offsets[:limit] + [(0, 0)] * len(end)
    return EncodedText(text, ids[:limit] + end, words, offsets, num_tokens)


def encode_question(vocabulary: Any, text: str, length: int, stride: int | None = None) -> EncodedQuestion:
    """Encodes a question and overlapping windows of its context, as BERT's run_squad.py does.

    Args:
        vocabulary: the vocabulary that encodes each word.
        text: the input text, in the format `question: ... context: ...`.
        length: maximum number of tokens of a window, including the end token. If the text is longer, the question is
            truncated to half of this length.
        stride: number of context tokens between the starts of consecutive windows; None or a value larger than the
            window disables overlap.
    """
    whole = encode_words(vocabulary, text, sys.maxsize)
    is_context = whole.compute_context_mask()
    if whole.num_tokens <= length:
        return EncodedQuestion(whole, [whole], whole.num_tokens)
    end = len(whole.ids) - (vocabulary.eos_id is not None)
    question = int(np.argmax(is_context)) if is_context.any() else end
    prefix = min(question, length // 2)
    room = length - prefix - (len(whole.ids) - end)
    step = min(room, stride or room)
    windows = []
    # The last window is the first one that reaches the end of the context.
    for start in range(question, max(question + 1, end - room + step), step):
        tokens = [*range(prefix), *range(start, min(start + room, end)), *range(end, len(whole.ids))]
        window = whole._replace(
            ids=[whole.ids[at] for at in tokens],
            words=[whole.words[at] for at in tokens],
            offsets=[whole.offsets[at] for at in tokens],
            num_tokens=len(tokens),
        )
        windows.append(window)
    return EncodedQuestion(whole, windows, length + question - prefix)


def _compute_piece_offsets(vocabulary: Any, pieces: Sequence[int], word: re.Match[str]) -> list[tuple[int, int]]:
    """Returns the character range of each piece, or of the whole word if the vocabulary changes the word's length."""
    sizes = [len(vocabulary.decode([piece]).strip().removeprefix('##')) for piece in pieces]
    if sum(sizes) != len(word[0]):
        return [word.span()] * len(pieces)
    ends: np.ndarray = word.start() + np.cumsum(sizes)
    return [(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]


def make_tag_arrays(
    text: str, target: str, vocabulary: Any, length: int, labels: Sequence[str], name: str
) -> dict[str, np.ndarray]:
    """Returns the batch arrays of a text. `target` contains one tag per word.

    The first token of each word has the loss weight 1, all other tokens 0.
    """
    encoded, tags = encode_words(vocabulary, text, length), target.split()
    if len(tags) != len(text.split()):
        raise UserError(f'the targets of {name} must have one tag per word, got {len(tags)} tags for {text!r:.60}')
    if unknown := [tag for tag in tags if tag not in labels]:
        raise UserError(f'LABELS must include the tags of {name}, got {", ".join(labels)}; add {unknown[0]}')
    arrays: np.ndarray = np.zeros((2, length), np.float32)
    first = encoded.find_first_tokens()
    # A word of invisible characters, such as U+200B, may have no token.
    arrays[0, first] = [labels.index(tags[encoded.words[at]]) for at in first]
    arrays[1, first] = 1
    return {'encoder_input_tokens': _pad_ids(encoded.ids, length), 'labels': arrays[0], 'label_weights': arrays[1]}


def make_span_arrays(
    text: str, target: str, vocabulary: Any, length: int, stride: int | None = None
) -> dict[str, np.ndarray]:
    """Returns the batch arrays of a question, with one row per window. `target` is SQuAD's `answers` field as JSON.

    The labels of a window are the positions of the first and last token of the first answer, or 0 if the window does
    not contain the complete answer. If no token overlaps the answer, the loss weight is 0. Raises UserError if the
    context does not contain the answer at `answer_start`.
    """
    question, answers = encode_question(vocabulary, text, length, stride), json.loads(target)
    positions: np.ndarray = np.zeros((2, len(question.windows)), np.int32)
    weight = 1.0
    if answers['text']:
        answer, offset = answers['text'][0], answers['answer_start'][0]
        # If the question also contains CONTEXT_PREFIX, the context starts after a later occurrence.
        starts = [match.end() + offset for match in re.finditer(CONTEXT_PREFIX, text)]
        first = next((start for start in starts if text.startswith(answer, start)), None)
        if first is None:
            raise UserError(
                f"answer_start must be the position of the answer's first character in the context, got {offset} for "
                f'{answer!r:.60} in {text!r:.60}; correct it or remove the row'
            )
        last = first + len(answer)
        all_tokens, *window_tokens = (
            [at for at, (begin, end) in enumerate(encoded.offsets) if begin < last and end > first]
            for encoded in (question.whole, *question.windows)
        )
        weight = float(bool(all_tokens))
        for row, tokens in enumerate(window_tokens):
            if tokens and len(tokens) == len(all_tokens):
                positions[:, row] = tokens[0], tokens[-1]
    return {
        'encoder_input_tokens': np.stack([_pad_ids(window.ids, length) for window in question.windows]),
        'start_positions': positions[0],
        'end_positions': positions[1],
        'label_weights': np.full(len(question.windows), weight, np.float32),
    }


class EncodedPair(NamedTuple):
    """The token ids of two texts, and the length of the longer text before truncation."""

    first: list[int]
    second: list[int]
    num_tokens: int


def encode_pair(vocabulary: Any, text: str, length: int) -> EncodedPair:
    """Encodes two tab-separated texts, and truncates each to `length` tokens."""
    if text.count(PAIR_SEPARATOR) != 1:
        raise UserError(
            f'INPUTS must be two texts separated by a tab, got {text!r:.60}; pass --gin.INPUTS="\'{{a}}\\t{{b}}\'"'
        )
    end = task_vocabulary.get_end_ids(vocabulary)
    first, second = (vocabulary.encode(part) for part in text.split(PAIR_SEPARATOR))
    limit = length - len(end)
    longest = max(len(first), len(second)) + len(end)
    return EncodedPair([*first[:limit], *end], [*second[:limit], *end], longest)


def make_pair_arrays(text: str, target: str, vocabulary: Any, length: int) -> dict[str, np.ndarray]:
    """Returns the batch arrays of a pair of texts. `target` is the pair's loss weight as a string, such as '1'.

    Raises ValueError if the weight is not a finite number of at least 0.
    """
    pair = encode_pair(vocabulary, text, length)
    weight = float(target)
    if not 0 <= weight <= float(np.finfo(np.float32).max):
        raise ValueError('the loss weight of a pair must be finite and at least 0')
    return {
        'encoder_input_tokens': _pad_ids(pair.first, length),
        'positive_input_tokens': _pad_ids(pair.second, length),
        'label_weights': np.asarray(weight, np.float32),
    }


def _pad_ids(ids: Sequence[int], length: int) -> np.ndarray:
    return np.pad(np.asarray(ids, np.int32), (0, length - len(ids)))
