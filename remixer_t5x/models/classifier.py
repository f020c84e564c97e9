"""The classifier: loss and predictions of an encoder with a head that returns a label or a number for each text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture.encoder_only import EncoderOnly
from remixer_t5x.models.interface import Batch, Model, Params, Sums, select_arrays


@dataclasses.dataclass(frozen=True)
class Classifier(Model):
    """An encoder with a head for whole rows.

    A batch has `encoder_input_tokens` [batch, length] int32, `labels` [batch] float32 (the index of the label, or the
    number itself) and `label_weights` [batch] float32, 0 for a row that does not count.

    Attributes:
        module: the encoder, whose head returns a number for each label, or one number for a regression.
        labels: the texts of the labels, in the order of their indices; None for a regression.
        label_smoothing: probability spread over the labels that are not the target.
    """

    module: EncoderOnly
    labels: tuple[str, ...] | None = None
    label_smoothing: float = 0.0

    model_type = 'classifier'
    # A masked language model has no such head.
    fresh_parameters = ('head',)

    def __post_init__(self) -> None:
        check_labels(self.labels)

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, Sums]:
        """See `Model.loss`; the sum is over rows, of the cross-entropy, or of the squared error of a regression."""
        outputs = self._apply('classify', params, batch['encoder_input_tokens'], rng=dropout_rng)
        labels, weights = batch['labels'], batch['label_weights'].astype(jnp.float32)
        if self.labels is None:
            each, correct = jnp.square(outputs[:, 0] - labels), jnp.zeros_like(weights)
        else:
            log_probabilities = jax.nn.log_softmax(outputs)
            target = jax.nn.one_hot(labels.astype(jnp.int32), len(self.labels))
            correct = jnp.sum(target * log_probabilities, axis=-1) >= jnp.max(log_probabilities, axis=-1)
            target = target * (1.0 - self.label_smoothing) + self.label_smoothing / len(self.labels)
            each = -jnp.sum(target * log_probabilities, axis=-1)
        loss, count = jnp.sum(each * weights), jnp.sum(weights)
        sums = {'loss': loss, 'z_loss': jnp.zeros((), jnp.float32), 'correct': jnp.sum(correct * weights)}
        return loss, {**sums, 'weights': count, 'sequences': count}

    def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
        """The stack's output for `inputs` [batch, length], one example per row: [batch, length, embed]."""
        return self._apply('encode', params, inputs)

    def classify(self, params: Params, inputs: jax.Array) -> jax.Array:
        """log p(label) of each label, [batch, labels] float32; for a regression the number, [batch, 1]."""
        outputs = self._apply('classify', params, inputs)
        return outputs if self.labels is None else jax.nn.log_softmax(outputs)

    def _init_call(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        return 'classify', select_arrays(batch, 'encoder_input_tokens')


def outputs(labels: tuple[str, ...] | None) -> int:
    """The number of outputs of a head for these labels; 1 for a regression."""
    check_labels(labels)
    return 1 if labels is None else len(labels)


def check_labels(labels: Any) -> None:
    """Raises UserError unless `labels` is None or a sequence of two or more different texts."""
    if labels is None:
        return
    fits = isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels)
    if not fits or len(set(labels)) != len(labels) or len(labels) < 2:
        raise UserError(
            f'LABELS is {labels!r:.80}; it takes two or more different texts, as in '
            "--gin.LABELS=\"('negative', 'positive')\", or None for a regression"
        )
