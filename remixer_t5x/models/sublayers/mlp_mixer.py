"""MLP-Mixer's token mixing (Tolstikhin et al. 2021), and its form for decoders (REMIXERS, section 3.1.2).

An MLP along the tokens, the same for every feature d:

    MLPMixer     Y[:, d] = W_2^T gelu(W_1^T X[:, d] + b_1) + b_2           W_1: [length, S], W_2: [S, length]
    WindowMixer  y_t[d]  = w_2 . gelu(W_1^T X[t-w+1..t, d] + b_1) + b_2    W_1: [w, S], w_2: [S]

Departures, where the papers leave a choice: rows and columns of the weights are indexed by position in the example, so
packing changes nothing; tokens that are padding, before the first one or of another example are zero; GELU has its
tanh form. The layout adds the norm before the mixing and its residual.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers import cache, self_check
from remixer_t5x.models.layers.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.models.layers.checks import check_length, refuse_prefix
from remixer_t5x.models.layers.compile_target import on_single_cpu, target_platform
from remixer_t5x.models.layers.dense import FAN_IN_NORMAL
from remixer_t5x.models.layers.dropout import dropout
from remixer_t5x.models.layers.token_mlp import mix_through_hidden
from remixer_t5x.models.layers.window_mlp import gpu, tpu

# How windows are mixed on a device, unless `refusal` says that it cannot; elsewhere by `mix_windows`.
_KERNELS = {'gpu': gpu, 'tpu': tpu}

# Number of tokens of a row whose windows exist at one time: their hidden units are [hidden, rows, CHUNK, embed].
CHUNK = 32


class TokenMLP(NamedTuple):
    """Weights of an MLP along tokens, in the dtype of the tokens."""

    wi: jax.Array  # [tokens read, hidden]
    wi_bias: jax.Array  # [hidden]
    wo: jax.Array  # [hidden, tokens written], or [hidden] for one
    wo_bias: jax.Array  # [tokens written], or []


def _token_mlp(
    module: nn.Module, num_read: int, hidden_dim: int, num_written: int | None, dtype: jnp.dtype
) -> TokenMLP:
    """Makes the parameters; call within `nn.compact`."""
    written = () if num_written is None else (num_written,)
    out_axes = (axes.POSITIONS_OUT,) * len(written)
    wo_init = nn.initializers.normal(stddev=hidden_dim**-0.5)  # variance 1 / fan-in, also for a vector

    def make(name, init, names, shape):
        return module.param(name, nn.with_logical_partitioning(init, names), shape, jnp.float32).astype(dtype)

    return TokenMLP(
        make('wi', FAN_IN_NORMAL, (axes.POSITIONS_IN, axes.TOKEN_MLP), (num_read, hidden_dim)),
        make('wi_bias', nn.initializers.zeros, (axes.TOKEN_MLP,), (hidden_dim,)),
        make('wo', wo_init, (axes.TOKEN_MLP, *out_axes), (hidden_dim, *written)),
        make('wo_bias', nn.initializers.zeros, out_axes, written),
    )


def _unit_scale(rate: float, batch: int, weights: TokenMLP, ctx: SequenceContext) -> jax.Array | None:
    """Dropout of hidden units, one mask for all features of a row: [batch, hidden] factors, or None for ones."""
    if rate == 0.0 or ctx.deterministic:
        return None
    ones = jnp.ones((batch, 1, weights.wi.shape[1]), weights.wi.dtype)
    return dropout(rate, ones, deterministic=False)[:, 0]


class MLPMixer(nn.Module):
    """Mixes all tokens of an example by one MLP along them; an encoder's token mixer.

    Attributes:
        hidden_dim: number of hidden units along the tokens, S.
        max_length: number of positions of the weights; rows longer than this are refused.
        dropout_rate: dropout on the hidden units, one mask for all features of a row.
    """

    hidden_dim: ranges.Count
    max_length: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.causal:
            raise UserError(
                'MLPMixer mixes each token with those after it and cannot be used in a decoder: '
                'give DECODER_MIXER = @mlp_mixer.WindowMixer'
            )
        check_length('MLPMixer', self.max_length, x.shape[1])
        weights = _token_mlp(self, self.max_length, self.hidden_dim, self.max_length, x.dtype)
        scale = _unit_scale(self.dropout_rate, x.shape[0], weights, ctx)
        return _mix_packed(weights, x, scale, ctx) if ctx.packed else _mix_examples(weights, x, scale, ctx)


def _mix_examples(weights: TokenMLP, x: jax.Array, scale: jax.Array | None, ctx: SequenceContext) -> jax.Array:
    """One example per row: its positions are the places in the row."""
    length = x.shape[1]
    tokens = jnp.where(ctx.is_token[..., None], x, 0)
    hidden = jnp.einsum('ls,bld->bsd', weights.wi[:length], tokens) + weights.wi_bias[:, None]
    hidden = nn.gelu(hidden, approximate=True)
    if scale is not None:
        hidden = hidden * scale[..., None]
    return jnp.einsum('sl,bsd->bld', weights.wo[:, :length], hidden) + weights.wo_bias[:length, None]


def _mix_packed(weights: TokenMLP, x: jax.Array, scale: jax.Array | None, ctx: SequenceContext) -> jax.Array:
    """Several examples per row: each token brings the weights of its position."""
    w_in = jnp.take(weights.wi, ctx.positions, axis=0)
    w_out = jnp.take(weights.wo.T, ctx.positions, axis=0)
    if scale is not None:
        w_out = w_out * scale[:, None]
    w_in, value, w_out = (array[:, :, None] for array in (w_in, x, w_out))  # one head
    ids = ctx.segment_ids
    mixed = mix_through_hidden(w_in, value, w_out, ids, ids, packed=True, hidden_bias=weights.wi_bias[None])
    return mixed[:, :, 0] + jnp.take(weights.wo_bias, ctx.positions)[..., None]


class WindowMixer(nn.Module):
    """Mixes each token with the `window - 1` before it, by one MLP along them for all positions; a token mixer.

    It never sees tokens ahead, also in an encoder. While decoding it keeps the last `window` inputs: memory and time
    for a token do not grow with length.

    Attributes:
        hidden_dim: number of hidden units along the window, S.
        window: number of tokens in a window, including the token itself.
        dropout_rate: dropout on the hidden units, one mask for all tokens and features of a row.
    """

    hidden_dim: ranges.Count
    window: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        refuse_prefix(ctx, 'WindowMixer')
        weights = _token_mlp(self, self.window, self.hidden_dim, None, x.dtype)
        if ctx.decode:
            inputs = self.variable('cache', 'cached_inputs', _first_window, x, self.window, ctx)
            if ctx.step is not None:
                inputs.value = jnp.concatenate([inputs.value[:, 1:], x.astype(inputs.value.dtype)], axis=1)
                return _mix_window(weights, jnp.moveaxis(inputs.value[:, :, None], 1, 0), None)
        scale = _unit_scale(self.dropout_rate, x.shape[0], weights, ctx)
        tokens = jnp.where(ctx.is_token[..., None], x, 0)
        ids = ctx.segment_ids if ctx.packed else None
        platform = target_platform()
        if kernel := _KERNELS.get(platform):
            refusal = kernel.refusal(weights.wi, tokens)
            if refusal is None and platform == 'tpu':
                refusal = self_check.failure(_check(weights, tokens, ids))
            if refusal is None:
                out = jnp.broadcast_to(weights.wo, (len(x), self.hidden_dim)) if scale is None else weights.wo * scale
                return kernel.mix(weights.wi, weights.wi_bias, out, tokens, ids) + weights.wo_bias
            self_check.warn_of_formula('the window mixer', f'the {platform} kernel', refusal)
        return mix_windows(weights, tokens, scale, ids)


def _check(weights: TokenMLP, tokens: jax.Array, ids: jax.Array | None) -> self_check.Check:
    """The check of the TPU's kernel; on a GPU XLA compiles the formula."""
    (window, hidden), (_, length, features), rows = weights.wi.shape, tokens.shape, self_check.ROWS
    shapes = (window, hidden), (hidden,), (rows, hidden), (rows, length, features)
    operands = [jax.ShapeDtypeStruct(shape, tokens.dtype) for shape in shapes]
    of_ids = None if ids is None else jax.ShapeDtypeStruct((rows, length), jnp.int32)
    call = f'{length} tokens, window {window}, {hidden} units, {features} features'
    return self_check.Check(
        'window_mlp_tpu',
        call if ids is None else f'{call}, packed',
        tpu.mix,
        _formula,
        (*operands, of_ids),
        packed=ids is not None,
    )


def _formula(wi: jax.Array, bias: jax.Array, out: jax.Array, tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    ones, zero = jnp.ones(wi.shape[1], wi.dtype), jnp.zeros((), wi.dtype)
    return mix_windows(TokenMLP(wi, bias, ones, zero), tokens, out, ids)


def _first_window(x: jax.Array, window: int, ctx: SequenceContext) -> jax.Array:
    """The inputs before the first step, [batch, window, embed]: zero, or the last ones of a prompt."""
    if ctx.cache_slots is None:
        return jnp.zeros((x.shape[0], window, x.shape[-1]), x.dtype)
    before = jnp.pad(jnp.where(cache.is_before_last(ctx)[..., None], x, 0), ((0, 0), (window, 0), (0, 0)))
    first = jnp.sum(ctx.is_token, axis=1) - 1
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, window))(before, first)


@jax.custom_vjp
def mix_windows(weights: TokenMLP, tokens: jax.Array, scale: jax.Array | None, ids: jax.Array | None) -> jax.Array:
    """The windows of all tokens, chunk by chunk; the backward pass keeps the tokens only and computes the rest again.

    It has a separate gradient rule, because a remat policy that keeps matmuls would keep the hidden units of every
    chunk.

    Args:
        weights: weights of the MLP along a window.
        tokens: [batch, length, embed], zero at padding.
        scale: [batch, hidden] factors of the hidden units, or None.
        ids: [batch, length] int32, the example of each token in packed rows; None where a row is one example.

    Returns:
        [batch, length, embed].
    """
    return _mix_chunks(weights, tokens, scale, ids)


def _mix_and_keep(weights, tokens, scale, ids):
    mixed = checkpoint_name(_mix_chunks(weights, tokens, scale, ids), ATTENTION_OUTPUT)
    return mixed, (weights, tokens, scale, ids)


def _gradients(kept, gradient):
    *differentiable, ids = kept
    _, pull_back = jax.vjp(functools.partial(_mix_chunks, ids=ids), *differentiable)
    return *pull_back(gradient), None


mix_windows.defvjp(_mix_and_keep, _gradients)


def _mix_chunks(weights, tokens, scale, ids):
    # The hidden units of one row's chunk stay in cache, which halves the time.
    if not on_single_cpu():
        return _mix_rows_by_chunk(weights, tokens, scale, ids)

    def mix_row(row):
        alone = jax.tree.map(lambda array: array[None], row)
        return _mix_rows_by_chunk(weights, *alone)[0]

    return jax.lax.map(mix_row, (tokens, scale, ids))


def _mix_rows_by_chunk(weights, tokens, scale, ids):
    batch, length, embed = tokens.shape
    window = weights.wi.shape[0]

    def split(array: jax.Array) -> jax.Array:
        """[batch, length, ...] -> [chunks, batch, CHUNK, ...], filled up with zeros."""
        rest = array.shape[2:]
        array = jnp.pad(array, ((0, 0), (0, -length % CHUNK)) + ((0, 0),) * len(rest))
        return jnp.moveaxis(array.reshape(batch, -1, CHUNK, *rest), 1, 0)

    def windows(reach: jax.Array) -> jax.Array:
        """[batch, window - 1 + CHUNK, ...] -> [window, batch, CHUNK, ...]."""
        return jnp.stack([reach[:, first : first + CHUNK] for first in range(window)])

    @jax.checkpoint
    def mix_chunk(before, chunk):
        reach = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), before, chunk)
        seen = windows(reach[0])
        if ids is not None:
            seen = jnp.where((windows(reach[1]) == chunk[1])[..., None], seen, 0)
        return jax.tree.map(lambda array: array[:, CHUNK:], reach), _mix_window(weights, seen, scale)

    chunks = jax.tree.map(split, (tokens, ids))
    before = jax.tree.map(lambda array: jnp.zeros((batch, window - 1, *array.shape[3:]), array.dtype), chunks)
    _, mixed = jax.lax.scan(mix_chunk, before, chunks)
    return jnp.moveaxis(mixed, 0, 1).reshape(batch, -1, embed)[:, :length]


def _mix_window(weights: TokenMLP, seen: jax.Array, scale: jax.Array | None) -> jax.Array:
    """[window, batch, tokens, embed] -> [batch, tokens, embed]."""
    window, *shape = seen.shape
    # Everything but the window is one axis of a single matmul.
    hidden = weights.wi.T @ seen.reshape(window, -1) + weights.wi_bias[:, None]
    hidden = nn.gelu(hidden, approximate=True)
    if scale is not None:
        hidden = hidden.reshape(-1, *shape) * scale.T[:, :, None, None]
    return (weights.wo @ hidden.reshape(hidden.shape[0], -1)).reshape(shape) + weights.wo_bias
