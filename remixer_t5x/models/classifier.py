"""Text classification and regression models: encoders with a head that predicts a label or a number for each text."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture.encoder_only import EncoderOnly
from remixer_t5x.models.interface import Batch, MetricSums, Model, Params, select_batch_arrays


@dataclasses.dataclass(frozen=True)
class EncoderWithHead(Model):
    """Base class of encoder models for tasks other than masked language modelling."""

    module: EncoderOnly

    # The head of a pretrained masked language model has different parameters.
    fresh_parameters = ('head',)

    def without_label_smoothing(self) -> Self:
        smoothing: dict[str, Any] = {'label_smoothing': 0.0} if hasattr(self, 'label_smoothing') else {}
        return dataclasses.replace(self, **smoothing)

    def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
        """Returns the encoder output [batch, length, embed] for `inputs` [batch, length], one example per row."""
        return self._apply_module('encode', params, inputs)

    def compute_head_outputs(self, params: Params, inputs: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """Returns the head's outputs, [batch, outputs] or [batch, length, outputs] float32."""
        return self._apply_module('classify', params, inputs, rng=rng)

    def _init_method_and_inputs(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        return 'classify', select_batch_arrays(batch, 'encoder_input_tokens')


@dataclasses.dataclass(frozen=True)
class Classifier(EncoderWithHead):
    """Model that predicts a label or a number for each row.

    A batch contains `encoder_input_tokens` [batch, length] int32, `labels` [batch] float32 (label indices or regression
    targets) and `label_weights` [batch] float32.

    Attributes:
        module: the encoder, with a head that returns a logit for each label, or a single number for regression.
        labels: names of the labels, in the order of their indices; None for regression.
        label_smoothing: probability mass distributed evenly over all labels.
    """

    labels: tuple[str, ...] | None = None
    label_smoothing: ranges.Rate = 0.0

    model_type = 'classifier'

    def __post_init__(self) -> None:
        check_label_names(self.labels)

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, MetricSums]:
        """Returns the summed cross-entropy, or the summed squared error for regression, and sums of metrics."""
        outputs = self.compute_head_outputs(params, batch['encoder_input_tokens'], dropout_rng)
        if outputs.ndim != 2:
            raise UserError(
                'POOLING must be a function in a classifier, got None; set POOLING = @encoder_only.first_token'
            )
        labels, weights = batch['labels'], batch['label_weights'].astype(jnp.float32)
        if self.labels is None:
            loss, sums = _sum_weighted_losses(jnp.square(outputs[:, 0] - labels), weights)
            return loss, {**sums, 'squared_error': loss}
        return compute_label_loss(outputs, labels, weights, self.label_smoothing)

    def classify(self, params: Params, inputs: jax.Array) -> jax.Array:
        """Returns the log-probability of each label, [batch, labels] float32, or the predicted numbers, [batch, 1]."""
        outputs = self.compute_head_outputs(params, inputs)
        return outputs if self.labels is None else jax.nn.log_softmax(outputs)


def compute_label_loss(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, label_smoothing: float = 0.0
) -> tuple[jax.Array, MetricSums]:
    """Returns the weighted sum of the cross-entropies, and the same metric sums as `Classifier.loss`.

    Args:
        labels: class indices, [batch, ...].
        weights: loss weights, [batch, ...] float32.
    """
    classes, log_probabilities = logits.shape[-1], jax.nn.log_softmax(logits)
    target = jax.nn.one_hot(labels.astype(jnp.int32), classes)
    correct = jnp.argmax(logits, axis=-1) == labels.astype(jnp.int32)
    target = target * (1.0 - label_smoothing) + label_smoothing / classes
    loss, sums = _sum_weighted_losses(-jnp.sum(target * log_probabilities, axis=-1), weights)
    return loss, {**sums, 'z_loss': jnp.zeros((), jnp.float32), 'correct': jnp.sum(correct * weights)}


def _sum_weighted_losses(losses: jax.Array, weights: jax.Array) -> tuple[jax.Array, MetricSums]:
    """Returns the weighted sum of `losses` [batch, ...], and the metric sums that all heads share."""
    loss = jnp.sum(losses * weights)
    has_weight = jnp.any(weights.reshape(weights.shape[0], -1) > 0, axis=1)
    return loss, {
        'loss': loss,
        'weights': jnp.sum(weights),
        'sequences': jnp.sum(has_weight.astype(jnp.float32)),
    }


def num_outputs(labels: tuple[str, ...] | None) -> int:
    """Returns the number of outputs of a classification head: the number of labels, or 1 for regression."""
    return 1 if labels is None else len(labels)


def check_label_names(labels: Any) -> None:
    """Raises UserError unless `labels` is None or a sequence of two or more distinct strings."""
    if labels is None:
        return
    is_valid = isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels)
    if not is_valid or len(set(labels)) != len(labels) or len(labels) < 2:
        raise UserError(
            f'LABELS must be at least two distinct strings, or None for regression, got {labels!r:.80}; for '
            "example, set LABELS = ('negative', 'positive')"
        )
