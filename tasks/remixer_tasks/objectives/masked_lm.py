"""Implements masked language modelling for encoders (Devlin et al. 2019, section 3.1, task 1).

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
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.objectives import segments
from remixer_tasks.vocabulary import sentinels

# Number of special ids in T5's vocabularies (padding, EOS and unknown).
_SPECIAL = 3
_WORD_START = '▁'


@dataclasses.dataclass(frozen=True)
class Masking:
    """Settings of masked language modelling.

    Attributes:
        rate: fraction of tokens that are predicted, above 0 and below 1.
        masked: fraction of predicted tokens that are replaced by the mask.
        random: fraction of predicted tokens that are replaced by a random token; the rest is unchanged.
        whole_words: whether to select all pieces of a word together.
    """

    rate: float = 0.15
    masked: float = 0.8
    random: float = 0.1
    whole_words: bool = False

    def __post_init__(self):
        if not 0.0 < self.rate < 1.0:
            raise UserError(f'the rate of masked LM must be above 0 and below 1, got {self.rate}; BERT uses 0.15')
        if not (self.masked >= 0 and self.random >= 0 and self.masked + self.random <= 1):
            raise UserError(
                'the shares of masks and random tokens of masked LM must add up to at most 1, got '
                f'{self.masked} and {self.random}; BERT uses 0.8 and 0.1'
            )

    def count(self, length: int) -> int:
        """Returns the number of tokens to predict in a segment of `length` tokens (for whole words, an upper bound)."""
        return min(max(round(length * self.rate), 1), length)


def choose_tokens(words: tf.Tensor, count: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Selects `count` single tokens, or whole words of at most `count` tokens, to predict; returns an [n] bool mask.

    At least one word is always selected. `words` [n] int32 contains the 0-based index of each token's word; if all
    indices differ, single tokens are selected. `seed` has [2] integers.
    """
    sizes = tf.math.bincount(words)
    order = tf.argsort(tf.random.stateless_uniform([tf.size(sizes)], seed))
    total = tf.cumsum(tf.gather(sizes, order))
    taken = (total <= count) | (tf.range(tf.size(order)) == 0)
    chosen = tf.scatter_nd(order[:, None], tf.cast(taken, tf.int32), [tf.size(order)])
    return tf.gather(chosen, words) > 0


def replace_tokens(
    tokens: tf.Tensor, chosen: tf.Tensor, masking: Masking, vocabulary: seqio.Vocabulary, seed: tf.Tensor
):
    """Masks, randomly replaces or keeps each chosen token in a segment of [n] ids. `seed` has [2] integers."""
    which, ids = tf.unstack(tf.random.experimental.stateless_split(seed, 2))
    draw = tf.random.stateless_uniform(tf.shape(tokens), which)
    ordinary = sentinels.count_ordinary_ids(vocabulary)
    random = tf.random.stateless_uniform(tf.shape(tokens), ids, _SPECIAL, ordinary, tf.int32)
    replaced = tf.where(draw < masking.masked + masking.random, random, tokens)
    replaced = tf.where(draw < masking.masked, get_mask_id(vocabulary), replaced)
    return tf.where(chosen, replaced, tokens)


def get_mask_id(vocabulary: seqio.Vocabulary) -> int:
    """Returns the id of the mask token. Raises UserError if the vocabulary has none."""
    if hasattr(vocabulary, 'mask_id'):
        return int(vocabulary.mask_id)
    first, count = sentinels.sentinel_range(vocabulary)
    if count < 1:
        raise UserError('masked LM uses a sentinel as its mask, but the vocabulary has none; set its extra_ids to 100')
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
    ordinary = sentinels.count_ordinary_ids(vocabulary)
    starts = [vocabulary.tokenizer.IdToPiece(index).startswith(_WORD_START) for index in range(ordinary)]
    return np.array(starts + [True] * (vocabulary.vocab_size - ordinary))


def masked_lm(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, seqio.Feature],
    masking: Masking = Masking(),  # noqa: B008 (frozen)
) -> tf.data.Dataset:
    """seqio preprocessor that converts documents {'targets': [n] int32 ids} to {'inputs', 'targets'}, both [length].

    Inputs end with EOS; targets are the original ids of predicted tokens, and 0 elsewhere.
    """
    length = sequence_length['inputs']
    if length != sequence_length['targets'] or length < 2:
        raise UserError(
            'masked LM predicts in place: inputs and targets of TASK_FEATURE_LENGTHS must have the same length, got '
            f"{dict(sequence_length)}; set {{'inputs': 512, 'targets': 512}}"
        )
    vocabulary = output_features['targets'].vocabulary
    get_mask_id(vocabulary)
    special = tf.constant(getattr(vocabulary, 'special_ids', ()), tf.int32)
    counts = [masking.count(size) for size in range(length)]
    starts = find_word_starts(vocabulary) if masking.whole_words else None

    @seqio.map_over_dataset(num_seeds=2)
    def mask(tokens, seeds):
        words = tf.range(tf.size(tokens))
        if starts is not None:
            words = tf.cumsum(tf.cast(tf.gather(starts, tokens), tf.int32))
            words -= words[0]
        chosen = choose_tokens(words, tf.constant(counts)[tf.size(tokens)], seeds[0])
        chosen &= ~tf.reduce_any(tokens[:, None] == special, axis=1)
        inputs = replace_tokens(tokens, chosen, masking, vocabulary, seeds[1])
        return {
            'inputs': tf.concat([inputs, [vocabulary.eos_id]], 0),
            'targets': tf.concat([tf.where(chosen, tokens, 0), [0]], 0),
        }

    return mask(segments.join_and_split(segments.extract_tokens(dataset), length - 1))
