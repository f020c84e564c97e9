"""Independent masking in T5's form (Raffel et al. 2020, section 3.2.2, "replace spans"; t5's `iid_denoising`).

Every token is hidden with probability `density`, independently of the others; a run of hidden tokens becomes one
sentinel, and the targets are the hidden runs, each after its sentinel:

    text     Thank you for inviting me to your party last week
    inputs   Thank <X> for inviting <Y> your party last <Z> </s>
    targets  <X'> you <Y'> me to <Z'> week </s>

Departures: documents are joined across the whole stream (t5 joins groups of 128). If a segment has more runs than
the vocabulary has sentinels, the later ones stay visible; t5 would use ordinary pieces as sentinels. Otherwise the same
segment and seed give t5's example, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.objectives import segments
from remixer_tasks.vocabulary import sentinels


def check_density(density: float) -> None:
    """Raises UserError unless the share of hidden tokens is between 0 and 1."""
    if not 0.0 < density < 1.0:
        raise UserError(f'noise density must be above 0 and below 1, got {density}; T5 uses 0.15')


def noise_mask(length: tf.Tensor, density: float, seed: tf.Tensor) -> tf.Tensor:
    """[length] bool, True where hidden. seed: [2] integers, of whose six t5 takes the first."""
    draw = tf.random.experimental.stateless_split(seed, 6)[0]
    return tf.random.stateless_uniform([length], draw) < density


def runs_to_sentinels(tokens: tf.Tensor, mask: tf.Tensor, last_id: int) -> tf.Tensor:
    """[m <= n] ids: each run of True in the [n] mask becomes one id, counting down from `last_id`."""
    starts = mask & ~tf.concat([[False], mask[:-1]], 0)
    marked = tf.where(starts, last_id + 1 - tf.cumsum(tf.cast(starts, tf.int32)), tokens)
    return tf.boolean_mask(marked, starts | ~mask)


def _within(mask: tf.Tensor, sentinels: int) -> tf.Tensor:
    """The mask with at most `sentinels` runs of False; there are as many runs of True, or one less or more."""
    visible_starts = ~mask & tf.concat([[True], mask[:-1]], 0)
    return mask & (tf.cumsum(tf.cast(visible_starts, tf.int32)) < sentinels)


def iid_denoising(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, seqio.Feature],
    density: float = 0.15,
) -> tf.data.Dataset:
    """seqio preprocessor: {'targets': [n] int32 token ids of a document} to {'inputs', 'targets'} with EOS.

    Targets have a random length; what exceeds the feature's length is cut, as in t5. Raises UserError if the feature
    lengths are missing or too short, and for a vocabulary with fewer than two sentinels.
    """
    if sequence_length is None or sequence_length['inputs'] < 3:
        raise UserError(
            "i.i.d. denoising needs feature lengths: set TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 256}"
        )
    check_density(density)
    vocabulary = output_features['targets'].vocabulary
    last, count = sentinels.of(vocabulary)
    if count < 2:
        raise UserError('i.i.d. denoising needs sentinels: give the vocabulary extra_ids=100')
    eos = [vocabulary.eos_id]

    @seqio.map_over_dataset(num_seeds=1)
    def hide(tokens, seed):
        mask = _within(noise_mask(tf.size(tokens), density, seed), count)
        targets = runs_to_sentinels(tokens, ~mask, last)[: sequence_length['targets'] - 1]
        return {
            'inputs': tf.concat([runs_to_sentinels(tokens, mask, last), eos], 0),
            'targets': tf.concat([targets, eos], 0),
        }

    return hide(segments.joined(segments.tokens(dataset), sequence_length['inputs'] - 1))
