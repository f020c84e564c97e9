"""Splits the token ids of documents into segments, either after joining the documents or within each document.

All transformations support tf.data checkpoints, unlike `Dataset.rebatch` and `Dataset.cache`.
"""

from __future__ import annotations

from remixer_t5x.lazy import tf

# Number of documents that one graph call joins. Larger groups are faster if documents are single lines.
DOCUMENTS_PER_GROUP = 32


def extract_tokens(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Maps each example {'targets': [n] ids} to its [n] ids."""
    return dataset.map(lambda example: example['targets'])


def join_and_split(documents: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Joins token vectors ([n] int32, n >= 0) across the whole stream and splits them into vectors of `length`.

    All tokens are used in order; the last vector of the stream may be shorter.
    """

    groups = documents.ragged_batch(DOCUMENTS_PER_GROUP).map(lambda group: (group.flat_values, False))
    end = tf.data.Dataset.from_tensors((tf.zeros([0], tf.int32), True))

    def step(carry, element):
        tokens, is_end = element
        stream = tf.concat([carry, tokens], 0)
        size = tf.size(stream)
        # At the end of the stream, the remainder becomes a segment unless it is empty.
        piece = tf.where(is_end, tf.maximum(size, 1), length)
        whole = size // piece * piece
        return stream[whole:], tf.reshape(stream[:whole], [size // piece, piece])

    pieces = groups.concatenate(end).scan(tf.zeros([0], tf.int32), step)
    return pieces.flat_map(tf.data.Dataset.from_tensor_slices)


def split_documents(documents: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Splits each document ([n] int32, n >= 0) into vectors of `length`; a document's last vector may be shorter."""

    def pieces(tokens):
        starts = tf.range(0, tf.size(tokens), length)
        lengths = tf.minimum(tf.size(tokens) - starts, length)
        return tf.data.Dataset.from_tensor_slices(tf.RaggedTensor.from_row_lengths(tokens, lengths))

    return documents.flat_map(pieces)
