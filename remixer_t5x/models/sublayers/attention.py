"""Multi-head attention (Vaswani et al. 2017, section 3.2) of T5, BERT and GPT-2.

    head_i = softmax(q_i k_i^T + bias) v_i,   q = X W_q,   k = M W_k,   v = M W_v,   Y = [head_1 | ... | head_h] W_o

X and Y are [batch, length, D], and each head has width d. In self-attention M is X; in cross-attention M is the
encoder's output. T5 has no biases, and folds the factor 1/sqrt(d) of the logits into the initializer of W_q, which is
equivalent under Adafactor. `SelfAttention` and `CrossAttention` support the options of more recent models:

    grouped queries   h / num_kv_heads heads of q share each head of k and v (Ainslie et al. 2023)
    QK norm           q = RMSNorm(x W_q) / sqrt(d), k = RMSNorm(M W_k), per head (Henry et al. 2020)
    softcap           the logits are c tanh(q k^T / c) + bias (Gemma 2, Riviere et al. 2024)
    RoPE              q and k are rotated by position; self-attention only (`layers.positions.RotaryEmbedding`)
    sliding window    tokens attend only to nearby tokens; self-attention only (Beltagy et al. 2020)
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext, require_encoder_memory
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.attention_formula import Bias
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.cached_attention import attend_to_memory, attend_to_sequence
from remixer_t5x.models.layers.dense import Dense, split_heads
from remixer_t5x.models.layers.norms import RMSNorm
from remixer_t5x.models.layers.positions import BiasFactory, RelativePositionBias, RotaryFactory

_IN_AXES, _OUT_AXES = (axes.EMBED, axes.JOINED_KV), (axes.JOINED_KV, axes.EMBED)
_BERT_INIT = nn.initializers.normal(stddev=0.02)


class _MultiHeadAttention(nn.Module):
    """Base class of the attention sublayers in this module, with their settings.

    Attributes:
        num_heads: number of attention heads.
        head_dim: width of a head's queries, keys and values, d.
        dropout_rate: dropout on the attention weights, with one mask for all queries.
    """

    num_heads: ranges.Count
    head_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0


class _T5Attention(_MultiHeadAttention):
    """Base class of T5's self-attention and cross-attention, with their settings and projections.

    Attributes:
        num_kv_heads: number of key and value heads; must divide `num_heads`. 1 selects multi-query attention, and None
            uses `num_heads`.
        qk_norm: whether to apply RMSNorm to each head of queries and keys.
        logit_softcap: smooth bound on the absolute value of q k^T, or None.
    """

    num_kv_heads: ranges.Count | None = None
    qk_norm: bool = False
    logit_softcap: ranges.Positive | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise UserError(f'NUM_KV_HEADS must divide NUM_HEADS = {self.num_heads}, got {self.num_kv_heads}')
        super().__post_init__()

    def _project_query(self, x: jax.Array) -> jax.Array:
        """Returns the queries, [batch, length, heads, kv]."""
        init = nn.initializers.variance_scaling(1.0 / self.head_dim, 'fan_in', 'normal')
        query = Dense(self.num_heads * self.head_dim, _IN_AXES, kernel_init=init, name='query')(x)
        query = self._normalize_heads('query', split_heads(query, self.num_heads))
        # QK norm would cancel the factor 1/sqrt(d) in the initializer.
        return query * self.head_dim**-0.5 if self.qk_norm else query

    def _project_key_or_value(self, name: str, x: jax.Array) -> jax.Array:
        """Returns the keys (`name` is 'key') or values (`name` is 'value') of x, [..., kv_heads, kv]."""
        num_heads = self.num_kv_heads or self.num_heads
        heads = split_heads(Dense(num_heads * self.head_dim, _IN_AXES, name=name)(x), num_heads)
        return self._normalize_heads(name, heads) if name == 'key' else heads

    def _normalize_heads(self, name: str, heads: jax.Array) -> jax.Array:
        return RMSNorm(axis=axes.KV, name=f'{name}_norm')(heads) if self.qk_norm else heads


class SelfAttention(_T5Attention):
    """T5's self-attention, a token mixer.

    Attributes:
        position_bias: factory of a module (number of keys, ctx) -> bias, which is separate for each layer as in umT5
            (Chung et al. 2023). If None, all layers of the stack share one bias, as in T5.
        rotary: factory of a module that rotates queries and keys by their positions, or None.
        sliding_window: tokens attend only to tokens at a distance below this number, in both directions in an encoder
            and only backwards in a decoder. None disables the limit. For encoders of Hugging Face transformers, set
            `config.sliding_window + 1`, because they also attend to tokens at the distance `config.sliding_window`.
    """

    position_bias: BiasFactory | None = None
    rotary: RotaryFactory | None = None
    sliding_window: ranges.Count | None = None

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        query = self._project_query(x)
        key, value = (self._project_key_or_value(name, x) for name in ('key', 'value'))
        if self.rotary is not None:
            rotary = self.rotary(name='rotary')
            query, key = rotary(query, ctx), rotary(key, ctx)
        bias = ctx.position_bias
        if self.position_bias is not None:
            bias = self.position_bias(name='position_bias')(ctx.num_keys, ctx)
        limits = self.logit_softcap, self.sliding_window
        mixed = attend_to_sequence(self, query, key, value, ctx, bias, self.dropout_rate, *limits)
        return Dense(x.shape[-1], _OUT_AXES, name='out')(mixed.reshape(*x.shape[:-1], -1))


class CrossAttention(_T5Attention):
    """T5's cross-attention: decoder tokens attend to the encoder's output in `ctx.memory`.

    While decoding, the first call computes and caches the keys and values of the memory, which all beams share.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        memory = require_encoder_memory(ctx, 'CrossAttention', 'SelfAttention')
        shape = x.shape
        if ctx.decode:
            x = cache.reshape_beams_to_queries(x, memory.hidden.shape[0])
        query = self._project_query(x)

        def project_memory(name: str) -> jax.Array:
            # Flatten the tokens: if the encoder and the decoder saved the encoder's output in equal shapes for the
            # backward pass, the TPU compiler would share a buffer and fill it with zeros (2% of a training step).
            tokens = memory.hidden.reshape(-1, memory.hidden.shape[-1])
            return self._project_key_or_value(name, tokens).reshape(*memory.hidden.shape[:2], -1, self.head_dim)

        mixed = attend_to_memory(self, query, project_memory, memory, ctx, self.dropout_rate, self.logit_softcap)
        return Dense(x.shape[-1], _OUT_AXES, name='out')(mixed.reshape(*shape[:-1], -1))


class ScaledAttention(_MultiHeadAttention):
    """Self-attention of BERT and GPT-2, `softmax(q k^T / sqrt(d)) v`, with biases on all projections.

    `ctx.position_bias` is ignored, because BERT and GPT-2 add position embeddings to the token embeddings.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        return self._attend_with_bias(x, ctx, None)

    def _attend_with_bias(self, x: jax.Array, ctx: SequenceContext, bias: Bias, content: bool = True) -> jax.Array:
        width = self.num_heads * self.head_dim

        def project_heads(name: str) -> jax.Array:
            projected = Dense(width, _IN_AXES, _BERT_INIT, use_bias=True, name=name)(x)
            return split_heads(projected, self.num_heads)

        value = project_heads('value')
        query, key = (project_heads('query'), project_heads('key')) if content else (jnp.zeros_like(value),) * 2
        mixed = attend_to_sequence(self, query * self.head_dim**-0.5, key, value, ctx, bias, self.dropout_rate)
        mixed = mixed.reshape(*x.shape[:-1], width)
        return Dense(x.shape[-1], _OUT_AXES, _BERT_INIT, use_bias=True, name='out')(mixed)


class RelativeAttention(ScaledAttention):
    """`ScaledAttention` with a separate position bias in each layer, `softmax(q k^T / sqrt(d) + bias) v`.

    If `content` is False, the layer computes `softmax(bias) v`, the baseline "rel pos - attn" in the gMLP paper (Liu et
    al. 2021, table 3), which is a Random Synthesizer (Tay et al. 2020).

    Attributes:
        position_bias: factory of a module (number of keys, ctx) -> bias.
    """

    position_bias: BiasFactory = RelativePositionBias
    content: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        bias = self.position_bias(num_heads=self.num_heads, name='position_bias')(ctx.num_keys, ctx)
        return self._attend_with_bias(x, ctx, bias, self.content)
