"""MLP-Mixer's token mixer (Tolstikhin et al. 2021), and a causal variant for decoders (REMIXERS, section 3.1.2).

Both mixers apply the same MLP along the tokens to every feature d:

    MLPMixer     Y[:, d] = W_2^T gelu(W_1^T X[:, d] + b_1) + b_2           W_1: [length, S], W_2: [S, length]
    WindowMixer  y_t[d]  = w_2 . gelu(W_1^T X[t-w+1..t, d] + b_1) + b_2    W_1: [w, S], w_2: [S]

Choices that the papers leave open: the weights are indexed by position in the example, so packing does not change the
output; padding, positions before the first token and tokens of other examples are treated as zeros; GELU is the tanh
approximation.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext, check_length, check_no_prefix
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.window_mlp import TokenMLP, mix_window, mix_windows
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.dense import FAN_IN_NORMAL, create_param, dropout
from remixer_t5x.models.layers.token_mlp import apply_token_mlp


def _create_token_mlp(
    module: nn.Module, num_inputs: int, hidden_dim: int, num_outputs: int | None, dtype: jnp.dtype
) -> TokenMLP:
    """Creates the parameters of the token MLP in `module`; `wo` is a vector if `num_outputs` is None."""
    outputs = () if num_outputs is None else (num_outputs,)
    out_axes = (axes.POSITIONS_OUT,) * len(outputs)
    wo_init = nn.initializers.normal(stddev=hidden_dim**-0.5)  # variance 1 / fan-in, also for a vector

    weights = TokenMLP(
        create_param(module, 'wi', FAN_IN_NORMAL, (axes.POSITIONS_IN, axes.TOKEN_MLP), (num_inputs, hidden_dim)),
        create_param(module, 'wi_bias', nn.initializers.zeros, (axes.TOKEN_MLP,), (hidden_dim,)),
        create_param(module, 'wo', wo_init, (axes.TOKEN_MLP, *out_axes), (hidden_dim, *outputs)),
        create_param(module, 'wo_bias', nn.initializers.zeros, out_axes, outputs),
    )
    return jax.tree.map(lambda array: array.astype(dtype), weights)


def _sample_dropout_factors(rate: float, batch: int, weights: TokenMLP, ctx: SequenceContext) -> jax.Array | None:
    """Returns the dropout factors of the hidden units, [batch, hidden], or None if dropout is disabled."""
    if rate == 0.0 or ctx.deterministic:
        return None
    ones = jnp.ones((batch, 1, weights.wi.shape[1]), weights.wi.dtype)
    return dropout(rate, ones, deterministic=False)[:, 0]


class MLPMixer(nn.Module):
    """MLP-Mixer's token mixer for encoders, `Y[:, d] = W_2^T gelu(W_1^T X[:, d] + b_1) + b_2`.

    Attributes:
        hidden_dim: number of hidden units of the MLP along the tokens, S.
        max_length: maximum sequence length, for the size of W_1 and W_2; longer rows raise UserError.
        dropout_rate: dropout on the hidden units, with one mask for all features of a row.
    """

    hidden_dim: ranges.Count
    max_length: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.causal:
            raise UserError(
                'MLPMixer mixes each token with later tokens, so it cannot be used in a decoder; '
                'set DECODER_MIXER = @mlp_mixer.WindowMixer'
            )
        check_length('MLPMixer', self.max_length, x.shape[1])
        weights = _create_token_mlp(self, self.max_length, self.hidden_dim, self.max_length, x.dtype)
        scale = _sample_dropout_factors(self.dropout_rate, x.shape[0], weights, ctx)
        return _mix_packed_rows(weights, x, scale, ctx) if ctx.packed else _mix_rows(weights, x, scale, ctx)


def _mix_rows(weights: TokenMLP, x: jax.Array, scale: jax.Array | None, ctx: SequenceContext) -> jax.Array:
    """Mixes the tokens of rows that contain one example each."""
    length = x.shape[1]
    tokens = jnp.where(ctx.is_token[..., None], x, 0)
    hidden = jnp.einsum('ls,bld->bsd', weights.wi[:length], tokens) + weights.wi_bias[:, None]
    hidden = nn.gelu(hidden, approximate=True)
    if scale is not None:
        hidden = hidden * scale[..., None]
    return jnp.einsum('sl,bsd->bld', weights.wo[:, :length], hidden) + weights.wo_bias[:length, None]


def _mix_packed_rows(weights: TokenMLP, x: jax.Array, scale: jax.Array | None, ctx: SequenceContext) -> jax.Array:
    """Mixes the tokens of packed rows with weights gathered by position in the example."""
    w_in = jnp.take(weights.wi, ctx.positions, axis=0)
    w_out = jnp.take(weights.wo.T, ctx.positions, axis=0)
    if scale is not None:
        w_out = w_out * scale[:, None]
    w_in, value, w_out = (array[:, :, None] for array in (w_in, x, w_out))  # one head
    ids = ctx.segment_ids
    mixed = apply_token_mlp(w_in, value, w_out, ids, ids, packed=True, hidden_bias=weights.wi_bias[None])
    return mixed[:, :, 0] + jnp.take(weights.wo_bias, ctx.positions)[..., None]


class WindowMixer(nn.Module):
    """Causal token mixer over a sliding window, `y_t[d] = w_2 . gelu(W_1^T X[t-w+1..t, d] + b_1) + b_2`.

    The mixer is causal in encoders too. While decoding, the layer caches the last `window` inputs, so memory and time
    per token do not depend on the sequence length.

    Attributes:
        window: number of tokens in a window, including the current token, w.
        dropout_rate: dropout on the hidden units, with one mask for all tokens and features of a row.
    """

    hidden_dim: ranges.Count
    window: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        check_no_prefix(ctx, 'WindowMixer')
        weights = _create_token_mlp(self, self.window, self.hidden_dim, None, x.dtype)
        if ctx.decode:
            inputs = self.variable('cache', 'cached_inputs', cache.values_at_prompt_end, x, ctx, self.window)
            if ctx.step is not None:
                inputs.value = jnp.concatenate([inputs.value[:, 1:], x.astype(inputs.value.dtype)], axis=1)
                return mix_window(weights, jnp.moveaxis(inputs.value[:, :, None], 1, 0), None)
        scale = _sample_dropout_factors(self.dropout_rate, x.shape[0], weights, ctx)
        tokens = jnp.where(ctx.is_token[..., None], x, 0)
        return mix_windows(weights, tokens, scale, ctx.segment_ids if ctx.packed else None)
