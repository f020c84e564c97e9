"""Writes a TensorFlow SavedModel that accepts any number of rows.

Each function has a signature `NAME_ids` for token ids and, if the vocabulary is a SentencePiece model, a signature
`NAME` for texts, whose tokenizer consists of operations of TensorFlow Text. TensorFlow runs the function's StableHLO
program with XLA, without converting it to TensorFlow operations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from remixer_t5x.devices import jax_workarounds
from remixer_t5x.extras.export import SENTENCEPIECE
from remixer_t5x.extras.export.exported_functions import ExportedFunction
from remixer_t5x.lazy_imports import tf

Call = Callable[..., Any]


def write_saved_model(
    folder: str | os.PathLike[str],
    functions: Sequence[ExportedFunction],
    exported: Mapping[str, jax.export.Exported],
    weights: Mapping[str, np.ndarray],
    vocabulary: Any,
    contents: Mapping[str, Any],
) -> list[str]:
    """Writes the SavedModel into `folder`, and returns the names of its signatures.

    Args:
        exported: the program of each function.
        contents: the content of contents.json.
    """
    module = tf.Module()
    # As attributes of the module, the weights are shared by all functions and saved only once.
    module.weights = {name: tf.Variable(array, trainable=False, name=name) for name, array in weights.items()}
    codec = None
    if contents['vocabulary']['kind'] == SENTENCEPIECE:
        module.tokenizer = vocabulary.tf_tokenizer
        codec = _TensorFlowTokenizer(vocabulary, module.tokenizer, contents['vocabulary']['sentinel_pattern'])
    signatures: dict[str, Any] = {}
    for function in functions:
        call = _build_ids_function(exported[function.name], module.weights)
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
        tokenizer: a TensorFlow Text SentencePiece tokenizer.
        sentinel_pattern: a regular expression that matches the names of sentinels; None if texts have no sentinels.
    """

    def __init__(self, vocabulary: Any, tokenizer: Any, sentinel_pattern: str | None):
        self._vocabulary, self._tokenizer, self._sentinel_pattern = vocabulary, tokenizer, sentinel_pattern

    def encode(self, strings: Any, length: int, ends: bool) -> Any:
        """Tokenizes texts, and pads or truncates them to `length`. Adds an end token if `ends` is true."""
        if self._sentinel_pattern:
            strings = tf.strings.regex_replace(strings, self._sentinel_pattern, r' <extra_id_\1> ')
        ids = self._tokenizer.tokenize(strings)[:, : length - ends]
        if ends:
            end = tf.fill([ids.nrows(), 1], tf.constant(int(self._vocabulary.eos_id), tf.int32))
            ids = tf.concat([ids, end], axis=1)
        return ids.to_tensor(shape=[None, length])

    def decode(self, tokens: Any) -> Any:
        """Decodes ids [rows, answers, length] to texts [rows, answers]."""
        flat = tf.reshape(tokens, [-1, tf.shape(tokens)[-1]])
        is_end = tf.cast(tf.equal(flat, int(self._vocabulary.eos_id)), tf.int32)
        before_end = tf.cumsum(is_end, exclusive=True, axis=-1) == 0
        known = tf.where(flat < int(self._vocabulary.vocab_size), flat, int(self._vocabulary.unk_id))
        return tf.reshape(self._tokenizer.detokenize(tf.where(before_end, known, 0)), tf.shape(tokens)[:-1])
