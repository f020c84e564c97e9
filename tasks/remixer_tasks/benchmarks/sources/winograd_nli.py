"""WNLI as Winograd schemas, as T5 evaluates it: which pronoun of the premise does the hypothesis replace, by what?

The pronoun to resolve is the one whose neighbours on both sides also occur in the hypothesis; the words between them
there are the candidate. T5's authors checked the outcome by hand on the published sentences; it is for evaluation only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from remixer_t5x.lazy import tf

_PRONOUNS = frozenset(['he', 'she', 'they', 'it', 'her', 'his', 'their', 'them', 'him'])
_ARTICLES = ('a', 'an', 'the')
_MARKS = '.,?!'


def as_schema(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """WNLI's rows to inputs with the pronoun between stars, and the candidate as target whether or not it is right."""

    def as_text(example):
        premise, hypothesis = example['sentence1'], example['sentence2']
        inputs, target = tf.numpy_function(_schema, [premise, hypothesis], [tf.string, tf.string], stateful=False)
        kept = {name: example[name] for name in ('idx', 'label')}
        texts = {'inputs': tf.reshape(inputs, []), 'targets': tf.reshape(target, [])}
        return {**kept, **texts, 'premise': premise, 'hypothesis': hypothesis}

    return dataset.map(as_text)


def _schema(premise: bytes, hypothesis: bytes) -> tuple[bytes, bytes]:
    text, other = premise.decode(), hypothesis.decode()
    words, other_words = _words(text), _words(other)
    pronouns = [index for index, word in enumerate(words) if word in _PRONOUNS]
    if not pronouns:
        raise ValueError(f'WNLI: there is no pronoun in {text!r}')
    found = [(*_match(words[:index], words[index + 1 :], other_words), index) for index in pronouns]
    _, candidate, index = max(found, key=lambda match: match[0])
    return f'wsc: {_star(text, index)}'.encode(), _as_written(_from_last_article(candidate), other).encode()


def _words(text: str) -> list[str]:
    """Lower-case words, each without one mark at its end."""
    cut = (word[:-1] if word.endswith(tuple(_MARKS)) else word for word in text.strip().lower().split(' '))
    return [word for word in cut if word]


def _match(before: list[str], after: list[str], other: list[str]) -> tuple[int, str]:
    """How many words next to the pronoun are in the other sentence as well, and what is between them there."""
    left = _prefix_in(other[::-1], before[::-1])
    right = _prefix_in(other, after)
    if not left + right:
        return 0, ''
    left_words, right_words = before[len(before) - left :], after[:right]
    # The candidate may be in the middle, at the start or at the end of the sentence.
    patterns = ([*left_words, '(.+)', *right_words], ['^(.+)', *right_words], [*left_words, '(.+)$'])
    for pattern in patterns:
        match = re.search(' '.join(pattern), ' '.join(other))
        if match:
            return left + right, match[1]
    return left + right, ''


def _prefix_in(sentence: Sequence[str], words: Sequence[str]) -> int:
    """The length of the longest beginning of `words` that `sentence` contains as text."""
    text = ' '.join(sentence)
    size = 0
    while size < len(words) and ' '.join(words[: size + 1]) in text:
        size += 1
    return size


def _star(text: str, index: int) -> str:
    words = text.split(' ')
    word = words[index]
    starred = f'*{word[:-1]}* {word[-1]}' if word[-1] in _MARKS else f'*{word}*'
    return ' '.join([*words[:index], starred, *words[index + 1 :]])


def _from_last_article(candidate: str) -> str:
    """Without the beginning of the sentence that a match may have taken along."""
    words = candidate.split(' ')
    starts = [words.index(article) for article in _ARTICLES if article in words]
    return ' '.join(words[max(starts, default=0) :])


def _as_written(candidate: str, sentence: str) -> str:
    """The candidate with the sentence's case and marks, without a mark at its end, never possessive."""
    pattern = ' '.join(f'{re.escape(word)}[{re.escape(_MARKS)}]?' for word in candidate.split(' '))
    match = re.search(pattern, sentence, re.IGNORECASE)
    if not match:
        raise ValueError(f'WNLI: there is no {candidate!r} in {sentence!r}')
    written = match[0][:-1] if match[0].endswith(tuple(_MARKS)) else match[0]
    return written.removesuffix("'") if written.endswith("'") else written.removesuffix("'s")
