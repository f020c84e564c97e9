"""Defines vocabularies that need no tokenizer file: words separated by white space, and UTF-8 bytes."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from remixer_t5x import base_vocabulary
from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.lazy_imports import tf

# Number of T5's special ids: padding, the end token and the unknown token.
_SPECIAL = 3
# Number of byte values that do not occur in UTF-8, 0xF5 to 0xFF.
_UNUSED_BYTES = 11
WORDS_FILE = 'words.txt'


class WordVocabulary(Vocabulary):
    """Vocabulary for small languages: T5's special ids and the sorted words of texts, without sentinels."""

    def __init__(self, name: str, texts: Callable[[], Iterable[str]]):
        """`name` identifies the texts; `texts` is called once, at first use."""
        super().__init__()
        self._name = name
        self._texts = texts

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """The words in the order of their ids, without special tokens."""
        return tuple(sorted({word for text in self._texts() for word in text.split()}))

    @functools.cached_property
    def _id_by_word(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words, _SPECIAL)}

    @property
    def vocab_size(self) -> int:
        return _SPECIAL + len(self.words)

    def encode(self, text: str) -> list[int]:
        return [self._id_by_word.get(word, self.unk_id) for word in text.split()]

    def _decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; omits padding and the end token, and decodes the unknown id as '<unk>'."""
        shown = [index for index in ids if index not in (self.pad_id, self.eos_id)]
        return ' '.join('<unk>' if index < _SPECIAL else self.words[index - _SPECIAL] for index in shown)

    def save(self, folder: pathlib.Path) -> dict[str, Any]:
        (folder / WORDS_FILE).write_text('\n'.join(self.words), encoding='utf-8')
        return {'kind': 'words'}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WordVocabulary):
            return False
        return self is other or (self._name == other._name and self.words == other.words)

    def __hash__(self) -> int:
        return hash((type(self), self._name))


class ByteVocabulary(Vocabulary):
    """Vocabulary of T5's special ids, 256 bytes and `extra_ids` sentinels; <extra_id_N> in a text is a sentinel."""

    @property
    def vocab_size(self) -> int:
        return _SPECIAL + 256 + self.extra_ids

    @property
    def sentinels(self) -> int:
        """The number of sentinels; if `extra_ids` is 0, the number of bytes that do not occur in UTF-8, as in ByT5."""
        return self.extra_ids or _UNUSED_BYTES

    @property
    def sentinel_pattern(self) -> str:
        return base_vocabulary.build_sentinel_regex(self.sentinels)

    def encode(self, text: str) -> list[int]:
        # `re.split` returns captured sentinel numbers at the odd positions.
        parts = re.split(self.sentinel_pattern, text)
        ids = [byte + _SPECIAL for byte in parts[0].encode()]
        for number, part in zip(parts[1::2], parts[2::2], strict=True):
            ids += [self.vocab_size - 1 - int(number), *(byte + _SPECIAL for byte in part.encode())]
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; omits special ids, sentinels and invalid UTF-8."""
        return bytes(index - _SPECIAL for index in ids if 0 <= index - _SPECIAL < 256).decode(errors='ignore')

    def encode_tf(self, text: tf.Tensor) -> tf.Tensor:
        encode_any = super().encode_tf
        is_utf_8 = tf.equal(text, tf.strings.unicode_transcode(text, 'UTF-8', 'UTF-8'))
        return tf.cond(
            is_utf_8 & ~tf.strings.regex_full_match(text, '(?s).*<extra_id_.*'),
            lambda: tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32) + _SPECIAL,
            lambda: encode_any(text),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteVocabulary) and self.extra_ids == other.extra_ids

    def __hash__(self) -> int:
        return hash((type(self), self.extra_ids))
