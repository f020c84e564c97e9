"""seqio's vocabulary of bytes, with sentinels in texts and, as ByT5 has them, among the bytes."""

from __future__ import annotations

import re

from remixer_t5x.lazy import seqio, tf
from remixer_tasks.vocabulary import python_tokenizer, sentinels


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
        return tf.cond(has_sentinel, lambda: python_tokenizer.encode_tf(self._encode, s), lambda: bytes_alone(s))
