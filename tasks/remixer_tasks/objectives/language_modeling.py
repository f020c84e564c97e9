"""Implements causal and prefix language modelling.

Causal language modelling (t5's `full_lm`) predicts every token from the preceding tokens. Documents, each followed by
EOS, are concatenated and split into segments of the targets' length. The first token of a segment is also predicted.
In contrast, t5 splits each group of 128 documents separately.

    documents  [Thank you] [for inviting me to your party]
    targets    Thank you </s> for inviting me
    targets    to your party </s> ...

Prefix language modelling (Raffel et al. 2020, section 3.2.3; t5's `prefix_lm`) splits a text in two and predicts the
second half from the first:

    text     Thank you for inviting me to your party last week
    inputs   Thank you for inviting </s>
    targets  me to your party last week </s>

In a segment of n tokens, the length of the prefix is drawn uniformly from 1 to n - 1. If the `density` d, the mean
fraction of tokens in the targets, is below 0.5, the prefix has (1 - 2 d) (n - 1) to n - 1 tokens. With the same segment
and seed, the example is bit-identical to t5's. Differences from t5: all tokens of a document with more than 65,536
tokens are used (t5 uses only a part), and segments can be joined across documents, as in span corruption.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.objectives import segments


def causal_lm(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
    """seqio preprocessor that joins documents {'targets': [n] int32 ids} and splits them into {'targets': [length]}.

    Only the last example of a finite dataset may be shorter.
    """
    if sequence_length['targets'] < 2:
        raise UserError("causal LM needs a length of 2 or more: set TASK_FEATURE_LENGTHS = {'targets': 512}")
    eos = [output_features['targets'].vocabulary.eos_id]
    documents = segments.extract_tokens(dataset).filter(lambda tokens: tf.size(tokens) > 0)
    documents = documents.map(lambda tokens: tf.concat([tokens, eos], 0))
    return segments.join_and_split(documents, sequence_length['targets']).map(lambda tokens: {'targets': tokens})


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Settings of the prefix LM objective.

    Attributes:
        density: mean fraction of the tokens of a segment in the targets, above 0 and at most 0.5.
        join_documents: whether a segment may contain tokens of several documents.
    """

    density: float = 0.5
    join_documents: bool = False

    def __post_init__(self):
        if not 0.0 < self.density <= 0.5:
            raise UserError(
                f'the density of a prefix LM must be above 0 and at most 0.5, got {self.density}; T5 uses 0.5, UL2 0.25'
            )


def segment_length(inputs_length: int, targets_length: int, prefix: Prefix) -> int:
    """Returns the maximum segment length for which prefix and rest, each with EOS, always fit the feature lengths."""
    length = inputs_length
    # The longest prefix has all tokens except one; the rest is longest after the shortest prefix.
    while length > 1 and length - min_prefix_length(length, prefix) + 1 > targets_length:
        length -= 1
    length = min(length, inputs_length - 1)
    if length < 2:
        raise UserError(
            f"TASK_FEATURE_LENGTHS has 'inputs': {inputs_length} and 'targets': {targets_length}, too short for a "
            "prefix LM: T5 uses {'inputs': 512, 'targets': 512}"
        )
    return length


def min_prefix_length(length: int, prefix: Prefix) -> int:
    """Returns the minimum number of prefix tokens in a segment of `length` tokens, rounded in float32 as in `split`."""
    share = np.float32(1 - 2 * prefix.density) * np.float32(length - 1)
    return min(length - 1, max(1, round(float(share))))


def split(tokens: tf.Tensor, prefix: Prefix, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits a segment of [n] int32 ids, n >= 1, into (prefix, rest), without EOS. `seed` has [2] integers."""
    most = tf.size(tokens) - 1
    share = tf.cast(tf.round((1 - 2 * prefix.density) * tf.cast(most, tf.float32)), tf.int32)
    fewest = tf.minimum(most, tf.maximum(1, share))
    # As in t5, the split is drawn with the first of six seeds.
    draw = tf.random.experimental.stateless_split(seed, 6)[0]
    size = tf.random.stateless_uniform([], draw, fewest, most + 1, tf.int32)
    return tokens[:size], tokens[size:]


def prefix_lm(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, seqio.Feature],
    prefix: Prefix = Prefix(),  # noqa: B008 (frozen)
    prompt: str = '',
) -> tf.data.Dataset:
    """seqio preprocessor that converts documents {'targets': [n] int32 ids} to {'inputs', 'targets'} with EOS.

    `prompt` is prepended to every prefix. The split depends only on seqio's map seed and the position of the
    example in the stream.
    """
    vocabulary = output_features['targets'].vocabulary
    front = vocabulary.encode(prompt) if prompt else []
    length = segment_length(sequence_length['inputs'] - len(front), sequence_length['targets'], prefix)
    eos = [vocabulary.eos_id]

    @seqio.map_over_dataset(num_seeds=1)
    def split_segment(tokens, seed):
        start, rest = split(tokens, prefix, seed)
        return {'inputs': tf.concat([front, start, eos], 0), 'targets': tf.concat([rest, eos], 0)}

    cut = segments.join_and_split if prefix.join_documents else segments.split_documents
    return split_segment(cut(segments.extract_tokens(dataset), length))
