"""Decoder-only language models: one causal stack without cross-attention.

    x = Embed(tokens)        h = Stack(x)        logits = h W, or h Embed^T with a tied output

A prefix language model (Raffel et al. 2019, section 3.2.1) uses bidirectional attention for the first tokens of each
example. With learned positions, biases and a tied output, the model equals GPT-2 (Radford et al. 2019).
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
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.layers.embedding import Embed, scale_projection_input

# Logit of forbidden tokens, whose probability is 0 in float32. With -inf, the loss with label smoothing would be NaN.
_FORBIDDEN_LOGIT = -1e3


class DecoderOnly(nn.Module):
    """Decoder-only Transformer that maps tokens [batch, length] to the logits of the next tokens.

    Sequences start with id 0. Padding in the input need not be masked, because the decoder is causal.
    The other attributes are documented in `EncoderDecoder`.

    Attributes:
        begin_id: id whose embedding is used for the start token, such as GPT-2's end token. Unless it is 0, the model
            never predicts id 0.
    """

    vocab_size: ranges.Count
    embed_dim: ranges.Count
    decoder_stack: Callable[..., Stack]
    dtype: str = 'float32'
    embedding: Callable[..., Embed] = Embed
    tied: bool = False
    scaled_output: bool = False
    base_embed_dim: ranges.Count | None = None
    begin_id: int = 0

    def setup(self) -> None:
        self.token_embedder = self.embedding(self.vocab_size, self.embed_dim, dtype=parse_dtype(self.dtype))
        self.decoder = self.decoder_stack()
        if not self.tied:
            self.logits = Dense(self.vocab_size, (axes.EMBED, axes.VOCAB))

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the logits of the next tokens, [batch, length, vocab]; see `decode_hidden` for the arguments."""
        hidden = self.decode_hidden(*args, **kwargs)[..., : self.embed_dim]
        logits = self.token_embedder.attend(hidden) if self.tied else self.logits(hidden)
        return logits.at[..., 0].set(_FORBIDDEN_LOGIT) if self.begin_id else logits

    @nn.nowrap
    def get_output_kernel(self, params: Mapping[str, Any]) -> jax.Array:
        """Returns the kernel of the output projection, [embed, vocab], from this module's unboxed parameters.

        Unless `begin_id` is 0, an additional row contains the bias of each token; see `_run_decoder`.
        """
        kernel = params['token_embedder']['embedding'].T if self.tied else params['logits']['kernel']
        if not self.begin_id:
            return kernel
        bias = jnp.zeros_like(kernel[:1]).at[:, 0].set(_FORBIDDEN_LOGIT)
        return jnp.concatenate([kernel.at[:, 0].set(0), bias])

    def decode_hidden(
        self,
        decoder_input_tokens: jax.Array,
        *,
        decoder_segment_ids: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        prefix: jax.Array | None = None,
        enable_dropout: bool = True,
    ) -> jax.Array:
        """Returns the input of the output projection, [batch, length, embed].

        Args:
            decoder_input_tokens: [batch, length] int32, the targets shifted by one position.
            decoder_segment_ids: [batch, length] int32, example ids in packed rows, or None; 0 is padding.
            decoder_positions: [batch, length] int32, position of each token in its example, or None.
            prefix: [batch, length] bool, True for tokens with bidirectional attention, or None.
        """
        ctx = make_sequence_context(
            jnp.ones_like(decoder_input_tokens),
            decoder_segment_ids,
            decoder_positions,
            causal=True,
            deterministic=not enable_dropout,
            prefix=prefix,
        )
        return self._run_decoder(decoder_input_tokens, ctx)

    def prefill_prompts(self, tokens: jax.Array, is_token: jax.Array, slots: int, bidirectional: bool) -> jax.Array:
        """Allocates the caches and fills them with the prompts. Then call `decode_next_hidden` with their last tokens.

        Args:
            tokens: [batch, length] int32, the start token and the prompt of each row.
            is_token: [batch, length] bool, False after the end of a prompt.
            slots: number of positions to allocate for the prompt and the generated tokens.
            bidirectional: whether attention is bidirectional over the prompt.
        """
        ctx = make_sequence_context(
            is_token.astype(jnp.int32),
            causal=True,
            decode=True,
            cache_slots=slots,
            prefix=is_token if bidirectional else None,
        )
        return self._run_decoder(tokens, ctx)

    def decode_next_hidden(self, tokens: jax.Array, slots: int) -> jax.Array:
        """Returns the input of the output projection, [batch, 1, embed], for one token per row, [batch, 1].

        `slots` is the number of positions in the caches.
        """
        ctx = make_sequence_context(jnp.ones_like(tokens), causal=True, decode=True)
        return self._run_decoder(tokens, ctx, slots)

    def _run_decoder(self, tokens: jax.Array, ctx: SequenceContext, slots: int | None = None) -> jax.Array:
        """Embeds the tokens and returns the input of the output projection, [batch, length, embed]."""
        if self.begin_id:
            tokens = jnp.where(tokens == 0, self.begin_id, tokens)
        hidden = self.decoder(self.token_embedder(tokens), ctx, slots)
        hidden = scale_projection_input(hidden, self.scaled_output, self.base_embed_dim if self.tied else None)
        if not self.begin_id:
            return hidden
        # Append a constant feature of 1 for the bias in `get_output_kernel`; the loss has no bias argument.
        return jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)
