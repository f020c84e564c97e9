"""Batches of an encoder alone: masked language modelling, and labels or numbers of whole texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf


class MaskedLMConverter(seqio.FeatureConverter):
    """`inputs` (the damaged text) and `targets` (the token where one is to be predicted, 0 elsewhere), side by side.

    seqio's own EncoderFeatureConverter finds the places by one mask id, but BERT also predicts tokens that it has
    replaced by others, or kept.
    """

    TASK_FEATURES = {name: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32) for name in ('inputs', 'targets')}
    MODEL_FEATURES = {
        name: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)
        for name in ('encoder_input_tokens', 'encoder_target_tokens', 'encoder_loss_weights')
    }
    PACKING_FEATURE_DTYPES = {'encoder_segment_ids': tf.int32, 'encoder_positions': tf.int32}

    def _convert_features(self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]) -> tf.data.Dataset:
        # seqio's packing takes a 0 at the end of an example for padding, and would move the next targets there.
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


def masked_tokens(dataset: tf.data.Dataset, lengths: Mapping[str, int], pack: bool) -> tf.data.Dataset:
    """The arrays of a masked language model. Raises UserError unless both features have one length."""
    if lengths['inputs'] != lengths['targets']:
        raise UserError(
            f'TASK_FEATURE_LENGTHS is {dict(lengths)}; a masked language model predicts each token in its place: give '
            f'inputs and targets one length'
        )
    # Lengths unchecked, as in `converters`.
    converter = MaskedLMConverter(pack=pack, apply_length_check=False)
    return converter(dataset, task_feature_lengths=dict(lengths))


def classified(
    dataset: tf.data.Dataset, lengths: Mapping[str, int], source: Any, labels: Sequence[str] | None
) -> tf.data.Dataset:
    """The arrays of a classifier: each text-to-text example with the index of its answer among `labels`, or with the
    number that its answer spells where `labels` is None.
    """
    feature, name = source.output_features['targets'], source.name
    # Texts tell labels apart that have the same ids: cut, or of unknown characters.
    has_texts = getattr(dataset.element_spec.get('targets_pretokenized'), 'dtype', None) == tf.string
    if labels is not None and not has_texts:
        ids = answer_ids(feature, labels, lengths['targets'])
        _check_distinct(labels, ids, name)

    def arrays(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        inputs, targets = (tf.cast(example[key], tf.int32) for key in ('inputs', 'targets'))
        inputs = inputs[: lengths['inputs']]
        text = example['targets_pretokenized'] if has_texts else feature.vocabulary.decode_tf(targets)
        if labels is None:
            label = _number(text, name)
        else:
            equal = tf.constant(list(labels)) == text if has_texts else _equal_rows(targets, ids)
            label = tf.cast(_index(equal, text, labels, name), tf.float32)
        return {
            'encoder_input_tokens': tf.pad(inputs, [[0, lengths['inputs'] - tf.shape(inputs)[0]]]),
            'labels': tf.reshape(label, []),
            'label_weights': tf.ones([], tf.float32),
        }

    return dataset.map(arrays, num_parallel_calls=tf.data.AUTOTUNE)


def answer_ids(feature: seqio.Feature, answers: Sequence[str], length: int) -> list[list[int]]:
    """Ids of each answer, with its end token, as a task's preprocessors make them and cut them to `length`."""
    end = [int(feature.vocabulary.eos_id)] if feature.add_eos else []
    room = length - len(end)
    return [[int(token) for token in feature.vocabulary.encode(answer)][:room] + end for answer in answers]


def _check_distinct(labels: Sequence[str], ids: Sequence[Sequence[int]], name: str) -> None:
    known: dict[tuple[int, ...], str] = {}
    for label, row in zip(labels, ids, strict=True):
        other = known.setdefault(tuple(row), label)
        if other != label:
            raise UserError(
                f'LABELS must differ in their ids, and {name} has one row of ids for {other!r} and {label!r}; give '
                'TASK_FEATURE_LENGTHS more targets, another VOCABULARY, or a task that keeps targets_pretokenized'
            )


def _equal_rows(targets: tf.Tensor, ids: Sequence[Sequence[int]]) -> tf.Tensor:
    """[labels] bool: which of the rows of `ids` the targets are."""
    width = max(map(len, ids))
    table = tf.constant([[*row, *[0] * (width - len(row))] for row in ids], tf.int32)
    fitted = tf.pad(targets[:width], [[0, tf.maximum(width - tf.shape(targets)[0], 0)]])
    return tf.reduce_all(table == fitted, axis=1) & (tf.shape(targets)[0] <= width)


def _index(equal: tf.Tensor, text: tf.Tensor, labels: Sequence[str], name: str) -> tf.Tensor:
    known = ', '.join(labels)
    message = f"UserError: an answer of {name} is not in LABELS, which are {known}; give all of them, also '"
    message = tf.strings.join([message, tf.strings.regex_replace(text, r'\s', ' '), "'"])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_any(equal), [message])]):
        return tf.argmax(equal, output_type=tf.int32)


def _number(text: tf.Tensor, name: str) -> tf.Tensor:
    is_number = tf.strings.regex_full_match(text, r'\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*')
    message = f'UserError: an answer of {name} is not a number; give LABELS for a task whose answers are words'
    with tf.control_dependencies([tf.debugging.Assert(is_number, [message])]):
        return tf.strings.to_number(tf.strings.strip(text), tf.float32)


def check_labels(source: Any, labels: Sequence[str] | None) -> None:
    """Raises UserError, with what to type, unless `labels` hold the labels of every task in `source`."""
    known = dict.fromkeys(label for task in seqio.get_subtasks(source) for label in task_vocabulary.labels(task) or ())
    if all(label in (labels or ()) for label in known):
        return
    given = 'no LABELS are given' if labels is None else f'LABELS is {tuple(labels)}'
    wanted = f'({", ".join(json.dumps(label, ensure_ascii=False) for label in known)})'
    raise UserError(f"{source.name} has {len(known)} labels, and {given}: give --gin.LABELS='{wanted}'")
