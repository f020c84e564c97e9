"""Writes a TensorFlow SavedModel that includes the tokenizer and accepts any number of texts.

Each function has two signatures: `NAME` for texts and `NAME_ids` for token ids. TensorFlow runs the function's
StableHLO program with XLA, without converting it to TensorFlow operations. Tokenizers consist of TensorFlow operations
(from TensorFlow Text for SentencePiece), not Python functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from remixer_t5x.devices import jax_workarounds
from remixer_t5x.extras.export import BYTES, IDS
from remixer_t5x.extras.export.exported_functions import ExportedFunction
from remixer_t5x.lazy_imports import tf

Call = Callable[..., Any]
# Number of special ids that precede the ids of bytes.
_SPECIAL_IDS = 3


def write_saved_model(
    folder: str | os.PathLike[str],
    functions: Sequence[ExportedFunction],
    weights: Mapping[str, np.ndarray],
    vocabulary: Any,
    contents: Mapping[str, Any],
) -> list[str]:
    """Writes the SavedModel into `folder`, and returns the names of its signatures.

    Args:
        contents: the content of contents.json.
    """
    module = tf.Module()
    # As attributes of the module, the weights are shared by all functions and saved only once.
    module.weights = {name: tf.Variable(array, trainable=False, name=name) for name, array in weights.items()}
    codec = None
    if contents['vocabulary']['kind'] != IDS:
        is_bytes = contents['vocabulary']['kind'] == BYTES
        module.tokenizer = None if is_bytes else vocabulary.tf_tokenizer
        codec = _TensorFlowTokenizer(vocabulary, module.tokenizer, contents['vocabulary']['sentinel_pattern'])
    signatures: dict[str, Any] = {}
    for function in functions:
        call = _build_ids_function(function.to_stablehlo(weights), module.weights)
        specs = [tf.TensorSpec([None, *shape], tf.int32, name=name) for name, shape in function.inputs.items()]
        signatures[f'{function.name}_ids'] = tf.function(call, input_signature=specs, autograph=False)
        if codec is not None:
            specs = [tf.TensorSpec([None], tf.string, name=name) for name in function.inputs if name != 'seed']
            text_call = _build_text_function(call, function, codec, contents)
            signatures[function.name] = tf.function(text_call, input_signature=specs, autograph=False)
    module.functions = dict(signatures)
    tf.saved_model.save(module, os.fspath(folder), signatures=signatures)
    return sorted(signatures)


def _build_ids_function(exported: jax.export.Exported, weights: Mapping[str, Any]) -> Call:
    """Returns a function that takes token ids and runs the program as one TensorFlow operation, XlaCallModule.

    jax2tf is not used, because TensorFlow releases older than a month cannot read the StableHLO that jax2tf writes.
    """
    from tensorflow.compiler.tf2xla.python import xla

    module = jax_workarounds.serialize_older_stablehlo(exported)
    types = [tf.as_dtype(aval.dtype) for aval in exported.out_avals]
    shapes = [[size if isinstance(size, int) else None for size in aval.shape] for aval in exported.out_avals]

    def call_with_ids(*inputs: Any) -> Any:
        leaves = jax.tree.leaves(((dict(weights), *inputs), {}))
        results = xla.call_module(
            [tf.convert_to_tensor(leaves[index]) for index in exported.module_kept_var_idx],
            version=exported.calling_convention_version,
            module=module,
            Tout=types,
            Sout=shapes,
            platforms=[platform.upper() for platform in exported.platforms],
            use_shardy_partitioner=jax.config.jax_use_shardy_partitioner,
        )
        return jax.tree.unflatten(exported.out_tree, results)

    return call_with_ids


def _build_text_function(
    call: Call, function: ExportedFunction, codec: _TensorFlowTokenizer, contents: Mapping[str, Any]
) -> Call:
    lengths, ends_inputs = contents['lengths'], contents['vocabulary']['ends_inputs']

    def call_with_texts(*texts: Any) -> dict[str, Any]:
        sides = [name for name in function.inputs if name != 'seed']
        ids = [
            codec.encode(strings, lengths[side], ends_inputs or side == 'targets')
            for side, strings in zip(sides, texts, strict=True)
        ]
        if 'seed' in function.inputs:
            ids.append(tf.range(tf.shape(ids[0])[0]))
        outputs = dict(call(*ids))
        if 'tokens' in outputs:
            outputs['texts'] = codec.decode(outputs.pop('tokens'))
        if function.name == 'classify' and contents['labels']:
            outputs['labels'] = tf.gather(tf.constant(contents['labels']), tf.argmax(outputs['scores'], axis=-1))
        return outputs

    return call_with_texts


class _TensorFlowTokenizer:
    """Converts texts [rows] to ids [rows, length] and back with TensorFlow operations.

    Args:
        tokenizer: a TensorFlow Text SentencePiece tokenizer; None for a byte vocabulary.
        sentinel_pattern: a regular expression that matches the names of sentinels; None if texts have no sentinels.
    """

    def __init__(self, vocabulary: Any, tokenizer: Any, sentinel_pattern: str | None):
        self._vocabulary, self._tokenizer, self._sentinel_pattern = vocabulary, tokenizer, sentinel_pattern

    def encode(self, strings: Any, length: int, ends: bool) -> Any:
        """Tokenizes texts, and pads or truncates them to `length`. Adds an end token if `ends` is true."""
        eos_id = self._vocabulary.eos_id if ends else None
        if self._tokenizer is None:
            ids = self._encode_bytes(strings)
        else:
            pattern = self._sentinel_pattern
            ids = self._tokenizer.tokenize(
                tf.strings.regex_replace(strings, pattern, r' <extra_id_\1> ') if pattern else strings
            )
        ids = ids[:, : length - (eos_id is not None)]
        if eos_id is not None:
            end = tf.fill([ids.nrows(), 1], tf.constant(int(eos_id), tf.int32))
            ids = tf.concat([ids, end], axis=1)
        return ids.to_tensor(shape=[None, length])

    def _encode_bytes(self, strings: Any) -> Any:
        # The pattern `\b\B` never matches.
        pattern = self._sentinel_pattern or r'\b\B'
        # The byte 0xFF, which does not occur in UTF-8, separates sentinels from other text.
        parts = tf.strings.split(tf.strings.regex_replace(strings, pattern, b'\xff\\0\xff'), b'\xff')
        is_sentinel = tf.strings.regex_full_match(parts.flat_values, pattern)
        numbers = tf.strings.regex_replace(tf.where(is_sentinel, parts.flat_values, '0'), '[^0-9]', '')
        sentinel_ids = int(self._vocabulary.vocab_size) - 1 - tf.strings.to_number(numbers, tf.int32)
        # Each sentinel is replaced by one byte, `?`, because it becomes one id.
        split = tf.strings.bytes_split(tf.where(is_sentinel, '?', parts.flat_values))
        values = tf.cast(tf.reshape(tf.io.decode_raw(split.flat_values, tf.uint8), [-1]), tf.int32)
        rows = split.value_rowids()
        ids = tf.where(tf.gather(is_sentinel, rows), tf.gather(sentinel_ids, rows), values + _SPECIAL_IDS)
        return parts.with_flat_values(split.with_flat_values(ids)).merge_dims(1, 2)

    def decode(self, tokens: Any) -> Any:
        """Decodes ids [rows, answers, length] to texts [rows, answers]."""
        flat = tf.reshape(tokens, [-1, tf.shape(tokens)[-1]])
        return tf.reshape(self._decode_rows(flat), tf.shape(tokens)[:-1])

    def _decode_rows(self, tokens: Any) -> Any:
        is_end = tf.cast(tf.equal(tokens, int(self._vocabulary.eos_id)), tf.int32)
        before_end = tf.cumsum(is_end, exclusive=True, axis=-1) == 0
        if self._tokenizer is not None:
            known = tf.where(tokens < int(self._vocabulary.vocab_size), tokens, int(self._vocabulary.unk_id))
            return self._tokenizer.detokenize(tf.where(before_end, known, 0))
        values = tokens - _SPECIAL_IDS
        kept = tf.ragged.boolean_mask(values, before_end & (values >= 0) & (values < 256))
        texts = tf.strings.reduce_join(tf.gather(tf.constant([bytes([value]) for value in range(256)]), kept), axis=-1)
        # Drops bytes that are not valid UTF-8.
        return tf.strings.unicode_transcode(texts, 'UTF-8', 'UTF-8', errors='ignore')
