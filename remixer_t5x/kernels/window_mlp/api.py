"""The MLP along windows of tokens, by a device kernel or by the formula in chunks of tokens.

    y_t[d] = wo . gelu(wi^T x[t - w + 1 .. t, d] + wi_bias) + wo_bias

Windows do not reach into another example of a packed row.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels import self_check
from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.blocks import join_blocks, split_blocks
from remixer_t5x.kernels.compile_target import on_single_cpu, target_platform
from remixer_t5x.kernels.window_mlp import gpu, tpu

# Kernels by platform. The formula computes the calls that they do not support.
_KERNELS = {'gpu': gpu, 'tpu': tpu}

# The formula computes this many tokens of a row at a time, whose hidden units are [hidden, rows, CHUNK, embed].
CHUNK = 32


class TokenMLP(NamedTuple):
    """Weights of an MLP along tokens, in the dtype of the tokens."""

    wi: jax.Array  # [input tokens, hidden]
    wi_bias: jax.Array  # [hidden]
    wo: jax.Array  # [hidden, output tokens], or [hidden] for one output token
    wo_bias: jax.Array  # [output tokens], or []


def mix_windows(weights: TokenMLP, tokens: jax.Array, scale: jax.Array | None, ids: jax.Array | None) -> jax.Array:
    """Mixes each token with the tokens before it in its window.

    Args:
        weights: weights of the MLP along a window.
        tokens: [batch, length, embed], zero at padding.
        scale: [batch, hidden] factors of the hidden units, or None.
        ids: [batch, length] int32, the example of each token in packed rows; None if each row is one example.

    Returns:
        [batch, length, embed].
    """
    platform = target_platform()
    if kernel := _KERNELS.get(platform):
        unsupported_reason = kernel.unsupported_reason(weights.wi, tokens)
        if unsupported_reason is None and platform == 'tpu':
            unsupported_reason = self_check.failure_reason(_self_check(weights, tokens, ids))
        if unsupported_reason is None:
            shape = len(tokens), weights.wi.shape[1]
            out = jnp.broadcast_to(weights.wo, shape) if scale is None else weights.wo * scale
            return kernel.mix(weights.wi, weights.wi_bias, out, tokens, ids) + weights.wo_bias
        self_check.log_fallback('the window mixer', f'the {platform} kernel', unsupported_reason)
    return _mix_by_formula(weights, tokens, scale, ids)


def _self_check(weights: TokenMLP, tokens: jax.Array, ids: jax.Array | None) -> self_check.Check:
    """Builds the self-check of the TPU kernel; the GPU kernel is compiled by XLA and needs no check."""
    (window, hidden), (_, length, features), rows = weights.wi.shape, tokens.shape, self_check.ROWS
    shapes = (window, hidden), (hidden,), (rows, hidden), (rows, length, features)
    operands = [jax.ShapeDtypeStruct(shape, tokens.dtype) for shape in shapes]
    id_shape = None if ids is None else jax.ShapeDtypeStruct((rows, length), jnp.int32)
    call = f'{length} tokens, window {window}, {hidden} units, {features} features'
    return self_check.Check(
        'window_mlp_tpu',
        call if ids is None else f'{call}, packed',
        tpu.mix,
        _formula_of_kernel,
        (*operands, id_shape),
        packed=ids is not None,
    )


def _formula_of_kernel(
    wi: jax.Array, bias: jax.Array, out: jax.Array, tokens: jax.Array, ids: jax.Array | None
) -> jax.Array:
    ones, zero = jnp.ones(wi.shape[1], wi.dtype), jnp.zeros((), wi.dtype)
    return _mix_by_formula(TokenMLP(wi, bias, ones, zero), tokens, out, ids)


@jax.custom_vjp
def _mix_by_formula(weights: TokenMLP, tokens: jax.Array, scale: jax.Array | None, ids: jax.Array | None) -> jax.Array:
    """Computes all chunks; the backward pass recomputes everything from the tokens.

    Without this gradient rule, a remat policy that saves matmuls would save the hidden units of every chunk.
    """
    return _mix_chunks(weights, tokens, scale, ids)


def _forward_rule(weights, tokens, scale, ids):
    mixed = checkpoint_name(_mix_chunks(weights, tokens, scale, ids), ATTENTION_OUTPUT)
    return mixed, (weights, tokens, scale, ids)


def _backward_rule(residuals, gradient):
    *differentiable, ids = residuals
    _, pull_back = jax.vjp(functools.partial(_mix_chunks, ids=ids), *differentiable)
    return *pull_back(gradient), None


_mix_by_formula.defvjp(_forward_rule, _backward_rule)


def _mix_chunks(weights, tokens, scale, ids):
    # One row at a time, the hidden units of a chunk stay in cache, which halves the time.
    if not on_single_cpu():
        return _mix_rows_by_chunk(weights, tokens, scale, ids)

    def mix_row(row):
        return _mix_rows_by_chunk(weights, *jax.tree.map(lambda array: array[None], row))[0]

    return jax.lax.map(mix_row, (tokens, scale, ids))


def _mix_rows_by_chunk(weights, tokens, scale, ids):
    (batch, length, _), window = tokens.shape, weights.wi.shape[0]

    def windows(reach: jax.Array) -> jax.Array:
        """Stacks the windows of [batch, window - 1 + CHUNK, ...] to [window, batch, CHUNK, ...]."""
        return jnp.stack([reach[:, first : first + CHUNK] for first in range(window)])

    @jax.checkpoint
    def mix_chunk(before, chunk):
        reach = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), before, chunk)
        seen = windows(reach[0])
        if ids is not None:
            seen = jnp.where((windows(reach[1]) == chunk[1])[..., None], seen, 0)
        return jax.tree.map(lambda array: array[:, CHUNK:], reach), mix_window(weights, seen, scale)

    chunks = split_blocks((tokens, ids), CHUNK)
    before = jax.tree.map(lambda array: jnp.zeros((batch, window - 1, *array.shape[3:]), array.dtype), chunks)
    _, mixed = jax.lax.scan(mix_chunk, before, chunks)
    return join_blocks(mixed, length)


def mix_window(weights: TokenMLP, seen: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Computes the MLP for windows [window, batch, tokens, embed]; returns [batch, tokens, embed]."""
    window, *shape = seen.shape
    # One matmul, with all axes but the window flattened to one.
    hidden = weights.wi.T @ seen.reshape(window, -1) + weights.wi_bias[:, None]
    hidden = nn.gelu(hidden, approximate=True)
    if scale is not None:
        hidden = hidden.reshape(-1, *shape) * scale.T[:, :, None, None]
    return (weights.wo @ hidden.reshape(hidden.shape[0], -1)).reshape(shape) + weights.wo_bias
