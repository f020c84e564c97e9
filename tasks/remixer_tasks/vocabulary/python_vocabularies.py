"""Vocabularies whose tokenizer is Python code, which tf.data calls: words between spaces, and bytes with sentinels."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from remixer_t5x.lazy import seqio, tf
from remixer_tasks.vocabulary import sentinels

PAD, EOS, UNKNOWN = 0, 1, 2
_SPECIAL = 3


def encode_tf(encode: Callable[[str], Sequence[int]], text: tf.Tensor) -> tf.Tensor:
    """The ids of `text`, [ids] int32.

    The call is declared stateless, because TensorFlow cannot save the position of a pipeline with a stateful call.
    """

    def call(text: bytes | str | np.ndarray) -> np.ndarray:
        # Bytes in graph mode, a 0-d array in eager mode. np.asarray(bytes) would strip trailing NULs.
        if isinstance(text, np.ndarray):
            text = text.item()
        return np.asarray(encode(text.decode(errors='replace') if isinstance(text, bytes) else text), np.int32)

    ids = tf.numpy_function(call, [tf.convert_to_tensor(text)], tf.int32, stateful=False)
    return tf.ensure_shape(ids, [None])


class PythonTokenizer(seqio.Vocabulary):
    """Derives the TensorFlow functions from `_encode` and `_decode`, so that training and inference have equal ids."""

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        return encode_tf(self._encode, s)

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        def call(ids: np.ndarray) -> np.ndarray:
            texts = [self._decode(row.tolist()).encode() for row in ids.reshape(-1, ids.shape[-1])]
            return np.asarray(texts, object).reshape(ids.shape[:-1])

        return tf.ensure_shape(tf.numpy_function(call, [ids], tf.string, stateful=False), ids.shape[:-1])


class WordVocabulary(PythonTokenizer):
    """T5's ids for padding, EOS and unknown, and then the sorted words of texts, for small languages such as COGS.

    There are no sentinels. Two vocabularies with the same name and words are equal.
    """

    def __init__(self, name: str, texts: Callable[[], Iterable[str]]):
        """name: of the texts. texts: called once, at first use."""
        super().__init__(extra_ids=0)
        self._name = name
        self._texts = texts

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Returns the words in the order of their ids, without special tokens."""
        return tuple(sorted({word for text in self._texts() for word in text.split()}))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words, _SPECIAL)}

    @property
    def bos_id(self) -> int | None:
        return None

    @property
    def eos_id(self) -> int:
        return EOS

    @property
    def unk_id(self) -> int:
        return UNKNOWN

    @property
    def _base_vocab_size(self) -> int:
        return _SPECIAL + len(self.words)

    def _encode(self, s: str) -> list[int]:
        return [self._ids.get(word, UNKNOWN) for word in s.split()]

    def _decode(self, ids: Sequence[int]) -> str:
        """Without padding and EOS; other ids without a word are '<unk>'."""
        words = range(_SPECIAL, self._base_vocab_size)
        texts = (
            self.words[index - _SPECIAL] if index in words else '<unk>' for index in ids if index not in (PAD, EOS)
        )
        return ' '.join(texts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WordVocabulary):
            return False
        return self is other or (self._name == other._name and self.words == other.words)

    def __hash__(self) -> int:
        return hash((type(self), self._name))

    def __str__(self) -> str:
        return f'WordVocabulary({self._name})'


class ByteVocabulary(seqio.ByteVocabulary):
    """3 special ids, 256 bytes and `extra_ids` sentinels. <extra_id_N> in a text is a sentinel."""

    @property
    def sentinels(self) -> int:
        """The number of sentinels: without `extra_ids`, the bytes that no UTF-8 text has, as ByT5 was pretrained."""
        return self.extra_ids or sentinels.UNUSED_BYTES

    def _encode(self, s: str) -> list[int]:
        # Every second part is the number of a sentinel.
        parts = re.split(sentinels.pattern(self.sentinels), s)
        ids = super()._encode(parts[0])
        for number, text in zip(parts[1::2], parts[2::2], strict=True):
            ids += [self.vocab_size - 1 - int(number), *super()._encode(text)]
        return ids

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        has_sentinel = tf.strings.regex_full_match(s, '(?s).*<extra_id_.*')
        bytes_alone = super()._encode_tf
        return tf.cond(has_sentinel, lambda: encode_tf(self._encode, s), lambda: bytes_alone(s))
