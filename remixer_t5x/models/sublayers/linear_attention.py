"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs"), with linear cost in the sequence length.

    y_i = (phi(q_i) sum_j phi(k_j) v_j^T) / (phi(q_i) . sum_j phi(k_j))        phi(x) = elu(x) + 1        (equation 5)

X and Y are [batch, length, D]; q, k and v are linear projections of X for each head, [length, kv]. The sums run over
the tokens visible to token i; in a decoder, they are running sums, and decoding caches only these sums (equations 18 to
20). Causal attention and packed rows are computed in chunks of tokens, so memory is proportional to length x width.

Differences from the paper: projections have no biases, as in T5; dropout zeroes whole value vectors. A position bias is
not supported; add position embeddings to the input of the stack instead.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import EncoderMemory, SequenceContext, require_encoder_memory
from remixer_t5x.kernels.compile_target import targets_cpu
from remixer_t5x.kernels.reshaping import split_blocks
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.dense import Dense, dropout, split_heads
from remixer_t5x.models.layers.token_mlp import apply_token_mlp

# The pair `sum_j phi(k_j) v_j^T` [..., heads, kv, kv] and `sum_j phi(k_j)` [..., heads, kv], both float32.
KeyValueSums = tuple[jax.Array, jax.Array]

# Number of tokens in a chunk, within which attention is quadratic.
CHUNK = 128
# Prevents division by zero; the authors' code uses the same value.
EPSILON = 1e-6


def feature_map(x: jax.Array) -> jax.Array:
    """Computes the feature map phi, `elu(x) + 1`."""
    x32 = x.astype(jnp.float32)
    # `nn.elu` computes expm1, and expm1(x) + 1 would round small features to zero.
    return jnp.where(x32 > 0, x32 + 1, jnp.exp(jnp.minimum(x32, 0))).astype(x.dtype)


def linear_attention(query: jax.Array, key: jax.Array, value: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Computes linear attention (equation 5) within each example; causal if `ctx.causal` is True.

    Args:
        query: phi(q), [batch, length, heads, kv].
        key: phi(k), [batch, length, heads, kv].
        value: v, [batch, length, heads, kv].
        ctx: context of the tokens; examples of a packed row must be contiguous.
    """
    key = jnp.where(ctx.is_token[..., None, None], key, 0)
    value = jnp.where(ctx.is_token[..., None, None], value, 0)
    if not (ctx.causal or ctx.packed):
        return _divide_by_denominators(
            *_multiply_queries_by_sums(query, _sum_tokens(key, value, query.dtype)), value.dtype
        )
    length = query.shape[1]
    ids = ctx.segment_ids if ctx.packed else jnp.ones_like(ctx.segment_ids)
    # Split the tokens into chunks, [batch, chunks, chunk, ...], padded with zeros.
    query, key, value, ids = split_blocks((query, key, value, ids), min(CHUNK, length), axis=1)
    mixed, total = _attend_within_chunks(query, key, value, ids, ctx.causal)
    directions = (False,) if ctx.causal else (False, True)
    for reverse in directions if query.shape[1] > 1 else ():
        more_mixed, more_total = _attend_across_chunks(query, key, value, ids, reverse)
        mixed, total = mixed + more_mixed, total + more_total
    out = _divide_by_denominators(mixed, total, value.dtype)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length]


def _divide_by_denominators(mixed: jax.Array, total: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return (mixed / (total + EPSILON)[..., None]).astype(dtype)


def _sum_tokens(key: jax.Array, value: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> KeyValueSums:
    """Computes the sums over the token axis of keys and values [..., tokens, heads, kv].

    If the sums are later cast to a smaller dtype, pass it as `dtype`, so that the backward pass also multiplies in this
    dtype.
    """
    state_dtype = jnp.float32 if targets_cpu() else dtype
    state = jnp.einsum('...khd,...khv->...hdv', key, value, preferred_element_type=state_dtype)
    return state, jnp.sum(key.astype(jnp.float32), axis=-3)


def _multiply_queries_by_sums(query: jax.Array, sums: KeyValueSums) -> tuple[jax.Array, jax.Array]:
    """Returns numerators [..., tokens, heads, kv] and denominators [..., tokens, heads] of equation 5, float32."""
    state, total = (array.astype(query.dtype) for array in sums)
    # Cast the result, because XLA:CPU does not support preferred_element_type=float32 for this bfloat16 einsum.
    mixed = jnp.einsum('...qhd,...hdv->...qhv', query, state).astype(jnp.float32)
    return mixed, jnp.einsum('...qhd,...hd->...qh', query, total, preferred_element_type=jnp.float32)


def _attend_within_chunks(query, key, value, ids, causal: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the terms of equation 5's numerators and denominators from tokens in the same chunk."""
    is_visible = ids[..., :, None] == ids[..., None, :]
    if causal:
        is_visible &= jnp.tri(ids.shape[-1], dtype=bool)
    weights = jnp.einsum('bnqhd,bnkhd->bnhqk', query, key, preferred_element_type=jnp.float32)
    weights = jnp.where(is_visible[:, :, None], weights, 0)
    mixed = jnp.einsum('bnhqk,bnkhv->bnqhv', weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return mixed, jnp.swapaxes(jnp.sum(weights, axis=-1), -1, -2)


def _attend_across_chunks(query, key, value, ids, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the terms of equation 5's numerators and denominators from all earlier (if `reverse`, later) chunks.

    Only the last (if `reverse`, the first) example of a chunk can extend into the next chunk. The scan carries its
    sums, and resets them when another example begins.
    """
    edge_id = ids[:, :, 0 if reverse else -1]
    is_summed = ids == edge_id[:, :, None]
    sums = _sum_tokens(jnp.where(is_summed[..., None, None], key, 0), value)
    # ID of the example whose sums are carried into each chunk; for the first chunk, these sums are zero.
    carried_id = jnp.roll(edge_id, -1 if reverse else 1, axis=1)
    keep = (edge_id == carried_id).astype(jnp.float32)

    def accumulate_chunk_sums(carried: KeyValueSums, chunk) -> tuple[KeyValueSums, KeyValueSums]:
        keep, (state, total) = chunk
        return (
            keep[:, None, None, None] * carried[0] + state,
            keep[:, None, None] * carried[1] + total,
        ), carried

    by_chunk = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), (keep, sums))
    zeros = jax.tree.map(lambda array: jnp.zeros_like(array[:, 0]), sums)
    _, carried = jax.lax.scan(accumulate_chunk_sums, zeros, by_chunk, reverse=reverse)
    carried = jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), carried)
    reads_carried = ids == carried_id[:, :, None]
    return _multiply_queries_by_sums(jnp.where(reads_carried[..., None, None], query, 0), carried)


class _LinearAttentionBase(nn.Module):
    """Base class with the settings and projections of linear self-attention and cross-attention."""

    num_heads: ranges.Count
    head_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    def _project_to_heads(self, name: str, x: jax.Array) -> jax.Array:
        """Projects [batch, length, embed] to [batch, length, heads, kv]."""
        width = self.num_heads * self.head_dim
        return split_heads(Dense(width, (axes.EMBED, axes.JOINED_KV), name=name)(x), self.num_heads)

    def _project_output(self, mixed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        width = self.num_heads * self.head_dim
        return Dense(shape[-1], (axes.JOINED_KV, axes.EMBED), name='out')(mixed.reshape(*shape[:-1], width))


class LinearAttention(_LinearAttentionBase):
    """Linear self-attention (equation 5); a token mixer for encoders and decoders.

    While decoding, the layer caches running sums, so memory and time per token do not depend on the sequence length.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        query, key, value = (self._project_to_heads(name, x) for name in ('query', 'key', 'value'))
        query, key = feature_map(query), feature_map(key)
        value = dropout(self.dropout_rate, value, -1, deterministic=ctx.deterministic)
        if ctx.decode:
            cached_sums = self.variable('cache', 'cached_sums', _compute_initial_sums, key, value, ctx)
            if ctx.step is not None:
                cached_sums.value = jax.tree.map(jnp.add, cached_sums.value, _sum_tokens(key, value))
                mixed = _divide_by_denominators(*_multiply_queries_by_sums(query, cached_sums.value), value.dtype)
                return self._project_output(mixed, x.shape)
        mixed = linear_attention(query, key, value, ctx)
        if ctx.prefix is not None:
            ids = jnp.where(ctx.prefix, ctx.segment_ids, 0)
            prefix_ctx = dataclasses.replace(ctx, segment_ids=ids, causal=False)
            bidirectional = linear_attention(query, key, value, prefix_ctx)
            mixed = jnp.where(ctx.prefix[..., None, None], bidirectional, mixed)
        return self._project_output(mixed, x.shape)


def _compute_initial_sums(key: jax.Array, value: jax.Array, ctx: SequenceContext) -> KeyValueSums:
    """Returns the sums before the first decoding step: zeros, or the sums over a prompt without its last token."""
    is_summed = False if ctx.cache_slots is None else cache.mask_before_last_token(ctx)[..., None, None]
    return _sum_tokens(jnp.where(is_summed, key, 0), jnp.where(is_summed, value, 0))


class LinearCrossAttention(_LinearAttentionBase):
    """Linear cross-attention of decoder tokens to the encoder's output in `ctx.memory`.

    While decoding, the first call computes and caches the sums over the memory, which all beams share.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        memory = require_encoder_memory(ctx, 'LinearCrossAttention', 'LinearAttention')
        shape = x.shape
        if ctx.decode:
            x = cache.reshape_beams_to_queries(x, memory.hidden.shape[0])
        query = feature_map(self._project_to_heads('query', x))
        if ctx.packed:
            mixed = self._attend_to_packed_memory(query, memory, ctx)
        else:
            mixed = _divide_by_denominators(
                *_multiply_queries_by_sums(query, self._compute_memory_sums(memory, ctx)), query.dtype
            )
        return self._project_output(mixed, shape)

    def _project_keys_and_values(self, memory: EncoderMemory, ctx: SequenceContext) -> tuple[jax.Array, jax.Array]:
        """Returns phi(k) and v of the encoder's output, [batch, memory_length, heads, kv] each, zero at padding."""
        is_token = memory.context.is_token[..., None, None]
        key = jnp.where(is_token, feature_map(self._project_to_heads('key', memory.hidden)), 0)
        value = jnp.where(is_token, self._project_to_heads('value', memory.hidden), 0)
        return key, dropout(self.dropout_rate, value, -1, deterministic=ctx.deterministic)

    def _compute_memory_sums(self, memory: EncoderMemory, ctx: SequenceContext) -> KeyValueSums:
        if not ctx.decode:
            key, value = self._project_keys_and_values(memory, ctx)
            return _sum_tokens(key, value, key.dtype)
        sums = self.variable('cache', 'memory_sums', lambda: _sum_tokens(*self._project_keys_and_values(memory, ctx)))
        return sums.value

    def _attend_to_packed_memory(self, query: jax.Array, memory: EncoderMemory, ctx: SequenceContext) -> jax.Array:
        """Computes cross-attention for packed rows, one example at a time.

        A feature of ones is appended to the values, so that its output is the denominator of equation 5.
        """
        key, value = self._project_keys_and_values(memory, ctx)
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
        mixed = apply_token_mlp(
            key,
            value.astype(jnp.float32),
            query.astype(jnp.float32),
            memory.context.segment_ids,
            ctx.segment_ids,
            packed=True,
            activation=lambda total: total,
        )
        return _divide_by_denominators(mixed[..., :-1], mixed[..., -1], query.dtype)
