"""Causal and prefix language modelling.

Causal language modelling (t5's `full_lm`) predicts every token from those before it. An EOS ends each document,
documents are joined, and the stream is cut into segments of exactly the targets' length, whose first token is a target
too. t5 cuts each group of 128 documents by itself; here the whole stream is one.

    documents  [Thank you] [for inviting me to your party]
    targets    Thank you </s> for inviting me
    targets    to your party </s> ...

Prefix language modelling (Raffel et al. 2020, section 3.2.3; t5's `prefix_lm`) splits a text in two and predicts the
second half from the first:

    text     Thank you for inviting me to your party last week
    inputs   Thank you for inviting </s>
    targets  me to your party last week </s>

A segment of n tokens, of one document, has a prefix of 1 to n - 1 tokens, all equally likely. A `density` d below 0.5,
the mean share of the targets, draws the prefix from (1 - 2 d) (n - 1) to n - 1. The same segment and seed give t5's
example, bit for bit. Departures: a document of more than 65,536 tokens is used whole, where t5 uses one part; segments
may be joined from several documents, as in span corruption.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.objectives import segments


def causal_lm(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
    """seqio preprocessor: {'targets': [n] int32 token ids of a document} to {'targets': [length]}, joined.

    Only the last example of a finite dataset is shorter. Raises UserError without a length of targets.
    """
    if sequence_length is None or sequence_length['targets'] < 2:
        raise UserError("causal LM needs a length of 2 or more: set TASK_FEATURE_LENGTHS = {'targets': 512}")
    eos = [output_features['targets'].vocabulary.eos_id]
    documents = segments.tokens(dataset).filter(lambda tokens: tf.size(tokens) > 0)
    documents = documents.map(lambda tokens: tf.concat([tokens, eos], 0))
    return segments.joined(documents, sequence_length['targets']).map(lambda tokens: {'targets': tokens})


@dataclasses.dataclass(frozen=True)
class Prefix:
    """How a text is split.

    Attributes:
        density: mean share of a segment's tokens in the targets, above 0 and at most 0.5.
        join_documents: fills segments across documents; False cuts each document by itself.
    """

    density: float = 0.5
    join_documents: bool = False

    def __post_init__(self):
        if not 0.0 < self.density <= 0.5:
            raise UserError(
                f'the density of a prefix LM must be above 0 and at most 0.5, got {self.density}; T5 uses 0.5, UL2 0.25'
            )


def segment_length(inputs_length: int, targets_length: int, prefix: Prefix) -> int:
    """The largest number of tokens of a segment whose prefix and rest always fit, each with an EOS.

    Raises UserError if no segment of two tokens fits.
    """
    length = inputs_length
    # The longest prefix is all tokens but one; the longest rest belongs to the shortest prefix.
    while length > 1 and length - min_prefix(length, prefix) + 1 > targets_length:
        length -= 1
    length = min(length, inputs_length - 1)
    if length < 2:
        raise UserError(
            f"TASK_FEATURE_LENGTHS has 'inputs': {inputs_length} and 'targets': {targets_length}, too short for a "
            "prefix LM: T5 uses {'inputs': 512, 'targets': 512}"
        )
    return length


def min_prefix(length: int, prefix: Prefix) -> int:
    """Returns the minimum prefix length, in tokens, of a segment with `length` tokens."""
    return min(length - 1, max(1, round((1 - 2 * prefix.density) * (length - 1))))


def split(tokens: tf.Tensor, prefix: Prefix, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(prefix, rest) of a segment [n] int32, n >= 1, without EOS. seed: [2] integers."""
    most = tf.size(tokens) - 1
    share = tf.cast(tf.round((1 - 2 * prefix.density) * tf.cast(most, tf.float32)), tf.int32)
    fewest = tf.minimum(most, tf.maximum(1, share))
    # t5 draws from the first of six seeds.
    draw = tf.random.experimental.stateless_split(seed, 6)[0]
    size = tf.random.stateless_uniform([], draw, fewest, most + 1, tf.int32)
    return tokens[:size], tokens[size:]


def prefix_lm(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, seqio.Feature],
    prefix: Prefix = Prefix(),  # noqa: B008 (frozen)
    prompt: str = '',
) -> tf.data.Dataset:
    """seqio preprocessor: {'targets': [n] int32 token ids of a document} to {'inputs', 'targets'} with EOS.

    `prompt` is a text before every prefix. The split of a text depends only on seqio's map seed and the example's place
    in the stream. Raises UserError if the feature lengths are missing or too short.
    """
    if sequence_length is None:
        raise UserError("prefix LM got no feature lengths: set TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 512}")
    vocabulary = output_features['targets'].vocabulary
    front = vocabulary.encode(prompt) if prompt else []
    length = segment_length(sequence_length['inputs'] - len(front), sequence_length['targets'], prefix)
    eos = [vocabulary.eos_id]

    @seqio.map_over_dataset(num_seeds=1)
    def split_segment(tokens, seed):
        start, rest = split(tokens, prefix, seed)
        return {'inputs': tf.concat([front, start, eos], 0), 'targets': tf.concat([rest, eos], 0)}

    cut = segments.joined if prefix.join_documents else segments.separate
    return split_segment(cut(segments.tokens(dataset), length))
