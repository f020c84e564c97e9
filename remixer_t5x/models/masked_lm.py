"""MaskedLM: loss, features and predictions of an encoder that restores masked tokens (Devlin et al. 2019).

A batch has seqio's names with [batch, length] int32 arrays: `encoder_input_tokens` (the damaged text),
`encoder_target_tokens` (the original token where one is to be predicted, 0 elsewhere), `encoder_loss_weights`, and for
packed rows `encoder_segment_ids` and `encoder_positions`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x import ranges
from remixer_t5x.models import losses
from remixer_t5x.models.architecture.encoder_only import EncoderOnly

Params = Any
Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class MaskedLM:
    """A module and its loss. It has no parameters, so that every method is a pure function of them.

    Attributes:
        module: the encoder with its head.
        loss_function: of the tokens to predict.
        predicted_share: share of a row's tokens for which logits are computed. BERT predicts 15%, and the logits of the
            others, three quarters of a small model's work, would be thrown away. A batch in which a row has more
            targets than that computes all logits, so the loss never depends on it. 1.0 always computes all.
    """

    module: EncoderOnly
    loss_function: losses.CrossEntropy = losses.CrossEntropy()
    predicted_share: ranges.PositiveShare = 0.25

    @property
    def frame(self) -> str:
        return 'encoder_only'

    @property
    def vocab_size(self) -> int:
        return self.module.vocab_size

    def init(self, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """Random parameters, float32, each boxed with its logical axes.

        Args:
            rng: a key.
            batch_shapes: shapes of at least encoder_input_tokens, and of encoder_segment_ids if rows are packed. The
                parameters do not depend on them, but a sublayer may refuse a length, or packing.
        """
        tokens, segments = (
            jnp.ones(batch_shapes[name], jnp.int32) if name in batch_shapes else None
            for name in ('encoder_input_tokens', 'encoder_segment_ids')
        )
        return self.module.init(rng, tokens, segments, enable_dropout=False, method='predict_tokens')['params']

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, losses.Sums]:
        """Loss summed over the tokens to predict, and the sums to report; divide by sums['weights'] once.

        Args:
            params: unboxed parameters.
            batch: see the module.
            dropout_rng: a key; None switches dropout off.
        """
        hidden = self._hidden(params, batch, dropout_rng)
        targets = batch['encoder_target_tokens']
        weights = batch.get('encoder_loss_weights')
        weights = (targets > 0 if weights is None else weights).astype(jnp.float32)
        few = max(1, round(targets.shape[1] * self.predicted_share))
        if few >= targets.shape[1]:
            loss, sums = self._token_loss(params, hidden, targets, weights)
        else:
            # Of each row, the tokens to predict come first.
            order = jnp.argsort(weights <= 0, axis=1, stable=True)[:, :few]

            def of_few() -> tuple[jax.Array, losses.Sums]:
                chosen = jnp.take_along_axis(hidden, order[..., None], axis=1)
                return self._token_loss(params, chosen, *(jnp.take_along_axis(a, order, 1) for a in (targets, weights)))

            fits = jnp.all(jnp.sum(weights > 0, axis=1) <= few)
            loss, sums = jax.lax.cond(fits, of_few, lambda: self._token_loss(params, hidden, targets, weights))
        return loss, {**sums, 'sequences': _count_sequences(batch)}

    def encode(self, params: Params, inputs: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """The stack's output for `inputs` [batch, length], one example a row: [batch, length, embed]."""
        return self.module.apply(
            {'params': params}, inputs, encoder_token_types=token_types, enable_dropout=False, method='encode'
        )

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Logits of the token at each place, [batch, length, vocab] in the module's dtype."""
        return self.module.apply({'params': params}, **_inputs(batch), enable_dropout=False, method='predict_tokens')

    def judge(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """log p(token) at one place of each row, [batch] float32, and whether no token is likelier, [batch] bool.

        The batch has encoder_input_tokens, `places` [batch] and `tokens` [batch]. With a mask at the place, the sum
        over all places of a text is its pseudo-log-likelihood (Salazar et al. 2020).
        """
        hidden = jnp.take_along_axis(self._hidden(params, batch, None), batch['places'][:, None, None], axis=1)
        hidden, kernel = self._output(params, hidden)
        targets = batch['tokens'][:, None]
        return losses.judge_rows(hidden, kernel, targets, jnp.ones(targets.shape, jnp.float32))

    def _hidden(self, params: Params, batch: Batch, dropout_rng: jax.Array | None) -> jax.Array:
        rngs = None if dropout_rng is None else {'dropout': dropout_rng}
        return self.module.apply(
            {'params': params}, **_inputs(batch), enable_dropout=dropout_rng is not None, rngs=rngs, method='encode'
        )

    def _token_loss(
        self, params: Params, hidden: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, losses.Sums]:
        return self.loss_function(*self._output(params, hidden), targets, weights)

    def _output(self, params: Params, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The input and the kernel of the output projection."""
        hidden = self.module.apply({'params': params}, hidden, method='output_hidden')
        kernel, bias = self.module.output_kernel(params), self.module.output_bias(params)
        if bias is not None:
            # One more feature, which is 1 everywhere, so that the loss needs to know nothing of biases.
            kernel = jnp.concatenate([kernel, bias[None]])
            hidden = jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)
        return hidden, kernel


def _inputs(batch: Batch) -> dict[str, jax.Array]:
    names = ('encoder_input_tokens', 'encoder_segment_ids', 'encoder_positions', 'encoder_token_types')
    return {name: batch[name] for name in names if name in batch}


def _count_sequences(batch: Batch) -> jax.Array:
    """Number of examples, packed or not."""
    segments = batch.get('encoder_segment_ids')
    if segments is None:
        return jnp.sum(jnp.any(batch['encoder_input_tokens'] > 0, axis=-1).astype(jnp.float32))
    return jnp.sum(jnp.max(segments, axis=-1).astype(jnp.float32))
