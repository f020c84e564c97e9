"""Seq2Seq: what a training loop, an evaluation or a user does with an encoder-decoder's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.model import decoding, losses

Params = Any
Batch = Mapping[str, jax.Array]

_PACKED = ('encoder_segment_ids', 'decoder_segment_ids', 'decoder_positions')


@dataclasses.dataclass(frozen=True)
class Seq2Seq:
    """A module and its loss; holds no parameters, so that every method is a pure function of them.

    A batch is a mapping of [batch, length] int32 arrays named as seqio's EncDecFeatureConverter names them:
    encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, decoder_loss_weights, and for packed rows
    encoder_segment_ids, encoder_positions, decoder_segment_ids, decoder_positions.
    """

    module: EncoderDecoder
    loss_function: losses.CrossEntropy = losses.CrossEntropy()

    @property
    def vocab_size(self) -> int:
        return self.module.vocab_size

    def init(self, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, int]]) -> Params:
        """Random parameters, float32, each boxed with its logical axes (`nn.LogicallyPartitioned`).

        Args:
          rng: a key.
          batch_shapes: shapes of at least encoder_input_tokens and decoder_target_tokens; their values do not
            matter to the parameters, and of their shapes only what a sublayer refuses.
        """
        inputs = jnp.ones(batch_shapes['encoder_input_tokens'], jnp.int32)
        targets = jnp.ones(batch_shapes['decoder_target_tokens'], jnp.int32)
        return self.module.init(rng, inputs, targets, targets, enable_dropout=False)['params']

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, losses.Sums]:
        """Loss summed over the batch's target tokens, and the sums to report; divide by sums['weights'] once.

        Args:
          params: unboxed parameters.
          batch: see the class.
          dropout_rng: a key; None switches dropout off.
        """
        hidden = self._decoder_hidden(params, batch, dropout_rng)
        targets = batch['decoder_target_tokens']
        weights = batch.get('decoder_loss_weights')
        weights = (targets > 0 if weights is None else weights).astype(jnp.float32)
        loss, sums = self.loss_function(hidden, params['logits']['kernel'], targets, weights)
        return loss, {**sums, 'sequences': _count_sequences(batch)}

    def score(self, params: Params, batch: Batch) -> jax.Array:
        """log p(targets | inputs) of each row, [batch] float32; z-loss and label smoothing take no part."""
        hidden = self._decoder_hidden(params, batch, None)
        targets = batch['decoder_target_tokens']
        scores = losses.token_log_likelihood(
            hidden, params['logits']['kernel'], targets, self.loss_function.chunk_length
        )
        weights = batch.get('decoder_loss_weights')
        return jnp.sum(scores * (targets > 0 if weights is None else weights), axis=-1)

    def predict(self, params: Params, batch: Batch, max_decode_length: int, eos_id: int = 1) -> jax.Array:
        """Greedy predictions for encoder_input_tokens, [batch, max_decode_length] int32, 0 after `eos_id`."""
        inputs = batch['encoder_input_tokens']
        encoded = self.module.apply({'params': params}, inputs, enable_dropout=False, method='encode')
        slots = jnp.zeros((inputs.shape[0], max_decode_length), jnp.int32)

        def decode(variables, tokens):
            return self.module.apply(
                variables,
                encoded,
                inputs,
                tokens,
                tokens,
                enable_dropout=False,
                decode=True,
                max_decode_length=max_decode_length,
                mutable=['cache'],
                method='decode',
            )

        def step(tokens, cache):
            logits, variables = decode({'params': params, 'cache': cache}, tokens)
            return logits[:, 0], variables['cache']

        _, allocated = decode({'params': params}, slots)
        return decoding.greedy(step, allocated['cache'], inputs.shape[0], max_decode_length, eos_id)

    def _decoder_hidden(self, params: Params, batch: Batch, dropout_rng: jax.Array | None) -> jax.Array:
        variables = {'params': params}
        rngs = None if dropout_rng is None else {'dropout': dropout_rng}
        enable_dropout = dropout_rng is not None
        encoded = self.module.apply(
            variables,
            batch['encoder_input_tokens'],
            batch.get('encoder_segment_ids'),
            batch.get('encoder_positions'),
            enable_dropout,
            rngs=rngs,
            method='encode',
        )
        return self.module.apply(
            variables,
            encoded,
            batch['encoder_input_tokens'],
            batch['decoder_input_tokens'],
            batch['decoder_target_tokens'],
            *(batch.get(name) for name in _PACKED),
            enable_dropout=enable_dropout,
            rngs=rngs,
            method='decode_hidden',
        )


def _count_sequences(batch: Batch) -> jax.Array:
    """Number of examples, packed or not, that have a target."""
    segments = batch.get('decoder_segment_ids')
    if segments is None:
        return jnp.sum(jnp.any(batch['decoder_target_tokens'] > 0, axis=-1).astype(jnp.float32))
    return jnp.sum(jnp.max(segments, axis=-1).astype(jnp.float32))
