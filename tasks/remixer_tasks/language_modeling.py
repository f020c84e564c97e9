"""Implements causal, prefix and masked language modelling, and joins and splits documents for all objectives.

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

Masked language modelling for encoders (Devlin et al. 2019, section 3.1, task 1):

    text     Thank you for inviting me to your party last week
    inputs   Thank you <M> inviting me to apple party last week </s>
    targets     _   _  for    _     _   _  your   _     _    _    _

In each segment, 15% of the tokens (at least one) are predicted: 80% of these are replaced by the mask, 10% by a random
token, and 10% are unchanged. All other targets are 0 (padding), so the loss over non-padding targets equals the
paper's. The mask is the vocabulary's `mask_id` (BERT's [MASK]); T5's vocabularies use their last id, <extra_id_0>.
Pieces without text, such as [CLS], are not predicted.

With `whole_words`, all pieces of a word are selected together, as in later BERT models: words are selected in random
order until the next word would exceed 15% (BERT's code skips this word and tries others). Differences from BERT:
segments are joined across documents, and each epoch draws new masks (BERT's data has ten copies with different masks).

All transformations support tf.data checkpoints, unlike `Dataset.rebatch` and `Dataset.cache`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from remixer_t5x import base_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf

# Number of documents that one graph call joins. Larger groups are faster if documents are single lines.
DOCUMENTS_PER_GROUP = 32
# Number of special ids in T5's vocabularies (padding, EOS and unknown).
_SPECIAL = 3
_WORD_START = '▁'


def extract_tokens(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Maps each example {'targets': [n] ids} to its [n] ids."""
    return dataset.map(lambda example: example['targets'])


def join_and_split_documents(documents: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Joins token vectors ([n] int32, n >= 0) across the whole stream and splits them into vectors of `length`.

    All tokens are used in order; the last vector of the stream may be shorter.
    """

    groups = documents.ragged_batch(DOCUMENTS_PER_GROUP).map(lambda group: (group.flat_values, False))
    end = tf.data.Dataset.from_tensors((tf.zeros([0], tf.int32), True))

    def split_joined_tokens(carry, element):
        tokens, is_end = element
        stream = tf.concat([carry, tokens], 0)
        size = tf.size(stream)
        # At the end of the stream, the remainder becomes a segment unless it is empty.
        piece = tf.where(is_end, tf.maximum(size, 1), length)
        whole = size // piece * piece
        return stream[whole:], tf.reshape(stream[:whole], [size // piece, piece])

    pieces = groups.concatenate(end).scan(tf.zeros([0], tf.int32), split_joined_tokens)
    return pieces.flat_map(tf.data.Dataset.from_tensor_slices)


def split_documents(documents: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Splits each document ([n] int32, n >= 0) into vectors of `length`; a document's last vector may be shorter."""

    def split_document(tokens):
        starts = tf.range(0, tf.size(tokens), length)
        lengths = tf.minimum(tf.size(tokens) - starts, length)
        return tf.data.Dataset.from_tensor_slices(tf.RaggedTensor.from_row_lengths(tokens, lengths))

    return documents.flat_map(split_document)


def causal_lm(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
    """seqio preprocessor that joins documents {'targets': [n] int32 ids} and splits them into {'targets': [length]}.

    Only the last example of a finite dataset may be shorter.
    """
    if sequence_length['targets'] < 2:
        raise UserError("causal LM requires at least 2 target tokens; set TASK_FEATURE_LENGTHS = {'targets': 512}")
    eos = [output_features['targets'].vocabulary.eos_id]
    documents = extract_tokens(dataset).filter(lambda tokens: tf.size(tokens) > 0)
    documents = documents.map(lambda tokens: tf.concat([tokens, eos], 0))
    return join_and_split_documents(documents, sequence_length['targets']).map(lambda tokens: {'targets': tokens})


@dataclasses.dataclass(frozen=True)
class PrefixSettings:
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


def compute_segment_length(inputs_length: int, targets_length: int, prefix: PrefixSettings) -> int:
    """Returns the maximum segment length such that prefix and rest, each with EOS, always fit the feature lengths."""
    length = inputs_length
    # The longest prefix has all tokens except one; the rest is longest after the shortest prefix.
    while length > 1 and length - compute_min_prefix_length(length, prefix) + 1 > targets_length:
        length -= 1
    length = min(length, inputs_length - 1)
    if length < 2:
        raise UserError(
            f"TASK_FEATURE_LENGTHS has 'inputs': {inputs_length} and 'targets': {targets_length}, which is too "
            "short for a prefix LM; T5 uses {'inputs': 512, 'targets': 512}"
        )
    return length


def compute_min_prefix_length(length: int, prefix: PrefixSettings) -> int:
    """Returns the minimum number of prefix tokens in a segment of `length` tokens.

    It is rounded in float32, as in `split_at_random_prefix`.
    """
    share = np.float32(1 - 2 * prefix.density) * np.float32(length - 1)
    return min(length - 1, max(1, round(float(share))))


def split_at_random_prefix(tokens: tf.Tensor, prefix: PrefixSettings, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
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
    prefix: PrefixSettings = PrefixSettings(),  # noqa: B008 (frozen)
    prompt: str = '',
) -> tf.data.Dataset:
    """seqio preprocessor that converts documents {'targets': [n] int32 ids} to {'inputs', 'targets'} with EOS.

    `prompt` is prepended to every prefix. The split depends only on seqio's map seed and the position of the
    example in the stream.
    """
    vocabulary = output_features['targets'].vocabulary
    front = vocabulary.encode(prompt) if prompt else []
    length = compute_segment_length(sequence_length['inputs'] - len(front), sequence_length['targets'], prefix)
    eos = [vocabulary.eos_id]

    @seqio.map_over_dataset(num_seeds=1)
    def split_segment(tokens, seed):
        start, rest = split_at_random_prefix(tokens, prefix, seed)
        return {'inputs': tf.concat([front, start, eos], 0), 'targets': tf.concat([rest, eos], 0)}

    cut = join_and_split_documents if prefix.join_documents else split_documents
    return split_segment(cut(extract_tokens(dataset), length))


def choose_predicted_tokens(words: tf.Tensor, count: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Selects `count` single tokens, or whole words of at most `count` tokens, to predict; returns an [n] bool mask.

    At least one word is always selected. `words` [n] int32 contains the 0-based index of each token's word; if all
    indices differ, single tokens are selected. `seed` has [2] integers.
    """
    sizes = tf.math.bincount(words)
    order = tf.argsort(tf.random.stateless_uniform([tf.size(sizes)], seed))
    total = tf.cumsum(tf.gather(sizes, order))
    is_selected = (total <= count) | (tf.range(tf.size(order)) == 0)
    chosen = tf.scatter_nd(order[:, None], tf.cast(is_selected, tf.int32), [tf.size(order)])
    return tf.gather(chosen, words) > 0


def get_mask_id(vocabulary: seqio.Vocabulary) -> int:
    """Returns the id of the mask token. Raises UserError if the vocabulary has none."""
    if hasattr(vocabulary, 'mask_id'):
        if vocabulary.mask_id == vocabulary.eos_id:
            raise UserError('masked LM needs a mask token, but the last token of tokenizer.json is the end token')
        return int(vocabulary.mask_id)
    first, count = base_vocabulary.find_sentinel_range(vocabulary)
    if count < 1:
        raise UserError(
            'masked LM uses a sentinel as its mask, but the vocabulary has none; use a BERT vocabulary, or a '
            'SentencePiece or byte vocabulary with extra_ids = 100'
        )
    return first


def find_word_starts(vocabulary: seqio.Vocabulary) -> np.ndarray:
    """Returns a [vocab_size] bool array that marks the pieces that start a word."""
    if prefix := getattr(vocabulary, 'continuation_prefix', None):
        return np.array([not piece.startswith(prefix) for piece in vocabulary.words])
    texts = getattr(vocabulary, 'token_texts', ())
    # A byte-level or Metaspace tokenizer has pieces that begin with a space. Special tokens have no text.
    if any(re.match(rb' \S', text) for text in texts):
        return np.array([not text or text[:1].isspace() for text in texts])
    if not hasattr(vocabulary, 'tokenizer'):
        raise UserError(
            'whole-word masking needs a SentencePiece, WordPiece or byte-level vocabulary, got a '
            f'{type(vocabulary).__name__}: set WHOLE_WORDS = False'
        )
    ordinary = base_vocabulary.count_ordinary_ids(vocabulary)
    starts = [vocabulary.tokenizer.IdToPiece(index).startswith(_WORD_START) for index in range(ordinary)]
    return np.array(starts + [True] * (vocabulary.vocab_size - ordinary))


def masked_lm(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, seqio.Feature],
    rate: float = 0.15,
    masked_share: float = 0.8,
    random_share: float = 0.1,
    whole_words: bool = False,
) -> tf.data.Dataset:
    """seqio preprocessor that converts documents {'targets': [n] int32 ids} to {'inputs', 'targets'}, both [length].

    Inputs end with EOS; targets are the original ids of predicted tokens, and 0 elsewhere.

    Args:
        rate: fraction of tokens that are predicted, above 0 and below 1.
        masked_share: fraction of predicted tokens that are replaced by the mask.
        random_share: fraction of predicted tokens that are replaced by a random token; the others are unchanged.
        whole_words: whether to select all pieces of a word together.
    """
    if masked_share + random_share > 1:
        raise UserError(
            'MASKED_SHARE and RANDOM_SHARE must add up to at most 1, got '
            f'{masked_share} and {random_share}; BERT uses 0.8 and 0.1'
        )
    length = sequence_length['inputs']
    if length != sequence_length['targets'] or length < 2:
        raise UserError(
            'TASK_FEATURE_LENGTHS must have the same length, 2 or more, for inputs and targets in masked LM, got '
            f"{dict(sequence_length)}; set {{'inputs': 512, 'targets': 512}}"
        )
    vocabulary = output_features['targets'].vocabulary
    mask_id, ordinary = get_mask_id(vocabulary), base_vocabulary.count_ordinary_ids(vocabulary)
    special = tf.constant(getattr(vocabulary, 'special_ids', ()), tf.int32)
    # The number of tokens to predict in a segment of each size; for whole words, an upper bound.
    counts = [min(max(round(size * rate), 1), size) for size in range(length)]
    starts = find_word_starts(vocabulary) if whole_words else None

    @seqio.map_over_dataset(num_seeds=2)
    def mask_segment(tokens, seeds):
        words = tf.range(tf.size(tokens))
        if starts is not None:
            words = tf.cumsum(tf.cast(tf.gather(starts, tokens), tf.int32))
            words -= words[0]
        chosen = choose_predicted_tokens(words, tf.constant(counts)[tf.size(tokens)], seeds[0])
        chosen &= ~tf.reduce_any(tokens[:, None] == special, axis=1)
        draw_seed, id_seed = tf.unstack(tf.random.experimental.stateless_split(seeds[1], 2))
        draw = tf.random.stateless_uniform(tf.shape(tokens), draw_seed)
        random = tf.random.stateless_uniform(tf.shape(tokens), id_seed, _SPECIAL, ordinary, tf.int32)
        replaced = tf.where(draw < masked_share + random_share, random, tokens)
        replaced = tf.where(draw < masked_share, mask_id, replaced)
        return {
            'inputs': tf.concat([tf.where(chosen, replaced, tokens), [vocabulary.eos_id]], 0),
            'targets': tf.concat([tf.where(chosen, tokens, 0), [0]], 0),
        }

    return mask_segment(join_and_split_documents(extract_tokens(dataset), length - 1))
