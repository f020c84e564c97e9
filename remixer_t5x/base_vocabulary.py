"""Defines the base class of vocabularies with seqio's interface. Encoding and decoding do not import TensorFlow.

A seqio feature accepts any object with the methods of this class, so tasks and inference share a vocabulary object.
"""

from __future__ import annotations

import abc
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from remixer_t5x.lazy_imports import tf

# Maximum number of sentinels in untrusted files, because each sentinel is added to the vocabulary.
MAX_SENTINELS = 10_000


def is_byte_vocabulary(vocabulary: Any) -> bool:
    """Returns whether `vocabulary` is a byte vocabulary as in ByT5, from `remixer_tasks` or from seqio."""
    return type(vocabulary).__name__ == 'ByteVocabulary'


def find_sentinel_range(vocabulary: Any) -> tuple[int, int]:
    """Returns the id of <extra_id_0> and the number of sentinels; their ids count down from this id."""
    return vocabulary.vocab_size - 1, getattr(vocabulary, 'sentinels', vocabulary.extra_ids)


def count_ordinary_ids(vocabulary: Any) -> int:
    """Returns the number of ids below the sentinels."""
    first, count = find_sentinel_range(vocabulary)
    return first + 1 - count


def build_sentinel_regex(count: int) -> str:
    """Returns a regular expression, for Python and TensorFlow, that matches the names of `count` sentinels."""
    return f'<extra_id_({"|".join(map(str, range(count)))})>'


class Vocabulary(abc.ABC):
    """Converts texts to token ids and back. Id 0 is padding.

    Other modules read these optional attributes with `getattr`: `sentinels` (the number of sentinels, if it differs
    from `extra_ids`), `words` (all pieces), `token_texts` (the bytes of each id; by default, a space and the decoded
    id), `mask_id`, and `special_ids`.

    Attributes:
        extra_ids: number of sentinel ids, which follow the last id of the tokenizer.
    """

    pad_id = 0

    def __init__(self, extra_ids: int = 0):
        self.extra_ids = extra_ids

    @property
    def bos_id(self) -> int | None:
        """The id of the start token; None for a vocabulary without a start token."""
        return None

    @property
    def eos_id(self) -> int:
        """The id of the end token; by default 1, as in T5."""
        return 1

    @property
    def unk_id(self) -> int:
        """The id of the unknown token; by default 2, as in T5."""
        return 2

    @property
    def sentinel_pattern(self) -> str | None:
        """A regular expression that matches the names of sentinels in texts; None if texts contain no sentinels."""
        return build_sentinel_regex(self.extra_ids) if self.extra_ids else None

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """The number of ids, including sentinels."""

    def save(self, folder: pathlib.Path) -> dict[str, Any] | None:
        """Writes files to `folder`; returns the JSON object for `vocabularies.saved`, or None if it cannot be saved."""
        return None

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without an end token."""

    @abc.abstractmethod
    def _decode(self, ids: Sequence[int]) -> str:
        """Decodes ids below `vocab_size`, of which only the last may be the end token."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids up to the first end token. Decodes ids outside the vocabulary as the unknown token."""
        known = [index if index < self.vocab_size else self.unk_id for index in map(int, ids)]
        if self.eos_id in known:
            known = known[: known.index(self.eos_id) + 1]
        return self._decode(known)

    def encode_tf(self, text: tf.Tensor) -> tf.Tensor:
        """Returns the token ids of a scalar string tensor as an [ids] int32 tensor.

        The TensorFlow function is declared as stateless, because TensorFlow cannot save the iterator position of a
        pipeline with stateful functions.
        """
        import numpy as np

        def encode_bytes(text: bytes | np.ndarray) -> np.ndarray:
            # The argument is bytes in graph mode and a 0-d array in eager mode. np.asarray(bytes) would strip trailing
            # NULs.
            data = text if isinstance(text, bytes) else text.item()
            return np.asarray(self.encode(data.decode(errors='replace')), np.int32)

        return tf.ensure_shape(
            tf.numpy_function(encode_bytes, [tf.convert_to_tensor(text)], tf.int32, stateful=False), [None]
        )

    def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        """Decodes a [..., ids] int32 tensor to a [...] string tensor."""
        import numpy as np

        def decode_array(ids: np.ndarray) -> np.ndarray:
            *rows, length = ids.shape
            texts = [self.decode(row).encode() for row in ids.reshape(math.prod(rows), length).tolist()]
            return np.asarray(texts, object).reshape(rows)

        ids = tf.convert_to_tensor(ids)
        return tf.ensure_shape(tf.numpy_function(decode_array, [ids], tf.string, stateful=False), ids.shape[:-1])
