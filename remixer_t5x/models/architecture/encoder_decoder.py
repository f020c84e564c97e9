"""T5's encoder-decoder (Raffel et al. 2019) with configurable sublayers.

The encoder and the decoder share the token embedding, or have separate embeddings as in T5Gemma. The output projection
has separate weights, as in T5.1.1, or is the transposed embedding of the decoder, as in T5 1.0. Arguments are named as
in T5X.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import EncoderMemory, make_sequence_context
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.attention_formula import cap_logits
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.layers.embedding import Embed, scale_projection_input


def parse_dtype(name: str) -> jnp.dtype:
    """Parses 'float32' or 'bfloat16'; raises UserError for other dtypes. In float16, T5's activations overflow."""
    if str(name) not in ('float32', 'bfloat16'):
        raise UserError(f"DTYPE must be 'bfloat16' or 'float32', got {name!r}; set DTYPE = 'bfloat16'")
    return jnp.dtype(name)


class EncoderDecoder(nn.Module):
    """Encoder-decoder that maps input and decoder tokens [batch, length] to the logits of the next decoder tokens.

    Trailing zeros of the inputs are padding. Padding in the decoder input need not be masked, because the decoder is
    causal.

    Attributes:
        embed_dim: width of the residual stream, D.
        decoder_stack: factory of the decoder's `Stack`, with cross-attention.
        dtype: dtype of activations; parameters are float32.
        embedding: factory of the token embedding.
        tied: whether the output projection is the transposed token embedding.
        scaled_output: whether to scale the input of the output projection by embed_dim ** -0.5, as in T5 1.0.
        base_embed_dim: base width of muP (`optim.mup`), which is required for a tied output; None without muP.
        shared_embedding: whether the encoder and the decoder share one token embedding.
        begin_id: id whose embedding the decoder uses for the start token, id 0.
        logit_softcap: bound c of the output logits, `c tanh(logits / c)`, as in Gemma 2; None for no bound.
    """

    vocab_size: ranges.Count
    embed_dim: ranges.Count
    encoder_stack: Callable[..., Stack]
    decoder_stack: Callable[..., Stack]
    dtype: str = 'float32'
    embedding: Callable[..., Embed] = Embed
    tied: bool = False
    scaled_output: bool = False
    base_embed_dim: ranges.Count | None = None
    shared_embedding: bool = True
    begin_id: int = 0
    logit_softcap: ranges.Positive | None = None

    def setup(self) -> None:
        self.token_embedder = self.embedding(self.vocab_size, self.embed_dim, dtype=parse_dtype(self.dtype))
        if not self.shared_embedding:
            self.decoder_token_embedder = self.embedding(self.vocab_size, self.embed_dim, dtype=parse_dtype(self.dtype))
        self.encoder = self.encoder_stack()
        self.decoder = self.decoder_stack()
        if not self.tied:
            self.logits = Dense(self.vocab_size, (axes.EMBED, axes.VOCAB))

    def __call__(
        self,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        *,
        encoder_segment_ids: jax.Array | None = None,
        encoder_positions: jax.Array | None = None,
        enable_dropout: bool = True,
        **decoder: Any,
    ) -> jax.Array:
        """Returns the logits [batch, target_length, vocab]; `decoder` contains arguments of `decode_hidden`."""
        encoded = self.encode(encoder_input_tokens, encoder_segment_ids, encoder_positions, enable_dropout)
        return self.decode(
            encoded,
            encoder_input_tokens,
            decoder_input_tokens,
            encoder_segment_ids=encoder_segment_ids,
            enable_dropout=enable_dropout,
            **decoder,
        )

    def encode(
        self,
        encoder_input_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        encoder_positions: jax.Array | None = None,
        enable_dropout: bool = True,
    ) -> jax.Array:
        """Returns the encoder output, [batch, input_length, embed]."""
        ctx = make_sequence_context(
            encoder_input_tokens, encoder_segment_ids, encoder_positions, deterministic=not enable_dropout
        )
        return self.encoder(self.token_embedder(encoder_input_tokens), ctx)

    def decode(self, *args, **kwargs) -> jax.Array:
        """Returns the logits of the next tokens; see `decode_hidden` for the arguments."""
        hidden = self.decode_hidden(*args, **kwargs)
        logits = self._get_decoder_embedder().attend(hidden) if self.tied else self.logits(hidden)
        return cap_logits(logits, self.logit_softcap)

    def _get_decoder_embedder(self) -> nn.Module:
        return self.token_embedder if self.shared_embedding else self.decoder_token_embedder

    @nn.nowrap
    def get_output_kernel(self, params: Mapping[str, Any]) -> jax.Array:
        """Returns the kernel of the output projection, [embed, vocab], from this module's unboxed parameters.

        The loss multiplies the output of `decode_hidden` by this kernel in chunks.
        """
        if not self.tied:
            return params['logits']['kernel']
        return params['token_embedder' if self.shared_embedding else 'decoder_token_embedder']['embedding'].T

    def decode_hidden(
        self,
        encoded: jax.Array,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        *,
        encoder_segment_ids: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        enable_dropout: bool = True,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> jax.Array:
        """Returns the input of the output projection, [batch, target_length, embed].

        If `decode` is True, the first call allocates a cache for `decoder_input_tokens.shape[1]` positions. Each later
        call processes one token per row, [batch, 1], and requires the number of positions, `max_decode_length`.
        Decoding does not support packed rows.
        """
        memory = EncoderMemory(encoded, make_sequence_context(encoder_input_tokens, encoder_segment_ids))
        flags = {'causal': True, 'decode': decode, 'deterministic': not enable_dropout, 'memory': memory}
        ctx = make_sequence_context(
            jnp.ones_like(decoder_input_tokens), decoder_segment_ids, decoder_positions, **flags
        )
        if self.begin_id:
            decoder_input_tokens = jnp.where(decoder_input_tokens == 0, self.begin_id, decoder_input_tokens)
        hidden = self.decoder(self._get_decoder_embedder()(decoder_input_tokens), ctx, max_decode_length)
        return scale_projection_input(hidden, self.scaled_output, self.base_embed_dim if self.tied else None)
