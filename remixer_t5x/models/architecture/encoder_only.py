"""Encoder-only models with an optional head, for masked language models and classifiers.

    x = Embed(tokens)             or norm(Embed(tokens) + positions + token types) with the input layer of BERT
    h = Stack(x)
    logits = head(h) Embed^T + b  (BertHead: Devlin et al. 2019, section 3.1), or h Embed^T / sqrt(D) without a head

T5 scales the input of a tied output projection by 1 / sqrt(D); BERT instead initializes the embeddings with standard
deviation 0.02.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext, make_sequence_context
from remixer_t5x.models.architecture.encoder_decoder import parse_dtype
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.dense import Dense, create_param
from remixer_t5x.models.layers.embedding import Embed, scale_projection_input
from remixer_t5x.models.layers.norms import LayerNorm, NormFactory
from remixer_t5x.models.layers.positions import LearnedPositions

# Factory of modules that compute the stack's input from the embeddings, the context and the token types (or None).
InputLayerFactory = Callable[..., Callable[[jax.Array, SequenceContext, jax.Array], jax.Array]]

_BERT_INIT = nn.initializers.normal(stddev=0.02)


class EncoderOnly(nn.Module):
    """Encoder that maps tokens [batch, length] to features [batch, length, embed]; id 0 is padding.

    The other attributes are documented in `EncoderDecoder`.

    Attributes:
        input_layer: factory of a module (x, ctx, token_types) -> x before the stack, such as `BertInput`, or None.
        head_layer: factory of the head, or None. In masked language models, the head is a module x -> x with a `bias`
            over the vocabulary (`BertHead`); in other models, it is a module (x, ctx) -> y.
        sentence_layer: factory of a module from mean-pooled features to text embeddings, such as `SentenceProjection`.
        separator_id: id of the token between two texts, such as BERT's [SEP]; later tokens have token type 1 unless
            `encoder_token_types` is passed. If None, all tokens have type 0.
    """

    vocab_size: ranges.Count
    embed_dim: ranges.Count
    encoder_stack: Callable[..., Stack]
    dtype: str = 'float32'
    embedding: Callable[..., Embed] = Embed
    input_layer: InputLayerFactory | None = None
    head_layer: Callable[..., nn.Module] | None = None
    base_embed_dim: ranges.Count | None = None
    sentence_layer: Callable[..., Callable[[jax.Array], jax.Array]] | None = None
    separator_id: int | None = None

    def setup(self) -> None:
        self.token_embedder = self.embedding(self.vocab_size, self.embed_dim, dtype=parse_dtype(self.dtype))
        self.encoder = self.encoder_stack()
        if self.input_layer is not None:
            self.input = self.input_layer()
        if self.head_layer is not None:
            self.head = self.head_layer()
        if self.sentence_layer is not None:
            self.sentence = self.sentence_layer()

    def encode(
        self,
        encoder_input_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        encoder_positions: jax.Array | None = None,
        encoder_token_types: jax.Array | None = None,
        enable_dropout: bool = True,
    ) -> jax.Array:
        """Returns the encoder output, [batch, length, embed]; `encoder_token_types` requires an input layer."""
        ctx = make_sequence_context(
            encoder_input_tokens, encoder_segment_ids, encoder_positions, deterministic=not enable_dropout
        )
        x = self.token_embedder(encoder_input_tokens)
        if self.input_layer is not None:
            if encoder_token_types is None and self.separator_id is not None:
                encoder_token_types = compute_token_types(encoder_input_tokens, ctx, self.separator_id)
            x = self.input(x, ctx, encoder_token_types)
        return self.encoder(x, ctx)

    def predict_tokens(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the logits at each position, [batch, length, vocab]; see `encode` for the arguments."""
        hidden = self.encode(*args, **kwargs)
        if self.is_initializing() and self.sentence_layer is not None:
            self.sentence(hidden[:, 0])
        hidden = self.apply_output_head(hidden)
        logits = self.token_embedder.attend(hidden)
        return logits if self.head_layer is None else logits + self.head.bias.astype(logits.dtype)

    def project_sentence(self, mean: jax.Array, enable_dropout: bool = False) -> jax.Array:
        """Computes text embeddings, [texts, outputs], from mean-pooled encoder outputs, [texts, embed]."""
        return mean if self.sentence_layer is None else self.sentence(mean)

    def apply_output_head(self, hidden: jax.Array) -> jax.Array:
        """Applies the head to the encoder output; returns the input of the output projection, [..., embed]."""
        hidden = hidden if self.head_layer is None else self.head(hidden)
        return scale_projection_input(hidden, self.head_layer is None, self.base_embed_dim)

    @nn.nowrap
    def get_output_kernel(self, params: Mapping[str, Any]) -> jax.Array:
        """Returns the kernel of the output projection, [embed, vocab], from this module's unboxed parameters."""
        return params['token_embedder']['embedding'].T

    @nn.nowrap
    def get_output_bias(self, params: Mapping[str, Any]) -> jax.Array | None:
        """Returns the bias of the output projection, [vocab], or None."""
        return None if self.head_layer is None else params['head']['bias']

    def classify(
        self,
        encoder_input_tokens: jax.Array,
        encoder_token_types: jax.Array | None = None,
        enable_dropout: bool = True,
    ) -> jax.Array:
        """Returns the output of the classification head in float32; each row must contain a single example."""
        hidden = self.encode(encoder_input_tokens, None, None, encoder_token_types, enable_dropout)
        return self.head(hidden, make_sequence_context(encoder_input_tokens, deterministic=not enable_dropout))


def compute_token_types(tokens: jax.Array, ctx: SequenceContext, separator_id: int) -> jax.Array:
    """Returns BERT's token types, [batch, length] int32: 0 up to the first separator of an example, then 1."""
    separators = jnp.cumsum(tokens == separator_id, axis=-1) - (tokens == separator_id)
    if ctx.packed:
        starts = jnp.arange(tokens.shape[-1]) - ctx.positions
        separators = separators - jnp.take_along_axis(separators, starts, axis=-1)
    return ((separators > 0) & ctx.is_token).astype(jnp.int32)


class BertInput(nn.Module):
    """Input layer of BERT, `norm(x + position + token type)` (Devlin et al. 2019, figure 2).

    Attributes:
        max_length: number of learned position embeddings, which is the maximum length of a row.
        token_types: number of learned token type embeddings; 2 in BERT. With 1, all tokens have type 0.
    """

    max_length: ranges.Count
    token_types: ranges.Count = 2
    norm: NormFactory = LayerNorm

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext, token_types: jax.Array | None = None) -> jax.Array:
        """Computes the input of the stack; `token_types` is [batch, length] int32, or None if all types are 0."""
        width = x.shape[-1]
        x = x + LearnedPositions(self.max_length, name='positions')(width, ctx).astype(x.dtype)
        shape = (self.token_types, width)
        table = create_param(self, 'token_types', _BERT_INIT, (None, axes.EMBED), shape).astype(x.dtype)
        x = x + (table[0] if token_types is None or self.token_types == 1 else jnp.take(table, token_types, axis=0))
        return self.norm(name='norm')(x)


class NormInput(nn.Module):
    """Input layer of ModernBERT (Warner et al. 2024), which only normalizes the embeddings."""

    norm: NormFactory = LayerNorm

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext, token_types: jax.Array | None = None) -> jax.Array:
        return self.norm(name='norm')(x)


class BertHead(nn.Module):
    """Masked language modelling head of BERT, `norm(gelu(x W + b))`, and the bias of the output projection.

    Attributes:
        use_bias: whether the dense layer has a bias b; False in ModernBERT.
    """

    vocab_size: ranges.Count
    norm: NormFactory = LayerNorm
    use_bias: bool = True

    def setup(self) -> None:
        self.bias = create_param(self, 'bias', nn.initializers.zeros, (axes.VOCAB,), (self.vocab_size,))
        self.output_norm = self.norm()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The output axis has no logical name, because `embed` may be sharded and a mesh axis can shard only one axis.
        dense = Dense(x.shape[-1], (axes.EMBED, None), _BERT_INIT, use_bias=self.use_bias, name='dense')
        return self.output_norm(nn.gelu(dense(x), approximate=False))


Pooling = Callable[[jax.Array, SequenceContext], jax.Array]


def first_token(hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Returns the features of the first token, [batch, embed], for texts that begin with BERT's `[CLS]`."""
    return hidden[:, 0]


def mean_of_tokens(hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Returns the mean over the tokens of each row, [batch, embed], computed in float32; 0 for empty rows."""
    is_token = ctx.is_token[..., None].astype(jnp.float32)
    total = jnp.sum(hidden.astype(jnp.float32) * is_token, axis=1)
    return (total / jnp.maximum(jnp.sum(is_token, axis=1), 1.0)).astype(hidden.dtype)


class SentenceProjection(nn.Module):
    """Projection layer of Sentence-T5 (Ni et al. 2021), `y / |y|` with `y = x W`, [texts, outputs] float32.

    Attributes:
        outputs: number of features of a sentence embedding.
        max_length: maximum number of tokens of a text; used only for exports to other libraries.
    """

    outputs: ranges.Count
    max_length: ranges.Count = 512

    @nn.compact
    def __call__(self, pooled: jax.Array) -> jax.Array:
        y = Dense(self.outputs, (axes.EMBED, axes.OUTPUTS), _BERT_INIT, name='dense')(pooled.astype(jnp.float32))
        return y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-12)


class TransformedClassifierHead(nn.Module):
    """Classification head of ModernBERT, `norm(gelu(p W_p)) W + b` for pooled features p.

    Attributes:
        outputs: number of labels, or 1 for regression.
        pooling: pooling function, `first_token` or `mean_of_tokens`.
    """

    outputs: ranges.Count
    pooling: Pooling = mean_of_tokens
    norm: NormFactory = LayerNorm
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        pooled = self.pooling(hidden, ctx)
        pooled = nn.gelu(
            Dense(pooled.shape[-1], (axes.EMBED, None), _BERT_INIT, name='dense')(pooled), approximate=False
        )
        pooled = nn.Dropout(self.dropout_rate)(self.norm(name='output_norm')(pooled), deterministic=ctx.deterministic)
        output = Dense(self.outputs, (axes.EMBED, axes.OUTPUTS), _BERT_INIT, use_bias=True, name='output')
        return output(pooled.astype(jnp.float32))


class ClassifierHead(nn.Module):
    """Pooler and classification head of BERT (Devlin et al. 2019).

    Computes `dropout(tanh(p W_p + b_p)) W + b` for pooled features p, [batch, outputs] float32, or without pooling
    `dropout(h) W + b` for the features h of each token, [batch, length, outputs] float32.

    Attributes:
        outputs: number of labels, or 1 for regression.
        pooling: pooling function, `first_token` or `mean_of_tokens`, or None.
    """

    outputs: ranges.Count
    pooling: Pooling | None = mean_of_tokens
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        features = hidden
        if self.pooling is not None:
            dense = Dense(hidden.shape[-1], (axes.EMBED, None), _BERT_INIT, use_bias=True, name='dense')
            features = jnp.tanh(dense(self.pooling(hidden, ctx)))
        features = nn.Dropout(self.dropout_rate)(features, deterministic=ctx.deterministic)
        output = Dense(self.outputs, (axes.EMBED, axes.OUTPUTS), _BERT_INIT, use_bias=True, name='output')
        return output(features.astype(jnp.float32))
