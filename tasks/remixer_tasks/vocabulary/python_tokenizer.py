"""Vocabularies whose tokenizer is Python code, which tf.data calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from remixer_t5x.lazy import seqio, tf


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
    """Derives the TensorFlow functions from `_encode` and `_decode`, so training and inference give the same ids."""

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        return encode_tf(self._encode, s)

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        def call(ids: np.ndarray) -> np.ndarray:
            texts = [self._decode(row.tolist()).encode() for row in ids.reshape(-1, ids.shape[-1])]
            return np.asarray(texts, object).reshape(ids.shape[:-1])

        return tf.ensure_shape(tf.numpy_function(call, [ids], tf.string, stateful=False), ids.shape[:-1])
