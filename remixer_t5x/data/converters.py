"""Converts task features to the arrays of a batch in each of the formats in `batch_formats`.

Other modules must import this module inside functions, because importing it also imports seqio.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.data import batch_formats, task_vocabulary, token_alignment
from remixer_t5x.data.pipeline import DatasetConfig
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf


class MaskedLMConverter(seqio.FeatureConverter):
    """Converts examples of a masked language model to the arrays of a batch.

    `inputs` contains the corrupted text; `targets` contains the original token at each position to predict, and 0
    elsewhere. seqio's EncoderFeatureConverter predicts only positions with a mask id, but BERT also predicts tokens
    that were replaced by a random token or left unchanged.
    """

    TASK_FEATURES = {name: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32) for name in ('inputs', 'targets')}
    MODEL_FEATURES = {
        name: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)
        for name in ('encoder_input_tokens', 'encoder_target_tokens', 'encoder_loss_weights')
    }
    PACKING_FEATURE_DTYPES = {'encoder_segment_ids': tf.int32, 'encoder_positions': tf.int32}

    def _convert_features(self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]) -> tf.data.Dataset:
        # Add 1 to the targets, because seqio's packing would treat zeros at their end as padding.
        ds = ds.map(lambda ex: {**ex, 'targets': ex['targets'] + 1}, num_parallel_calls=tf.data.AUTOTUNE)
        return self._pack_or_pad(ds, task_feature_lengths).map(
            self._make_batch_arrays, num_parallel_calls=tf.data.AUTOTUNE
        )

    def _make_batch_arrays(self, features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
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
    (batch_formats.ENCODER_DECODER, 'inputs', 'targets'): seqio.EncDecFeatureConverter,
    (batch_formats.DECODER_ONLY, 'targets'): seqio.LMFeatureConverter,
    (batch_formats.DECODER_ONLY, 'inputs', 'targets'): functools.partial(
        seqio.PrefixLMFeatureConverter, loss_on_targets_only=True
    ),
    (batch_formats.ENCODER_ONLY, 'inputs', 'targets'): MaskedLMConverter,
}
# Maps a model type to a function that converts the texts of an example to the arrays of one batch row (for SPAN: one
# row per window).
TEXT_CONVERTERS: dict[str, Callable[..., dict[str, np.ndarray]]] = {
    batch_formats.TOKEN_LABELS: token_alignment.make_tag_arrays,
    batch_formats.SPAN: token_alignment.make_span_arrays,
    batch_formats.EMBEDDING: token_alignment.make_pair_arrays,
}


def convert_examples(config: DatasetConfig, dataset: tf.data.Dataset, source: Any) -> tf.data.Dataset:
    """Converts each example of the task or mixture `source` to one row of each array of a batch."""
    model_type, lengths = config.model_type, config.task_feature_lengths
    if model_type == batch_formats.CLASSIFIER:
        return _convert_targets_to_labels(config, dataset, source)
    if model_type in TEXT_CONVERTERS:
        return _convert_original_texts(config, dataset, source)
    if model_type == batch_formats.ENCODER_ONLY and lengths['inputs'] != lengths['targets']:
        raise UserError(
            f'TASK_FEATURE_LENGTHS must have the same length for inputs and targets, got {dict(lengths)}; a masked '
            'language model predicts each token at its input position'
        )
    # Disable seqio's length check, because the task already truncates each feature and the check takes 20% of the time
    # needed to open a dataset.
    converter = _CONVERTERS[model_type, *sorted(lengths)](pack=config.pack, apply_length_check=False)
    return converter(dataset, task_feature_lengths=dict(lengths))


def _convert_targets_to_labels(config: DatasetConfig, dataset: tf.data.Dataset, source: Any) -> tf.data.Dataset:
    """Converts each target to its index in `config.labels`, or parses it as a number if there are no labels."""
    labels, length = config.labels, config.task_feature_lengths['inputs']
    vocabulary, name = source.output_features['targets'].vocabulary, source.name
    # If the original texts are unavailable, compare the decoded targets with encoded and decoded labels, because
    # encoding may change a text.
    has_texts = getattr(dataset.element_spec.get('targets_pretokenized'), 'dtype', None) == tf.string
    label_texts = [label if has_texts else vocabulary.decode(vocabulary.encode(label)) for label in labels or ()]

    def convert_example(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        inputs, targets = (tf.cast(example[key], tf.int32) for key in ('inputs', 'targets'))
        inputs = inputs[:length]
        text = example['targets_pretokenized'] if has_texts else vocabulary.decode_tf(targets)
        label = _parse_number(text, name) if labels is None else _find_label_index(text, label_texts, name)
        return {
            'encoder_input_tokens': tf.pad(inputs, [[0, length - tf.shape(inputs)[0]]]),
            'labels': tf.reshape(label, []),
            'label_weights': tf.ones([], tf.float32),
        }

    return dataset.map(convert_example, num_parallel_calls=tf.data.AUTOTUNE)


def _convert_original_texts(config: DatasetConfig, dataset: tf.data.Dataset, source: Any) -> tf.data.Dataset:
    """Converts examples in Python, because TensorFlow cannot align tokens with words for every vocabulary."""
    model_type, lengths = config.model_type, config.task_feature_lengths
    vocabulary = source.output_features['inputs'].vocabulary
    features = tuple(f'{feature}_pretokenized' for feature in ('inputs', 'targets'))
    if missing := [feature for feature in features if feature not in dataset.element_spec]:
        raise UserError(
            f'{source.name} must have {" and ".join(features)} for MODEL_TYPE = {model_type!r}, got no '
            f'{" and no ".join(missing)}; use a task of text pairs, or seqio.preprocessors.tokenize with '
            'copy_pretokenized=True'
        )
    settings: dict[str, Any] = {
        batch_formats.TOKEN_LABELS: {'labels': tuple(config.labels or ()), 'name': source.name},
        batch_formats.SPAN: {'stride': config.doc_stride},
    }.get(model_type, {})
    has_windows = model_type == batch_formats.SPAN
    shapes = batch_formats.get_abstract_batch(model_type, lengths)

    def convert_texts(*texts: bytes) -> list[np.ndarray]:
        inputs, targets = (text.decode(errors='replace') for text in texts)
        try:
            arrays = TEXT_CONVERTERS[model_type](inputs, targets, vocabulary, lengths['inputs'], **settings)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'the targets of {source.name} must be valid for MODEL_TYPE = {model_type!r}, got {targets!r:.60} '
                f'({error})'
            ) from error
        return [arrays[name] for name in shapes]

    def convert_example(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        texts = [example[feature] for feature in features]
        # Use a stateless call, because TensorFlow cannot save the position of a pipeline with a stateful Python call.
        dtypes = [tf.as_dtype(array.dtype) for array in shapes.values()]
        rows = tf.numpy_function(convert_texts, texts, dtypes, stateful=False)
        return {
            name: tf.ensure_shape(row, (None, *array.shape[1:]) if has_windows else array.shape[1:])
            for row, (name, array) in zip(rows, shapes.items(), strict=True)
        }

    converted = dataset.map(convert_example, num_parallel_calls=tf.data.AUTOTUNE)
    return converted.unbatch() if has_windows else converted


def _find_label_index(text: tf.Tensor, labels: Sequence[str], name: str) -> tf.Tensor:
    matches = tf.constant(list(labels)) == text
    message = f'UserError: LABELS must include the targets of {name}, got {", ".join(labels)}; add '
    message = tf.strings.join([message, tf.strings.regex_replace(text, r'\s', ' ')])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_any(matches), [message])]):
        return tf.cast(tf.argmax(matches, output_type=tf.int32), tf.float32)


def _parse_number(text: tf.Tensor, name: str) -> tf.Tensor:
    is_number = tf.strings.regex_full_match(text, r'\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*')
    # A number beyond the float32 range, such as 1e39, is parsed as infinity.
    number = tf.strings.to_number(tf.where(is_number, tf.strings.strip(text), 'inf'), tf.float32)
    message = f'UserError: the targets of {name} must be finite float32 numbers if LABELS is None, got '
    message = tf.strings.join([message, tf.strings.regex_replace(text, r'\s', ' '), '; set LABELS'])
    with tf.control_dependencies([tf.debugging.Assert(tf.math.is_finite(number), [message])]):
        return tf.identity(number)


def check_labels(source: Any, labels: Sequence[str] | None) -> None:
    """Raises UserError unless `labels` includes all labels of every task in the task or mixture `source`."""
    known = dict.fromkeys(
        label for task in seqio.get_subtasks(source) for label in task_vocabulary.get_labels(task) or ()
    )
    if not all(label in (labels or ()) for label in known):
        value = ', '.join(json.dumps(label, ensure_ascii=False) for label in known)
        raise UserError(
            f'LABELS must include the {len(known)} labels of {source.name}, got {labels and tuple(labels)}; '
            f"pass --gin.LABELS='({value})'"
        )
