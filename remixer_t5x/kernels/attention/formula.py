"""softmax(query key^T + bias) value, with a backward pass that recomputes the weights.

As in FlashAttention (Dao et al. 2022), only the output and the log-sum-exp of each row of logits are kept, not the
[batch, heads, q, k] weights. On a single CPU the rows of the batch are processed one after another, so that a row's
logits stay in cache and the gradient of the shared bias is summed there; scripts/benchmarks/attention.py measures it.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.compile_target import on_single_cpu

# A remat policy keeps the arrays of this name, which the backward pass would otherwise compute a second time.
ATTENTION_OUTPUT = 'attention_output'

# Finite, so that a query that may see nothing (all padding) averages its keys instead of becoming NaN.
MASKED = -1e10


@jax.custom_vjp
def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """Attention without a scale on the logits.

    Args:
        query: [batch, q, heads, kv].
        key: [batch, k, heads, kv].
        value: [batch, k, heads, kv].
        mask: bool, broadcastable to [batch, 1, q, k]; True where a query may see a key.
        bias: [1, heads, q, k] float32 added to the logits, or None.

    Returns:
        [batch, q, heads, kv] in value's dtype; logits and softmax are float32.
    """
    return _attend_and_keep(query, key, value, mask, bias)[0]


def attention_weights(query: jax.Array, key: jax.Array, mask: jax.Array, bias: jax.Array | None) -> jax.Array:
    """softmax(query key^T + bias) itself, [batch, heads, q, k] float32; same arguments as `dot_product_attention`."""
    mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
    shared = None if bias is None else bias[0]
    return jax.nn.softmax(jax.vmap(lambda q, k, m: _row_logits(q, k, m, shared))(query, key, mask), axis=-1)


def _attend_and_keep(query, key, value, mask, bias):
    mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
    shared = None if bias is None else bias[0]
    if on_single_cpu():
        mixed, log_total = jax.lax.map(lambda row: _row_forward(shared, *row), (query, key, value, mask))
    else:
        mixed, log_total = jax.vmap(lambda *row: _row_forward(shared, *row))(query, key, value, mask)
    mixed, log_total = (checkpoint_name(array, ATTENTION_OUTPUT) for array in (mixed, log_total))
    return mixed, (query, key, value, mask, bias, mixed, log_total)


def _gradients(residuals, gradient):
    query, key, value, mask, bias, mixed, log_total = residuals
    shared = None if bias is None else bias[0]
    rows = (query, key, value, mask, mixed, log_total, gradient)
    if on_single_cpu():

        def body(total, row):
            *gradients, bias_gradient = _row_backward(shared, *row)
            return jax.tree.map(jnp.add, total, bias_gradient), gradients

        bias_gradient, gradients = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, shared), rows)
    else:
        *gradients, bias_gradient = jax.vmap(lambda *row: _row_backward(shared, *row))(*rows)
        bias_gradient = jax.tree.map(lambda rows: jnp.sum(rows, axis=0), bias_gradient)
    return *gradients, None, jax.tree.map(lambda array: array[None], bias_gradient)


dot_product_attention.defvjp(_attend_and_keep, _gradients)


def _row_logits(query: jax.Array, key: jax.Array, mask: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[heads, q, k] float32 of one row of the batch."""
    logits = jnp.einsum('qhd,khd->hqk', query, key, preferred_element_type=jnp.float32)
    offset = jnp.where(mask, 0.0, MASKED)
    return logits + (offset if bias is None else offset + bias)


def _row_forward(bias, query, key, value, mask) -> tuple[jax.Array, jax.Array]:
    """Output [q, heads, kv] and log-sum-exp of the logits [heads, q]."""
    logits = _row_logits(query, key, mask, bias)
    largest = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - largest[..., None])
    total = jnp.sum(weights, axis=-1)
    mixed = jnp.einsum('hqk,khd->qhd', weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return (mixed / total.T[..., None]).astype(value.dtype), largest + jnp.log(total)


def _row_backward(bias, query, key, value, mask, mixed, log_total, gradient):
    """Gradients with respect to query, key, value and bias."""
    weights = jnp.exp(_row_logits(query, key, mask, bias) - log_total[..., None])
    value_gradient = jnp.einsum('hqk,qhd->khd', weights.astype(value.dtype), gradient)
    weights_gradient = jnp.einsum('qhd,khd->hqk', gradient, value, preferred_element_type=jnp.float32)
    delta = jnp.sum(mixed.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    logits_gradient = weights * (weights_gradient - delta.T[..., None])
    low = logits_gradient.astype(query.dtype)
    query_gradient = jnp.einsum('hqk,khd->qhd', low, key)
    key_gradient = jnp.einsum('hqk,qhd->khd', low, query)
    return query_gradient, key_gradient, value_gradient, None if bias is None else logits_gradient
