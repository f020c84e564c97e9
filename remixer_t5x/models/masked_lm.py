"""Masked language models (Devlin et al. 2019)."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from remixer_t5x import ranges
from remixer_t5x.models import losses
from remixer_t5x.models.architecture.encoder_only import EncoderOnly
from remixer_t5x.models.interface import (
    Batch,
    MetricSums,
    Model,
    Params,
    count_sequences,
    get_targets_and_weights,
    select_batch_arrays,
)

_INPUT_ARRAYS = ('encoder_input_tokens', 'encoder_segment_ids', 'encoder_positions', 'encoder_token_types')


@dataclasses.dataclass(frozen=True)
class MaskedLM(Model):
    """Masked language model: an encoder that predicts masked tokens.

    A batch contains [batch, length] int32 arrays: `encoder_input_tokens` (the masked text), `encoder_target_tokens`
    (the original tokens at the positions to predict, 0 elsewhere), `encoder_loss_weights`, and for packed rows
    `encoder_segment_ids` and `encoder_positions`.

    Attributes:
        predicted_share: fraction of each row's tokens for which logits are computed, at least the fraction of tokens to
            predict (15% in BERT). Computing the logits of all tokens takes three quarters of a small model's FLOPs, and
            is done only if a row has more tokens to predict, so this setting does not change the loss.
    """

    module: EncoderOnly
    loss_function: losses.CrossEntropy = losses.CrossEntropy()
    predicted_share: ranges.PositiveFraction = 0.25

    model_type = 'encoder_only'

    def without_label_smoothing(self) -> Self:
        return dataclasses.replace(self, loss_function=dataclasses.replace(self.loss_function, label_smoothing=0.0))

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, MetricSums]:
        """Returns the loss summed over the tokens to predict, and sums of metrics."""
        hidden = self._compute_hidden(params, batch, dropout_rng)
        targets, weights = get_targets_and_weights(batch, 'encoder')

        def compute_loss(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, MetricSums]:
            return self.loss_function(*self._prepare_output_projection(params, hidden), targets, weights)

        count = max(1, round(targets.shape[1] * self.predicted_share))
        if count >= targets.shape[1]:
            loss, sums = compute_loss(hidden, targets, weights)
        else:
            # Sort the positions of each row so that the tokens to predict come first.
            order = jnp.argsort(weights <= 0, axis=1, stable=True)[:, :count]

            def compute_loss_of_targets() -> tuple[jax.Array, MetricSums]:
                target_hidden = jnp.take_along_axis(hidden, order[..., None], axis=1)
                return compute_loss(
                    target_hidden, *(jnp.take_along_axis(array, order, 1) for array in (targets, weights))
                )

            fits = jnp.all(jnp.sum(weights > 0, axis=1) <= count)
            loss, sums = jax.lax.cond(fits, compute_loss_of_targets, lambda: compute_loss(hidden, targets, weights))
        return loss, {**sums, 'sequences': count_sequences(batch, 'encoder_input_tokens')}

    def encode(self, params: Params, inputs: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """Returns the encoder output [batch, length, embed] for `inputs` [batch, length], one example per row."""
        return self._apply_module('encode', params, inputs, encoder_token_types=token_types)

    def project_sentence(self, params: Params, mean: jax.Array) -> jax.Array:
        """Computes text embeddings, [texts, outputs], from mean-pooled encoder outputs, [texts, embed]."""
        return self._apply_module('project_sentence', params, mean)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the logits at each position, [batch, length, vocab], in the module's dtype."""
        return self._apply_module('predict_tokens', params, **select_batch_arrays(batch, *_INPUT_ARRAYS))

    def score_and_match_targets(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the log-probability of one token per row, [batch] float32, and whether the token is the argmax.

        The batch contains `encoder_input_tokens`, the position to score in each row (`positions` [batch]) and its token
        id (`tokens` [batch]). If the scored positions are masked, the sum of the scores over all positions of a text is
        its pseudo-log-likelihood (Salazar et al. 2020).
        """
        hidden = jnp.take_along_axis(self._compute_hidden(params, batch), batch['positions'][:, None, None], axis=1)
        targets = batch['tokens'][:, None]
        return losses.score_and_match_targets(
            *self._prepare_output_projection(params, hidden), targets, jnp.ones(targets.shape, jnp.float32)
        )

    def _init_method_and_inputs(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        return 'predict_tokens', select_batch_arrays(batch, 'encoder_input_tokens', 'encoder_segment_ids')

    def _compute_hidden(self, params: Params, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
        return self._apply_module('encode', params, **select_batch_arrays(batch, *_INPUT_ARRAYS), rng=rng)

    def _prepare_output_projection(self, params: Params, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the input and the kernel of the output projection."""
        hidden = self.module.apply({'params': params}, hidden, method='apply_output_head')
        kernel, bias = self.module.get_output_kernel(params), self.module.get_output_bias(params)
        if bias is not None:
            # The loss has no bias argument, so append the bias to the kernel and a constant feature of 1 to the input.
            kernel = jnp.concatenate([kernel, bias[None]])
            hidden = jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)
        return hidden, kernel
