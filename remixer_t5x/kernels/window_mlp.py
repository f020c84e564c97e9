"""An MLP along windows of tokens, computed by a device kernel, or by plain JAX for one chunk of tokens at a time.

y_t[d] = wo . gelu(wi^T x[t - w + 1 .. t, d] + wi_bias) + wo_bias
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels import self_check, window_mlp_gpu, window_mlp_tpu
from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import get_target_platform, targets_single_cpu
from remixer_t5x.kernels.reshaping import join_blocks, split_blocks

_KERNELS = {'gpu': window_mlp_gpu, 'tpu': window_mlp_tpu}

# Number of tokens per row in a chunk of the plain-JAX implementation.
CHUNK = 32


class TokenMLP(NamedTuple):
    """Weights of an MLP that mixes tokens, in the dtype of the tokens."""

    wi: jax.Array  # [input tokens, hidden]
    wi_bias: jax.Array  # [hidden]
    wo: jax.Array  # [hidden, output tokens], or [hidden] for one output token
    wo_bias: jax.Array  # [output tokens], or []


def mix_windows(weights: TokenMLP, tokens: jax.Array, scale: jax.Array | None, ids: jax.Array | None) -> jax.Array:
    """Mixes each token with the preceding tokens in its window; in packed rows, only with tokens of its example.

    Args:
        weights: weights of the MLP.
        tokens: features of each token, [batch, length, embed], zero at padding.
        scale: factor of each hidden unit, [batch, hidden], or None.
        ids: [batch, length] int32, the example id of each token in packed rows; None if each row is a single example.

    Returns:
        [batch, length, embed].
    """
    platform = get_target_platform()
    if kernel := _KERNELS.get(platform):
        shape = len(tokens), weights.wi.shape[1]
        out = jnp.broadcast_to(weights.wo, shape) if scale is None else weights.wo * scale
        operands = weights.wi, weights.wi_bias, out, tokens, ids
        unsupported_reason = kernel.unsupported_reason(weights.wi, tokens)
        # The GPU kernel needs no check, because XLA generates it.
        if unsupported_reason is None and platform == 'tpu':
            unsupported_reason = self_check.failure_reason(_build_kernel_check(*operands))
        if unsupported_reason is None:
            return kernel.apply_mlp(*operands) + weights.wo_bias
        self_check.log_fallback('the window mixer', f'the {platform} kernel', unsupported_reason)
    return _mix_by_formula(weights, tokens, scale, ids)


def _build_kernel_check(wi, bias, out, tokens, ids) -> self_check.KernelCheck:
    (window, hidden), (_, length, features), packed = wi.shape, tokens.shape, ids is not None

    def mix_by_formula(wi, bias, out, tokens, ids):
        ones, zero = jnp.ones(hidden, wi.dtype), jnp.zeros((), wi.dtype)
        return _mix_by_formula(TokenMLP(wi, bias, ones, zero), tokens, out, ids)

    shapes = (
        *self_check.get_operand_shapes((wi, bias)),
        *self_check.get_operand_shapes((out, tokens, ids), self_check.NUM_CHECK_ROWS),
    )
    call = f'{length} tokens, window {window}, {hidden} units, {features} features{", packed" * packed}'
    return self_check.KernelCheck('window_mlp_tpu', call, window_mlp_tpu.apply_mlp, mix_by_formula, shapes)


@jax.custom_vjp
def _mix_by_formula(weights: TokenMLP, tokens: jax.Array, scale: jax.Array | None, ids: jax.Array | None) -> jax.Array:
    """Computes the MLP in chunks, and recomputes all hidden units in the backward pass.

    Without this gradient rule, remat policies that save the outputs of matmuls would save the hidden units.
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
    # On a single CPU, process one row at a time: its hidden units remain in cache, which halves the time.
    if not targets_single_cpu():
        return _mix_rows_by_chunk(weights, tokens, scale, ids)

    def mix_row(row):
        return _mix_rows_by_chunk(weights, *jax.tree.map(lambda array: array[None], row))[0]

    return jax.lax.map(mix_row, (tokens, scale, ids))


def _mix_rows_by_chunk(weights, tokens, scale, ids):
    (batch, length, _), window = tokens.shape, weights.wi.shape[0]

    def stack_windows(tokens: jax.Array) -> jax.Array:
        """Stacks the windows of tokens [batch, window - 1 + CHUNK, ...] as [window, batch, CHUNK, ...]."""
        return jnp.stack([tokens[:, first : first + CHUNK] for first in range(window)])

    @jax.checkpoint
    def mix_chunk(before, chunk):
        extended = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), before, chunk)
        windows = stack_windows(extended[0])
        if ids is not None:
            windows = jnp.where((stack_windows(extended[1]) == chunk[1])[..., None], windows, 0)
        return jax.tree.map(lambda array: array[:, CHUNK:], extended), mix_window(weights, windows, scale)

    chunks = split_blocks((tokens, ids), CHUNK)
    before = jax.tree.map(lambda array: jnp.zeros((batch, window - 1, *array.shape[3:]), array.dtype), chunks)
    _, mixed = jax.lax.scan(mix_chunk, before, chunks)
    return join_blocks(mixed, length)


def mix_window(weights: TokenMLP, windows: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Applies the MLP to windows of tokens [window, batch, tokens, embed]; returns [batch, tokens, embed]."""
    window, *shape = windows.shape
    hidden = weights.wi.T @ windows.reshape(window, -1) + weights.wi_bias[:, None]
    hidden = nn.gelu(hidden, approximate=True)
    if scale is not None:
        hidden = hidden.reshape(-1, *shape) * scale.T[:, :, None, None]
    return (weights.wo @ hidden.reshape(hidden.shape[0], -1)).reshape(shape) + weights.wo_bias
