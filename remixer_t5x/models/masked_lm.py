"""The masked language model: loss, features and predictions of an encoder (Devlin et al. 2019)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x import ranges
from remixer_t5x.models import losses
from remixer_t5x.models.architecture.encoder_only import EncoderOnly
from remixer_t5x.models.interface import Batch, Model, Params, Sums, count_sequences, present, targets_of

_INPUTS = ('encoder_input_tokens', 'encoder_segment_ids', 'encoder_positions', 'encoder_token_types')


@dataclasses.dataclass(frozen=True)
class MaskedLM(Model):
    """An encoder that predicts the tokens that were masked.

    A batch has [batch, length] int32 arrays: `encoder_input_tokens` (the damaged text), `encoder_target_tokens` (the
    original token where one is to be predicted, 0 elsewhere), `encoder_loss_weights`, and for packed rows
    `encoder_segment_ids` and `encoder_positions`.

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

    model_type = 'encoder_only'

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, Sums]:
        """See `Model.loss`; the sum is over the tokens to predict."""
        hidden, (targets, weights) = self._hidden(params, batch, dropout_rng), targets_of(batch, 'encoder')

        def loss_of(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, Sums]:
            return self.loss_function(*self._output(params, hidden), targets, weights)

        few = max(1, round(targets.shape[1] * self.predicted_share))
        if few >= targets.shape[1]:
            loss, sums = loss_of(hidden, targets, weights)
        else:
            # The tokens to predict come first in each row.
            order = jnp.argsort(weights <= 0, axis=1, stable=True)[:, :few]

            def of_few() -> tuple[jax.Array, Sums]:
                chosen = jnp.take_along_axis(hidden, order[..., None], axis=1)
                return loss_of(chosen, *(jnp.take_along_axis(array, order, 1) for array in (targets, weights)))

            fits = jnp.all(jnp.sum(weights > 0, axis=1) <= few)
            loss, sums = jax.lax.cond(fits, of_few, lambda: loss_of(hidden, targets, weights))
        return loss, {**sums, 'sequences': count_sequences(batch, 'encoder_input_tokens')}

    def encode(self, params: Params, inputs: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """The stack's output for `inputs` [batch, length], one example per row: [batch, length, embed]."""
        return self._apply('encode', params, inputs, encoder_token_types=token_types)

    def project_sentence(self, params: Params, mean: jax.Array) -> jax.Array:
        """The embeddings of texts, [texts, outputs], from the mean over their tokens, [texts, embed]."""
        return self._apply('project_sentence', params, mean)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Logits of the token at each place, [batch, length, vocab] in the module's dtype."""
        return self._apply('predict_tokens', params, **present(batch, *_INPUTS))

    def judge(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """log p(token) at one place of each row, [batch] float32, and whether no token is likelier, [batch] bool.

        The batch has encoder_input_tokens, `places` [batch] and `tokens` [batch]. With a mask at the place, the sum
        over all places of a text is its pseudo-log-likelihood (Salazar et al. 2020).
        """
        hidden = jnp.take_along_axis(self._hidden(params, batch), batch['places'][:, None, None], axis=1)
        targets = batch['tokens'][:, None]
        return losses.judge_rows(*self._output(params, hidden), targets, jnp.ones(targets.shape, jnp.float32))

    def _initialised(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        return 'predict_tokens', present(batch, 'encoder_input_tokens', 'encoder_segment_ids')

    def _hidden(self, params: Params, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
        return self._apply('encode', params, **present(batch, *_INPUTS), rng=rng)

    def _output(self, params: Params, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The input and the kernel of the output projection."""
        hidden = self.module.apply({'params': params}, hidden, method='output_hidden')
        kernel, bias = self.module.output_kernel(params), self.module.output_bias(params)
        if bias is not None:
            # One more feature, which is 1 everywhere, so that the loss needs to know nothing of biases.
            kernel = jnp.concatenate([kernel, bias[None]])
            hidden = jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)
        return hidden, kernel
