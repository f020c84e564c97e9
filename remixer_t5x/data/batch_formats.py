"""Defines the batch formats of each model type. A format lists the task features to read and the arrays of a batch.

The model types are `encoder_decoder`, `decoder_only`, `encoder_only` (a masked language model), and encoders with a
head: `classifier`, `token_labels`, `span` and `embedding`. If a model type accepts several formats, the features in
TASK_FEATURE_LENGTHS select one of them. The module `converters` converts examples to these arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from remixer_t5x.errors import UserError

ENCODER_DECODER = 'encoder_decoder'
DECODER_ONLY = 'decoder_only'
ENCODER_ONLY = 'encoder_only'
CLASSIFIER = 'classifier'
TOKEN_LABELS = 'token_labels'
SPAN = 'span'
EMBEDDING = 'embedding'

Lengths: TypeAlias = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class BatchFormat:
    """The arrays of a batch, and the task features from which the arrays are computed.

    Attributes:
        example: maps each feature name to a typical length in tokens, used as a default and in error messages.
        arrays: maps each array name to the features whose lengths add up to the array's row length, or to () if the
            array has shape [batch].
        packed: like `arrays`, but for the arrays that packing adds; None if the format does not support packing.
        floats: names of the float32 arrays; all other arrays are int32.
    """

    example: Lengths
    arrays: Mapping[str, tuple[str, ...]]
    packed: Mapping[str, tuple[str, ...]] | None = None
    floats: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(self.example)


_DECODER_ARRAYS = ('decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights')
_DECODER_PACKED_ARRAYS = ('decoder_segment_ids', 'decoder_positions')
# All arrays that only batches with packed rows contain.
PACKED_ARRAYS = ('encoder_segment_ids', 'encoder_positions', *_DECODER_PACKED_ARRAYS)
_INPUTS_AND_TARGETS = ('inputs', 'targets')

# `remixer-t5x info` uses the first format of a model type if TASK_FEATURE_LENGTHS is not set.
FORMATS: dict[str, tuple[BatchFormat, ...]] = {
    ENCODER_DECODER: (
        BatchFormat(
            {'inputs': 512, 'targets': 114},
            {'encoder_input_tokens': ('inputs',), **dict.fromkeys(_DECODER_ARRAYS, ('targets',))},
            {
                **dict.fromkeys(('encoder_segment_ids', 'encoder_positions'), ('inputs',)),
                **dict.fromkeys(_DECODER_PACKED_ARRAYS, ('targets',)),
            },
        ),
    ),
    DECODER_ONLY: (
        # A causal language model.
        BatchFormat(
            {'targets': 512},
            dict.fromkeys(_DECODER_ARRAYS, ('targets',)),
            dict.fromkeys(_DECODER_PACKED_ARRAYS, ('targets',)),
        ),
        # A prefix language model: each row consists of the inputs followed by the targets. `decoder_causal_attention`
        # is 1 at positions with bidirectional attention: the inputs and the first position that predicts a target.
        BatchFormat(
            {'inputs': 512, 'targets': 114},
            dict.fromkeys((*_DECODER_ARRAYS, 'decoder_causal_attention'), _INPUTS_AND_TARGETS),
            dict.fromkeys(_DECODER_PACKED_ARRAYS, _INPUTS_AND_TARGETS),
        ),
    ),
    ENCODER_ONLY: (
        # The inputs are the corrupted text; the targets are the original tokens at the positions to predict, and 0
        # elsewhere.
        BatchFormat(
            {'inputs': 512, 'targets': 512},
            dict.fromkeys(('encoder_input_tokens', 'encoder_target_tokens', 'encoder_loss_weights'), ('inputs',)),
            dict.fromkeys(('encoder_segment_ids', 'encoder_positions'), ('inputs',)),
        ),
    ),
    CLASSIFIER: (
        # The label is the index of the target text in the list of labels or, for regression, the target parsed as a
        # number.
        BatchFormat(
            {'inputs': 512, 'targets': 114},
            {'encoder_input_tokens': ('inputs',), 'labels': (), 'label_weights': ()},
            floats=('labels', 'label_weights'),
        ),
    ),
    TOKEN_LABELS: (
        # At the first token of each word, `labels` contains the index of the word's label.
        BatchFormat(
            {'inputs': 512, 'targets': 512},
            dict.fromkeys(('encoder_input_tokens', 'labels', 'label_weights'), ('inputs',)),
            floats=('labels', 'label_weights'),
        ),
    ),
    SPAN: (
        # The labels are the positions of the first and last token of the answer, or 0 if there is no answer.
        BatchFormat(
            {'inputs': 512, 'targets': 512},
            {
                'encoder_input_tokens': ('inputs',),
                **dict.fromkeys(('start_positions', 'end_positions', 'label_weights'), ()),
            },
            floats=('label_weights',),
        ),
    ),
    EMBEDDING: (
        # Each row contains two texts with the same meaning and the loss weight of the pair.
        BatchFormat(
            {'inputs': 128, 'targets': 8},
            {**dict.fromkeys(('encoder_input_tokens', 'positive_input_tokens'), ('inputs',)), 'label_weights': ()},
            floats=('label_weights',),
        ),
    ),
}


def get_batch_formats(model_type: str) -> tuple[BatchFormat, ...]:
    """Returns the batch formats that a model type supports. Raises UserError for an unknown model type."""
    if model_type not in FORMATS:
        raise UserError(
            f'MODEL_TYPE must be one of {", ".join(FORMATS)}, got {model_type!r}; pass --gin_file=model_types/NAME.gin'
        )
    return FORMATS[model_type]


def select_batch_format(model_type: str, lengths: Any) -> BatchFormat:
    """Returns the batch format whose features are the keys of `lengths`. Raises UserError if there is none."""
    formats = get_batch_formats(model_type)
    if isinstance(lengths, Mapping) and all(type(length) is int and length > 0 for length in lengths.values()):
        for candidate in formats:
            if set(candidate.features) == set(lengths):
                return candidate
    value = dict(lengths) if isinstance(lengths, Mapping) else lengths
    choices = ', or '.join(f'{" and ".join(each.features)}, as in {dict(each.example)}' for each in formats)
    raise UserError(
        f'TASK_FEATURE_LENGTHS must be positive lengths for {choices}, got {value} with MODEL_TYPE = {model_type!r}'
    )


def get_abstract_batch(
    model_type: str, lengths: Lengths | None = None, batch_size: int = 1, pack: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array of a global batch.

    `lengths` maps each feature to its row length in tokens; None uses the `example` lengths of the first format. Raises
    UserError if the model type does not support these features or, if `pack` is true, packing.
    """
    if lengths is None:
        lengths = get_batch_formats(model_type)[0].example
    selected = select_batch_format(model_type, lengths)
    if pack and selected.packed is None:
        raise UserError(f'PACK must be False with MODEL_TYPE = {model_type!r}, got True')
    arrays = {**selected.arrays, **(selected.packed or {})} if pack else selected.arrays
    return {
        name: jax.ShapeDtypeStruct(
            (batch_size, *([sum(lengths[feature] for feature in arrays[name])] if arrays[name] else [])),
            'float32' if name in selected.floats else 'int32',
        )
        for name in sorted(arrays)
    }


def get_batch_shapes(
    model_type: str, lengths: Lengths | None = None, batch_size: int = 1
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array of a global batch, as `Model.init` expects."""
    return {name: array.shape for name, array in get_abstract_batch(model_type, lengths, batch_size).items()}


def get_smallest_batch_shapes(model_type: str) -> dict[str, tuple[int, ...]]:
    """Returns small batch shapes that every model of this type accepts, for initializing parameters."""
    return get_batch_shapes(model_type, dict.fromkeys(get_batch_formats(model_type)[0].features, 2))


def count_positions(batch: Mapping[str, Any]) -> int:
    """Returns the number of encoder and decoder positions of a batch, including padding."""
    return sum(array.size for name, array in batch.items() if name.endswith('_input_tokens'))


def get_max_inference_lengths(lengths: Lengths) -> dict[str, int]:
    """Returns the maximum number of input tokens and of generated tokens for inference.

    For a causal language model, which has no `inputs` feature, half of the row length is reserved for the prompt.
    """
    if 'inputs' in lengths:
        return dict(lengths)
    half = lengths['targets'] // 2
    return {'inputs': max(1, half), 'targets': lengths['targets'] - half}


def get_input_array_name(model_type: str) -> str:
    """Returns the name of the inference batch's array of input tokens."""
    return 'prompt_tokens' if model_type == DECODER_ONLY else 'encoder_input_tokens'


def get_row_lengths(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the row lengths in tokens of the encoder and decoder, or only one length if the model has one stack."""
    return tuple(
        shapes[f'{side}_input_tokens'][1] for side in ('encoder', 'decoder') if f'{side}_input_tokens' in shapes
    )
