"""Functions as a TensorFlow SavedModel with the tokenizer inside: texts in, texts out, any number of rows.

Each function has a signature for texts, of its name, and one for ids, `NAME_ids`. The program is the StableHLO of
`stablehlo`, which TensorFlow runs through XLA, so no operation is translated. Tokenizers are operations of TensorFlow
(of TensorFlow Text for SentencePiece), not Python functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from remixer_t5x.devices import jax_workarounds
from remixer_t5x.extras.export import stablehlo, texts
from remixer_t5x.extras.export.functions import Function
from remixer_t5x.lazy import tf

Call = Callable[..., Any]


def write(
    folder: str | os.PathLike[str],
    made: Sequence[Function],
    weights: Mapping[str, np.ndarray],
    vocabulary: Any,
    lengths: Mapping[str, int],
    ends_inputs: bool,
    labels: Sequence[str] = (),
) -> list[str]:
    """Writes the SavedModel into `folder`; returns the names of its signatures."""
    module = tf.Module()
    # Kept by the module, so that all functions share and save them once.
    module.weights = {name: tf.Variable(array, trainable=False, name=name) for name, array in weights.items()}
    codec = _codec(vocabulary, module)
    signatures: dict[str, Any] = {}
    for function in made:
        call = _of_ids(stablehlo.exported(function, weights), module.weights)
        specs = [tf.TensorSpec([None, *shape], tf.int32, name=name) for name, shape in function.inputs.items()]
        signatures[f'{function.name}_ids'] = tf.function(call, input_signature=specs, autograph=False)
        if codec is not None:
            sides = [name for name in function.inputs if name != 'seed']
            text = _of_texts(call, function, codec, lengths, ends_inputs, labels)
            specs = [tf.TensorSpec([None], tf.string, name=name) for name in sides]
            signatures[function.name] = tf.function(text, input_signature=specs, autograph=False)
    module.functions = dict(signatures)
    tf.saved_model.save(module, os.fspath(folder), signatures=signatures)
    return sorted(signatures)


def _of_ids(exported: export.Exported, weights: Mapping[str, Any]) -> Call:
    """The program as one operation of TensorFlow, XlaCallModule, for ids.

    Not by jax2tf, which writes StableHLO that TensorFlow reads a month after JAX; a release of TensorFlow is older.
    """
    from tensorflow.compiler.tf2xla.python import xla

    module = jax_workarounds.stablehlo_for_older_readers(exported)
    types = [tf.as_dtype(aval.dtype) for aval in exported.out_avals]
    shapes = [[size if isinstance(size, int) else None for size in aval.shape] for aval in exported.out_avals]

    def call(*inputs: Any) -> Any:
        given = jax.tree.leaves(((dict(weights), *inputs), {}))
        results = xla.call_module(
            [tf.convert_to_tensor(given[index]) for index in exported.module_kept_var_idx],
            version=exported.calling_convention_version,
            module=module,
            Tout=types,
            Sout=shapes,
            platforms=[platform.upper() for platform in exported.platforms],
            use_shardy_partitioner=jax.config.jax_use_shardy_partitioner,
        )
        return jax.tree.unflatten(exported.out_tree, results)

    return call


def _of_texts(
    call: Call, function: Function, codec: _Codec, lengths: Mapping[str, int], ends: bool, labels: Sequence[str]
) -> Call:
    def of_texts(*given: Any) -> dict[str, Any]:
        sides = [name for name in function.inputs if name != 'seed']
        ids = [
            codec.padded(strings, lengths[side], ends or side == 'targets')
            for side, strings in zip(sides, given, strict=True)
        ]
        if 'seed' in function.inputs:
            ids.append(tf.range(tf.shape(ids[0])[0]))
        found = dict(call(*ids))
        if 'tokens' in found:
            found['texts'] = codec.decoded(found.pop('tokens'))
        if function.name == 'classify' and labels:
            found['labels'] = tf.gather(tf.constant(list(labels)), tf.argmax(found['scores'], axis=-1))
        return found

    return of_texts


def _codec(vocabulary: Any, module: Any) -> _Codec | None:
    kind = texts.kind(vocabulary)
    if kind == texts.IDS:
        return None
    if kind == texts.BYTES:
        return _Bytes(vocabulary)
    # The module keeps it: its table must be saved.
    module.tokenizer = vocabulary.tf_tokenizer
    return _Pieces(vocabulary, module.tokenizer)


class _Codec:
    """Texts [rows] to ids [rows, length] and back, in TensorFlow's operations."""

    def __init__(self, vocabulary: Any):
        self._vocabulary = vocabulary

    def ids(self, strings: Any) -> Any:
        """A ragged tensor of ids, without end tokens."""
        raise NotImplementedError

    def decoded(self, tokens: Any) -> Any:
        """[rows, answers, length] ids -> [rows, answers] texts."""
        flat = tf.reshape(tokens, [-1, tf.shape(tokens)[-1]])
        return tf.reshape(self._decoded(flat), tf.shape(tokens)[:-1])

    def _decoded(self, tokens: Any) -> Any:
        return self._vocabulary.decode_tf(tokens)

    def padded(self, strings: Any, length: int, ends: bool) -> Any:
        eos_id = self._vocabulary.eos_id if ends else None
        ids = self.ids(strings)[:, : length - (eos_id is not None)]
        if eos_id is not None:
            end = tf.fill([ids.nrows(), 1], tf.constant(int(eos_id), tf.int32))
            ids = tf.concat([ids, end], axis=1)
        return ids.to_tensor(shape=[None, length])


class _Bytes(_Codec):
    def ids(self, strings: Any) -> Any:
        split = tf.strings.bytes_split(strings)
        return split.with_flat_values(tf.cast(tf.io.decode_raw(split.flat_values, tf.uint8)[:, 0], tf.int32) + 3)


class _Pieces(_Codec):
    def __init__(self, vocabulary: Any, tokenizer: Any):
        super().__init__(vocabulary)
        self._tokenizer = tokenizer

    def ids(self, strings: Any) -> Any:
        return self._tokenizer.tokenize(strings)

    def _decoded(self, tokens: Any) -> Any:
        eos_id, count = int(self._vocabulary.eos_id), int(self._vocabulary.vocab_size)
        is_end = tf.cast(tf.equal(tokens, eos_id), tf.int32)
        behind = tf.cumsum(is_end, exclusive=True, axis=-1) > 0
        known = tf.where(tokens < count, tokens, int(self._vocabulary.unk_id))
        return self._tokenizer.detokenize(tf.where(behind, 0, known))
