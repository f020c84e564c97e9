"""Encoder models for token classification, extractive question answering and text embedding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x import ranges
from remixer_t5x.context import make_sequence_context
from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture.encoder_only import Pooling, mean_of_tokens
from remixer_t5x.models.classifier import EncoderWithHead, check_label_names, compute_label_loss
from remixer_t5x.models.interface import Batch, MetricSums, Params, select_batch_arrays


@dataclasses.dataclass(frozen=True)
class TokenClassifier(EncoderWithHead):
    """Model that predicts a label for each token, for example for named entity recognition.

    A batch contains three [batch, length] arrays: `encoder_input_tokens` int32, `labels` float32 (label indices) and
    `label_weights` float32, which are nonzero at the first token of each word.

    Attributes:
        module: the encoder, with a head that returns a logit for each label.
        label_smoothing: probability mass distributed evenly over all labels.
    """

    labels: tuple[str, ...] | None = None
    label_smoothing: ranges.Rate = 0.0

    model_type = 'token_labels'

    def __post_init__(self) -> None:
        if self.labels is None:
            raise UserError("LABELS must be at least two strings, got None; set LABELS = ('O', 'B-PER', 'I-PER')")
        check_label_names(self.labels)

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, MetricSums]:
        """Returns the cross-entropy summed over tokens with nonzero weights, and sums of metrics."""
        logits = self.compute_head_outputs(params, batch['encoder_input_tokens'], dropout_rng)
        return compute_label_loss(logits, batch['labels'], batch['label_weights'], self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class SpanExtractor(EncoderWithHead):
    """Question answering model that predicts the first and the last token of an answer (Devlin et al. 2019, 4.2, 4.3).

    A batch contains the int32 arrays `encoder_input_tokens` [batch, length], `start_positions` [batch] and
    `end_positions` [batch], and `label_weights` [batch] float32. Both positions are 0 for questions without an answer.

    Attributes:
        module: the encoder, with a head that returns two logits for each token.
        null_threshold: the empty answer is predicted if its score exceeds the score of the best span by more than this
            value; None disables empty answers.
        doc_stride: number of tokens between the starts of consecutive windows, into which a long context is split; None
            for windows without overlap.
    """

    max_answer_length: ranges.Count = 30
    null_threshold: float | None = 0.0
    doc_stride: ranges.Count | None = None

    model_type = 'span'

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, MetricSums]:
        """Returns the summed cross-entropies of the start and end positions, and sums of metrics."""
        inputs = batch['encoder_input_tokens']
        logits = jnp.swapaxes(self.compute_head_outputs(params, inputs, dropout_rng), 1, 2)
        logits = jnp.where(make_sequence_context(inputs).is_token[:, None], logits, jnp.finfo(logits.dtype).min)
        labels = jnp.stack([batch['start_positions'], batch['end_positions']], axis=1)
        return compute_label_loss(logits, labels, jnp.repeat(batch['label_weights'][:, None], 2, axis=1))


@dataclasses.dataclass(frozen=True)
class TextEmbedder(EncoderWithHead):
    """Text embedding model, trained with in-batch negatives (van den Oord et al. 2018; Gao et al. 2021).

    loss_i = -log(exp(cos(a_i, b_i) / T) / sum_j exp(cos(a_i, b_j) / T))

    A batch contains the int32 arrays `encoder_input_tokens` [batch, length] (texts a) and `positive_input_tokens`
    [batch, length] (texts b), and `label_weights` [batch] float32, the weight of each pair in the loss. The negatives
    of a text a are the nonempty texts b of all other rows.

    Attributes:
        pooling: function (encoder output [batch, length, embed], ctx) -> one vector per row, [batch, embed].
    """

    temperature: ranges.Positive = 0.05
    pooling: Pooling = mean_of_tokens

    model_type = 'embedding'

    def embed(self, params: Params, inputs: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """Embeds tokenized texts [batch, length] as unit vectors, [batch, embed] float32."""
        return self.pool(self._apply_module('encode', params, inputs, rng=rng), inputs)

    def pool(self, hidden: jax.Array, inputs: jax.Array) -> jax.Array:
        """Pools the encoder output [batch, length, embed] of `inputs` to unit vectors, [batch, embed] float32."""
        pooled = self.pooling(hidden, make_sequence_context(inputs)).astype(jnp.float32)
        return pooled * jax.lax.rsqrt(jnp.sum(jnp.square(pooled), axis=-1, keepdims=True) + 1e-12)

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, MetricSums]:
        """Returns the contrastive loss and sums of metrics; row i is correct if b_i is the text most similar to a_i."""
        keys = (None, None) if dropout_rng is None else jax.random.split(dropout_rng)
        names = ('encoder_input_tokens', 'positive_input_tokens')
        first, second = (self.embed(params, batch[name], key) for name, key in zip(names, keys, strict=True))
        is_text = jnp.any(batch['positive_input_tokens'] > 0, axis=1)
        logits = jnp.where(is_text, first @ second.T / self.temperature, jnp.finfo(jnp.float32).min)
        return compute_label_loss(logits, jnp.arange(first.shape[0]), batch['label_weights'] * is_text)

    def _init_method_and_inputs(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        return 'encode', select_batch_arrays(batch, 'encoder_input_tokens')
