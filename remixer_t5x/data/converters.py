"""From a task's features to a batch's arrays: the converter for each form of batches that `frames` lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from remixer_t5x.data import frames
from remixer_t5x.data.frames import Lengths
from remixer_t5x.lazy import seqio, tf

# (dataset of a task's features, their lengths, whether to pack, the task or mixture, the texts of a classifier's
# labels) -> dataset of a batch's arrays.
Convert: TypeAlias = 'Callable[[tf.data.Dataset, Lengths, bool, Any, Sequence[str] | None], tf.data.Dataset]'


def _seqios(name: str, **options: Any) -> Convert:
    """A converter of seqio's, which is imported when it is used.

    It does not check lengths: the task has cut each feature to its length, and the converter fills or packs it. Two
    conditions for each feature of each example are a fifth of the time to open a dataset.
    """

    def convert(dataset: tf.data.Dataset, lengths: Lengths, pack: bool, *_: Any) -> tf.data.Dataset:
        converter = getattr(seqio, name)(pack=pack, apply_length_check=False, **options)
        return converter(dataset, task_feature_lengths=dict(lengths))

    return convert


# `encoder_batches` derives a class from one of seqio's, which imports it.
def _masked_tokens(dataset: tf.data.Dataset, lengths: Lengths, pack: bool, *_: Any) -> tf.data.Dataset:
    from remixer_t5x.data import encoder_batches

    return encoder_batches.masked_tokens(dataset, lengths, pack)


def _classified(
    dataset: tf.data.Dataset, lengths: Lengths, pack: bool, source: Any, labels: Sequence[str] | None
) -> tf.data.Dataset:
    from remixer_t5x.data import encoder_batches

    return encoder_batches.classified(dataset, lengths, source, labels)


# By frame and features, as in `frames.FORMS`.
CONVERTERS: dict[tuple[str, frozenset[str]], Convert] = {
    (frames.ENCODER_DECODER, frozenset({'inputs', 'targets'})): _seqios('EncDecFeatureConverter'),
    (frames.DECODER_ONLY, frozenset({'targets'})): _seqios('LMFeatureConverter'),
    (frames.DECODER_ONLY, frozenset({'inputs', 'targets'})): _seqios(
        'PrefixLMFeatureConverter', loss_on_targets_only=True
    ),
    (frames.ENCODER_ONLY, frozenset({'inputs', 'targets'})): _masked_tokens,
    (frames.CLASSIFIER, frozenset({'inputs', 'targets'})): _classified,
}


def convert(
    frame: str,
    dataset: tf.data.Dataset,
    lengths: Lengths,
    pack: bool,
    source: Any,
    labels: Sequence[str] | None = None,
) -> tf.data.Dataset:
    """The arrays of `frames.abstract_batch`, row by row.

    Args:
        frame: name of the frame.
        dataset: examples of a task.
        lengths: tokens of each feature.
        pack: whether rows hold several examples.
        source: the task or mixture of the examples.
        labels: the texts of a classifier's labels; None is a regression, or another frame.
    """
    return CONVERTERS[frame, frozenset(lengths)](dataset, lengths, pack, source, labels)
