"""Chunked cross-entropy loss with z-loss and label smoothing.

The logits are often the largest array of a training step: for 128 sequences of 114 targets and a vocabulary of 32,128
tokens, they take 1.9 GB in float32. This module computes the logits of one chunk of targets at a time. The forward pass
also computes the gradients, so that the backward pass need not recompute the logits.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from remixer_t5x import axes, ranges
from remixer_t5x.kernels.attention_formula import cap_logits
from remixer_t5x.kernels.reshaping import join_blocks, split_blocks
from remixer_t5x.models.layers.dense import cast_and_gather

MetricSums = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy loss, with hashable settings.

    Attributes:
        z_loss: coefficient of the term log(Z)^2, which prevents the logits from drifting (1e-4 in T5.1.1).
        label_smoothing: total probability assigned to all tokens other than the target. The entropy of the smoothed
            distribution is subtracted, so the loss of a perfect prediction is 0.
        chunk_length: maximum number of targets per row in a chunk.
    """

    z_loss: ranges.NonNegative = 1e-4
    label_smoothing: ranges.Rate = 0.0
    chunk_length: ranges.Count = 64

    def __call__(
        self,
        hidden: jax.Array,
        kernel: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        softcap: float | None = None,
    ) -> tuple[jax.Array, MetricSums]:
        """Returns the loss summed over the targets; see `cross_entropy`."""
        return cross_entropy(self, hidden, kernel, targets, weights, softcap)


def compute_token_logits(hidden: jax.Array, kernel: jax.Array, softcap: float | None = None) -> jax.Array:
    """Computes the logits `hidden @ kernel`, [..., vocab] float32, bounded by `c tanh(logits / c)` for a softcap c."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    logits = jnp.dot(tokens, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return cap_logits(logits.reshape(*hidden.shape[:-1], kernel.shape[-1]), softcap)


def _build_one_hot_mask(targets: jax.Array, vocab_size: int) -> jax.Array:
    """Returns a one-hot mask of the targets, which XLA partitions better than a gather if the vocabulary is sharded."""
    return targets[..., None] == jnp.arange(vocab_size, dtype=targets.dtype)


def _sum_chunk_losses(
    config: CrossEntropy, logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[MetricSums, jax.Array]:
    """Returns the loss and metrics summed over one chunk, and the log-partition function log Z, [batch, length]."""
    vocab_size = logits.shape[-1]
    largest = jnp.max(logits, axis=-1)
    log_z = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    target_logit = jnp.sum(jnp.where(_build_one_hot_mask(targets, vocab_size), logits, 0.0), axis=-1)
    loss = log_z - target_logit
    if config.label_smoothing:
        confidence, rest = _compute_smoothed_probabilities(config.label_smoothing, vocab_size)
        mean_loss = vocab_size * log_z - jnp.sum(logits, axis=-1)
        entropy = -(confidence * math.log(confidence) + (vocab_size - 1) * rest * math.log(rest))
        loss = (confidence - rest) * loss + rest * mean_loss - entropy
    z_loss = config.z_loss * jnp.square(log_z)
    sums = {
        'loss': jnp.sum((loss + z_loss) * weights),
        'z_loss': jnp.sum(z_loss * weights),
        'weights': jnp.sum(weights),
        'correct': jnp.sum((target_logit >= largest) * weights),
    }
    return sums, log_z


def _compute_smoothed_probabilities(label_smoothing: float, vocab_size: int) -> tuple[float, float]:
    """Returns the smoothed probabilities of the target and of each other token."""
    return 1.0 - label_smoothing, label_smoothing / (vocab_size - 1)


def _compute_logits_gradient(
    config: CrossEntropy, logits: jax.Array, targets: jax.Array, weights: jax.Array, log_z: jax.Array
) -> jax.Array:
    """Returns the gradient of the chunk's loss sum with respect to its logits."""
    probabilities = jnp.exp(logits - log_z[..., None])
    scale = 1.0 + 2.0 * config.z_loss * log_z
    confidence, rest = _compute_smoothed_probabilities(config.label_smoothing, logits.shape[-1])
    target = jnp.where(_build_one_hot_mask(targets, logits.shape[-1]), confidence, rest)
    return (probabilities * scale[..., None] - target) * weights[..., None]


def _split_into_chunks(max_length: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Splits arrays [batch, length, ...] into equal chunks, [chunks, batch, chunk_length, ...], padded with zeros."""
    length = arrays[0].shape[1]
    return split_blocks(arrays, math.ceil(length / math.ceil(length / max_length)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def cross_entropy(
    config: CrossEntropy,
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    softcap: float | None = None,
) -> tuple[jax.Array, MetricSums]:
    """Computes the cross-entropy and z-loss of the logits `hidden @ kernel`, summed over all targets.

    Args:
        hidden: input of the output projection, [batch, length, embed], float32 or bfloat16.
        kernel: kernel of the output projection, [embed, vocab] float32.
        targets: token ids [batch, length] int32.
        weights: loss weights, [batch, length] float32; 0 for targets to ignore.
        softcap: bound c in `c tanh(logits / c)`, or None.

    Returns:
        The summed loss and the sums 'loss', 'z_loss', 'weights' and 'correct'. The summed loss and 'loss' are equal,
        and differentiable with respect to hidden and kernel; the gradients of the other sums are zero. 'loss' includes
        the z-loss, and 'correct' is the total weight of the targets whose logit is the largest, including ties.
    """

    def add_chunk_loss(total: MetricSums, chunk) -> tuple[MetricSums, None]:
        hidden, targets, weights = chunk
        with jax.named_scope('logits'):
            sums, _ = _sum_chunk_losses(config, compute_token_logits(hidden, kernel, softcap), targets, weights)
        return jax.tree.map(jnp.add, total, sums), None

    chunks = _split_into_chunks(config.chunk_length, hidden, targets, weights)
    sums, _ = jax.lax.scan(add_chunk_loss, _make_zero_metric_sums(), chunks)
    return sums['loss'], sums


def _make_zero_metric_sums() -> MetricSums:
    return {name: jnp.zeros((), jnp.float32) for name in ('loss', 'z_loss', 'weights', 'correct')}


def _cross_entropy_forward(config, hidden, kernel, targets, weights, softcap):
    """Computes the loss and its gradients with respect to hidden and kernel, one chunk at a time."""
    cast_kernel = cast_and_gather(kernel, (axes.EMBED, axes.VOCAB), hidden.dtype)

    def add_chunk_gradients(carry, chunk):
        total, kernel_gradient = carry
        hidden, targets, weights = chunk
        with jax.named_scope('logits'):
            logits = compute_token_logits(hidden, cast_kernel, softcap)
            sums, log_z = _sum_chunk_losses(config, logits, targets, weights)
            logits_gradient = _compute_logits_gradient(config, logits, targets, weights, log_z)
            if softcap is not None:
                logits_gradient *= 1.0 - jnp.square(logits / softcap)
            flat_gradient = logits_gradient.astype(hidden.dtype).reshape(-1, kernel.shape[-1])
            tokens = hidden.reshape(-1, hidden.shape[-1])
            hidden_gradient = (flat_gradient @ cast_kernel.T).reshape(hidden.shape)
            kernel_gradient += jnp.dot(tokens.T, flat_gradient, preferred_element_type=jnp.float32)
        return (jax.tree.map(jnp.add, total, sums), kernel_gradient), hidden_gradient

    start = (_make_zero_metric_sums(), jnp.zeros_like(kernel, dtype=jnp.float32))
    (sums, kernel_gradient), hidden_gradients = jax.lax.scan(
        add_chunk_gradients, start, _split_into_chunks(config.chunk_length, hidden, targets, weights)
    )
    hidden_gradient = join_blocks(hidden_gradients, hidden.shape[1])
    return (sums['loss'], sums), (hidden_gradient, kernel_gradient.astype(kernel.dtype))


def _cross_entropy_backward(config, softcap, gradients, cotangents):
    hidden_gradient, kernel_gradient = gradients
    scale = cotangents[0] + cotangents[1]['loss']
    return (hidden_gradient * scale.astype(hidden_gradient.dtype), kernel_gradient * scale, None, None)


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def score_and_match_targets(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunk_length: int = 64,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the total log-probability of each row's targets, and whether every target has the largest logit.

    Targets with weight 0 are ignored. The results are [batch] float32 and [batch] bool.
    """

    def score_chunk(_, chunk):
        hidden, targets = chunk
        logits = compute_token_logits(hidden, kernel, softcap)
        target_logit = jnp.sum(jnp.where(_build_one_hot_mask(targets, logits.shape[-1]), logits, 0.0), axis=-1)
        is_best = target_logit >= jnp.max(logits, axis=-1)
        return None, (target_logit - jax.nn.logsumexp(logits, axis=-1), is_best)

    _, (scores, is_best) = jax.lax.scan(score_chunk, None, _split_into_chunks(chunk_length, hidden, targets))
    scores, is_best = (join_blocks(array, targets.shape[1]) for array in (scores, is_best))
    return jnp.sum(scores * weights, axis=-1), jnp.all(is_best | (weights == 0), axis=-1)
