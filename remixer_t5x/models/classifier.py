"""Classifier: loss and predictions of an encoder with a head for whole texts: a label, or a number.

A batch has `encoder_input_tokens` [batch, length] int32, `labels` [batch] float32 (the index of the label, or the
number itself) and `label_weights` [batch] float32, 0 for a row that does not count.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.errors import UserError
from remixer_t5x.models import losses
from remixer_t5x.models.architecture.encoder_only import EncoderOnly

Params = Any
Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A module and its loss. It has no parameters, so that every method is a pure function of them.

    Attributes:
        module: the encoder, whose head gives a number for each label, or one number for a regression.
        labels: the texts of the labels, in the order of their indices; None is a regression.
        label_smoothing: probability spread over the labels that are not the target.
    """

    module: EncoderOnly
    labels: tuple[str, ...] | None = None
    label_smoothing: float = 0.0

    # Parameters at the top of the tree that a masked language model lacks.
    fresh_parameters = ('head',)

    def __post_init__(self) -> None:
        check_labels(self.labels)

    @property
    def frame(self) -> str:
        return 'classifier'

    @property
    def vocab_size(self) -> int:
        return self.module.vocab_size

    def init(self, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """Random parameters, float32, each boxed with its logical axes; `batch_shapes` has encoder_input_tokens."""
        tokens = jnp.ones(batch_shapes['encoder_input_tokens'], jnp.int32)
        return self.module.init(rng, tokens, enable_dropout=False, method='classify')['params']

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, losses.Sums]:
        """Loss summed over rows: cross-entropy, or the squared error of a regression. Divide by sums['weights'] once.

        Args:
            params: unboxed parameters.
            batch: see the module.
            dropout_rng: a key; None switches dropout off.
        """
        rngs = None if dropout_rng is None else {'dropout': dropout_rng}
        outputs = self._outputs(params, batch['encoder_input_tokens'], dropout_rng is not None, rngs)
        labels, weights = batch['labels'], batch['label_weights'].astype(jnp.float32)
        if self.labels is None:
            each, correct = jnp.square(outputs[:, 0] - labels), jnp.zeros_like(weights)
        else:
            log_probabilities = jax.nn.log_softmax(outputs)
            wanted = jax.nn.one_hot(labels.astype(jnp.int32), len(self.labels))
            correct = jnp.sum(wanted * log_probabilities, axis=-1) >= jnp.max(log_probabilities, axis=-1)
            wanted = wanted * (1.0 - self.label_smoothing) + self.label_smoothing / len(self.labels)
            each = -jnp.sum(wanted * log_probabilities, axis=-1)
        loss = jnp.sum(each * weights)
        zero = jnp.zeros((), jnp.float32)
        count = jnp.sum(weights)
        return loss, {
            'loss': loss,
            'z_loss': zero,
            'weights': count,
            'correct': jnp.sum(correct * weights),
            'sequences': count,
        }

    def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
        """The stack's output for `inputs` [batch, length], one example a row: [batch, length, embed]."""
        return self.module.apply({'params': params}, inputs, enable_dropout=False, method='encode')

    def classify(self, params: Params, inputs: jax.Array) -> jax.Array:
        """log p(label) of each label, [batch, labels] float32; for a regression the number, [batch, 1]."""
        outputs = self._outputs(params, inputs, False, None)
        return outputs if self.labels is None else jax.nn.log_softmax(outputs)

    def _outputs(self, params: Params, tokens: jax.Array, enable_dropout: bool, rngs: Any) -> jax.Array:
        return self.module.apply(
            {'params': params}, tokens, enable_dropout=enable_dropout, rngs=rngs, method='classify'
        )


def outputs(labels: tuple[str, ...] | None) -> int:
    """How many numbers a head gives for these labels; one for a regression."""
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
