"""Sequence-to-sequence models with an encoder-decoder architecture."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.models import decoding
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.interface import Batch, GenerativeModel, Params, select_batch_arrays


@dataclasses.dataclass(frozen=True)
class Seq2Seq(GenerativeModel):
    """Sequence-to-sequence model with an encoder and a decoder.

    A batch contains the arrays of seqio's EncDecFeatureConverter, [batch, length] int32: encoder_input_tokens,
    decoder_input_tokens, decoder_target_tokens, decoder_loss_weights, and for packed rows encoder_segment_ids,
    encoder_positions, decoder_segment_ids, decoder_positions.
    """

    module: EncoderDecoder

    model_type = 'encoder_decoder'
    input_array = 'encoder_input_tokens'

    def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
        """Returns the encoder output [batch, length, embed] for `inputs` [batch, length], one example per row."""
        return self._apply_module('encode', params, inputs)

    def _init_method_and_inputs(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        arrays = select_batch_arrays(batch, 'encoder_input_tokens', 'encoder_segment_ids', 'decoder_segment_ids')
        return '__call__', {**arrays, 'decoder_input_tokens': batch['decoder_target_tokens']}

    def _compute_hidden(self, params: Params, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
        inputs = select_batch_arrays(batch, 'encoder_input_tokens', 'encoder_segment_ids', 'encoder_positions')
        encoded = self._apply_module('encode', params, **inputs, rng=rng)
        names = ('encoder_input_tokens', 'decoder_input_tokens')
        packed = ('encoder_segment_ids', 'decoder_segment_ids', 'decoder_positions')
        return self._apply_module(
            'decode_hidden', params, encoded, **select_batch_arrays(batch, *names, *packed), rng=rng
        )

    def _encode_for_generation(
        self, params: Params, inputs: jax.Array, max_length: int, eos_id: int = 1
    ) -> decoding.GenerationInputs:
        encoded = self.encode(params, inputs)
        params = self._prepare_decoding_params(params)

        def decode(tokens: jax.Array, **cache) -> tuple[jax.Array, decoding.Cache]:
            hidden, variables = self.module.apply(
                {'params': params, **cache},
                encoded,
                inputs,
                tokens,
                enable_dropout=False,
                decode=True,
                max_decode_length=max_length,
                mutable=['cache'],
                method='decode_hidden',
            )
            return hidden, variables['cache']

        def allocate_cache(rows_per_sequence: int) -> decoding.Cache:
            return decode(jnp.zeros((inputs.shape[0] * rows_per_sequence, max_length), jnp.int32))[1]

        def decode_step(tokens: jax.Array, cache: decoding.Cache) -> tuple[jax.Array, decoding.Cache]:
            hidden, cache = decode(tokens[:, None], cache=cache)
            return self._compute_next_logits(params, hidden), cache

        # In the step input, the start token has id 0, for which the module uses the embedding of `begin_id`.
        prompt = jnp.full((inputs.shape[0], 1), self.module.begin_id, jnp.int32)
        return decoding.GenerationInputs(
            inputs.shape[0], allocate_cache, decode_step, max_length, eos_id, prompt=prompt
        )
