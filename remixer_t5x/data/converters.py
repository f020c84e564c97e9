"""Converts a task's features into a batch's arrays, for each batch format that `frames` lists.

Imports seqio, because a class derives from one of seqio's; other modules import this one where they convert.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.data import frames, task_vocabulary
from remixer_t5x.data.frames import Lengths
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf


class MaskedLMConverter(seqio.FeatureConverter):
    """Places `inputs` (the corrupted text) and `targets` (the token to predict, 0 elsewhere) side by side.

    seqio's EncoderFeatureConverter finds the positions to predict by one mask id, but BERT also predicts tokens that
    were replaced by a random token or left unchanged.
    """

    TASK_FEATURES = {name: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32) for name in ('inputs', 'targets')}
    MODEL_FEATURES = {
        name: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)
        for name in ('encoder_input_tokens', 'encoder_target_tokens', 'encoder_loss_weights')
    }
    PACKING_FEATURE_DTYPES = {'encoder_segment_ids': tf.int32, 'encoder_positions': tf.int32}

    def _convert_features(self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]) -> tf.data.Dataset:
        # seqio's packing reads a 0 at the end of an example as padding, and would move the next targets there.
        ds = ds.map(lambda ex: {**ex, 'targets': ex['targets'] + 1}, num_parallel_calls=tf.data.AUTOTUNE)
        return self._pack_or_pad(ds, task_feature_lengths).map(self._arrays, num_parallel_calls=tf.data.AUTOTUNE)

    def _arrays(self, features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        targets = tf.maximum(features['targets'] - 1, 0)
        arrays = {
            'encoder_input_tokens': features['inputs'],
            'encoder_target_tokens': targets,
            'encoder_loss_weights': tf.cast(targets > 0, tf.int32),
        }
        if self.pack:
            arrays['encoder_segment_ids'] = features['inputs_segment_ids']
            arrays['encoder_positions'] = features['inputs_positions']
        return arrays

    def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        names = [*self.MODEL_FEATURES, *(self.PACKING_FEATURE_DTYPES if self.pack else ())]
        return dict.fromkeys(names, task_feature_lengths['inputs'])


_CONVERTERS = {
    (frames.ENCODER_DECODER, 'inputs', 'targets'): seqio.EncDecFeatureConverter,
    (frames.DECODER_ONLY, 'targets'): seqio.LMFeatureConverter,
    (frames.DECODER_ONLY, 'inputs', 'targets'): functools.partial(
        seqio.PrefixLMFeatureConverter, loss_on_targets_only=True
    ),
    (frames.ENCODER_ONLY, 'inputs', 'targets'): MaskedLMConverter,
}


def convert(
    frame: str, dataset: tf.data.Dataset, lengths: Lengths, pack: bool, source: Any, labels: Sequence[str] | None = None
) -> tf.data.Dataset:
    """Converts examples into the arrays of `frames.abstract_batch`, row by row.

    Args:
        frame: name of the frame.
        dataset: examples of a task.
        lengths: tokens of each feature.
        pack: whether rows hold several examples.
        source: the task or mixture of the examples.
        labels: the texts of a classifier's labels; None for a regression, or another frame.
    """
    if frame == frames.CLASSIFIER:
        return _classification_arrays(dataset, lengths, source, labels)
    if frame == frames.ENCODER_ONLY and lengths['inputs'] != lengths['targets']:
        raise UserError(
            'TASK_FEATURE_LENGTHS must have the same length for inputs and targets, because a masked language model '
            f'predicts each token in place, got {dict(lengths)}'
        )
    # Skips seqio's length check: the task has truncated each feature, and two conditions for each feature of each
    # example are a fifth of the time that opening a dataset takes.
    converter = _CONVERTERS[frame, *sorted(lengths)](pack=pack, apply_length_check=False)
    return converter(dataset, task_feature_lengths=dict(lengths))


def _classification_arrays(
    dataset: tf.data.Dataset, lengths: Lengths, source: Any, labels: Sequence[str] | None
) -> tf.data.Dataset:
    """Adds the index of each target among `labels`, or without labels the number that the target spells."""
    feature, name = source.output_features['targets'], source.name
    # Texts distinguish labels whose ids are equal, because they were truncated or have unknown characters.
    has_texts = getattr(dataset.element_spec.get('targets_pretokenized'), 'dtype', None) == tf.string
    ids = [] if labels is None or has_texts else _distinct_label_ids(feature, labels, lengths['targets'], name)

    def arrays(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        inputs, targets = (tf.cast(example[key], tf.int32) for key in ('inputs', 'targets'))
        inputs = inputs[: lengths['inputs']]
        text = example['targets_pretokenized'] if has_texts else feature.vocabulary.decode_tf(targets)
        if labels is None:
            label = _parse_number(text, name)
        else:
            matches = tf.constant(list(labels)) == text if has_texts else _equal_rows(targets, ids)
            label = tf.cast(_label_index(matches, text, labels, name), tf.float32)
        return {
            'encoder_input_tokens': tf.pad(inputs, [[0, lengths['inputs'] - tf.shape(inputs)[0]]]),
            'labels': tf.reshape(label, []),
            'label_weights': tf.ones([], tf.float32),
        }

    return dataset.map(arrays, num_parallel_calls=tf.data.AUTOTUNE)


def _distinct_label_ids(feature: seqio.Feature, labels: Sequence[str], length: int, name: str) -> list[list[int]]:
    """Encodes each label as the task's preprocessors do: truncated to `length`, with the end token.

    Raises UserError if two labels have the same ids.
    """
    end = [int(feature.vocabulary.eos_id)] if feature.add_eos else []
    room = length - len(end)
    rows = [[int(token) for token in feature.vocabulary.encode(label)][:room] + end for label in labels]
    first: dict[tuple[int, ...], str] = {}
    for label, ids in zip(labels, rows, strict=True):
        if (other := first.setdefault(tuple(ids), label)) != label:
            raise UserError(
                f'LABELS must differ in their ids, and {name} has the same ids for {other!r} and {label!r}; give '
                'TASK_FEATURE_LENGTHS more targets, another VOCABULARY, or a task that keeps targets_pretokenized'
            )
    return rows


def _equal_rows(targets: tf.Tensor, ids: Sequence[Sequence[int]]) -> tf.Tensor:
    """[labels] bool: which rows of `ids` equal the targets."""
    width = max(map(len, ids))
    table = tf.constant([[*row, *[0] * (width - len(row))] for row in ids], tf.int32)
    fitted = tf.pad(targets[:width], [[0, tf.maximum(width - tf.shape(targets)[0], 0)]])
    return tf.reduce_all(table == fitted, axis=1) & (tf.shape(targets)[0] <= width)


def _label_index(matches: tf.Tensor, text: tf.Tensor, labels: Sequence[str], name: str) -> tf.Tensor:
    message = f"UserError: a target of {name} is not in LABELS, which are {', '.join(labels)}; add to them '"
    message = tf.strings.join([message, tf.strings.regex_replace(text, r'\s', ' '), "'"])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_any(matches), [message])]):
        return tf.argmax(matches, output_type=tf.int32)


def _parse_number(text: tf.Tensor, name: str) -> tf.Tensor:
    is_number = tf.strings.regex_full_match(text, r'\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*')
    message = f'UserError: a target of {name} is not a number; give LABELS for a task whose targets are words'
    with tf.control_dependencies([tf.debugging.Assert(is_number, [message])]):
        return tf.strings.to_number(tf.strings.strip(text), tf.float32)


def check_labels(source: Any, labels: Sequence[str] | None) -> None:
    """Raises UserError, with what to type, unless `labels` include the labels of every task in `source`."""
    known = dict.fromkeys(label for task in seqio.get_subtasks(source) for label in task_vocabulary.labels(task) or ())
    if not all(label in (labels or ()) for label in known):
        value = ', '.join(json.dumps(label, ensure_ascii=False) for label in known)
        raise UserError(
            f'LABELS must include the {len(known)} labels of {source.name}, got {labels and tuple(labels)}; '
            f"give --gin.LABELS='({value})'"
        )
