"""Seq2Seq: the loss, scores and predictions of an encoder-decoder as functions of its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.models import decoding, losses
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.stack import layers_apart
from remixer_t5x.models.generating import Generating

Params = Any
Batch = Mapping[str, jax.Array]

_PACKED = ('encoder_segment_ids', 'decoder_segment_ids', 'decoder_positions')


@dataclasses.dataclass(frozen=True)
class Seq2Seq(Generating):
    """A module and its loss. It has no parameters, so that every method is a pure function of them.

    A batch is a mapping of [batch, length] int32 arrays with the names of seqio's EncDecFeatureConverter:
    encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, decoder_loss_weights, and for packed rows
    encoder_segment_ids, encoder_positions, decoder_segment_ids, decoder_positions.
    """

    module: EncoderDecoder
    loss_function: losses.CrossEntropy = losses.CrossEntropy()

    given = 'encoder_input_tokens'

    @property
    def frame(self) -> str:
        return 'encoder_decoder'

    @property
    def vocab_size(self) -> int:
        return self.module.vocab_size

    def init(self, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """Random parameters, float32, each boxed with its logical axes (`nn.LogicallyPartitioned`).

        Args:
            rng: a key.
            batch_shapes: shapes of at least encoder_input_tokens and decoder_target_tokens, and of the segment ids if
                rows are packed. The parameters do not depend on them, but a sublayer may refuse a length, or packing.
        """
        inputs, targets = (
            jnp.ones(batch_shapes[name], jnp.int32) for name in ('encoder_input_tokens', 'decoder_target_tokens')
        )
        names = [name for name in ('encoder_segment_ids', 'decoder_segment_ids') if name in batch_shapes]
        segments = {name: jnp.ones(batch_shapes[name], jnp.int32) for name in names}
        return self.module.init(rng, inputs, targets, **segments, enable_dropout=False)['params']

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
        loss, sums = self.loss_function(hidden, self.module.output_kernel(params), targets, weights)
        return loss, {**sums, 'sequences': losses.count_sequences(batch)}

    def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
        """The encoder's output for `inputs` [batch, length], one example a row: [batch, length, embed]."""
        return self.module.apply({'params': params}, inputs, enable_dropout=False, method='encode')

    def score(self, params: Params, batch: Batch) -> jax.Array:
        """log p(targets | inputs) of each row, [batch] float32, without z-loss and label smoothing."""
        return self.judge(params, batch)[0]

    def judge(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """`score`, and whether greedy decoding gives the targets of each row, [batch] bool."""
        hidden = self._decoder_hidden(params, batch, None)
        targets = batch['decoder_target_tokens']
        weights = batch.get('decoder_loss_weights')
        weights = targets > 0 if weights is None else weights
        kernel = self.module.output_kernel(params)
        return losses.judge_rows(hidden, kernel, targets, weights, self.loss_function.chunk_length)

    def _generation(self, params: Params, inputs: jax.Array, max_length: int, eos_id: int = 1) -> decoding.Generation:
        """Encodes `inputs` and prepares the steps of a decoder."""
        encoded = self.encode(params, inputs)
        params = {**params, 'decoder': layers_apart(params['decoder'])}
        # A GPU would otherwise read float32 kernels and cast them at every step.
        params = jax.lax.optimization_barrier(decoding.kernels_in(jnp.dtype(self.module.dtype), params))

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

        def allocate(rows_per_sequence: int) -> decoding.Cache:
            return decode(jnp.zeros((inputs.shape[0] * rows_per_sequence, max_length), jnp.int32))[1]

        def step(tokens: jax.Array, cache: decoding.Cache) -> tuple[jax.Array, decoding.Cache]:
            hidden, cache = decode(tokens[:, None], cache=cache)
            return losses.token_logits(hidden[:, 0], self.module.output_kernel(params)), cache

        return decoding.Generation(allocate, step, jnp.any(inputs > 0, axis=1), max_length, eos_id)

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
            **{name: batch.get(name) for name in _PACKED},
            enable_dropout=enable_dropout,
            rngs=rngs,
            method='decode_hidden',
        )
