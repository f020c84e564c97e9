"""Tiny encoder-decoders with random parameters."""

import functools
from typing import Any

import jax
from flax import linen as nn

from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.attention import CrossAttention, SelfAttention
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from remixer_t5x.models.sublayers.remixer import Remixer

FEED_FORWARD = {
    't5': functools.partial(GatedMLP, hidden_dim=12),
    'remixer': functools.partial(Remixer, hidden_dim=12, max_length=16),
}


@functools.cache
def make_seq2seq(
    kind: str, vocab: int, layers: tuple[int, ...] = (2,), dtype: str = 'float32'
) -> tuple[Seq2Seq, dict[str, Any]]:
    """Returns a model of attention and `FEED_FORWARD[kind]` with runs of `layers`, and its initial parameters."""
    attention = functools.partial(SelfAttention, num_heads=2, head_dim=4)
    cross = functools.partial(CrossAttention, num_heads=2, head_dim=4)

    def stack(*sublayers):
        bias = functools.partial(RelativePositionBias, num_heads=2)
        layer = functools.partial(PreNorm, sublayers=sublayers)
        return functools.partial(Stack, runs=tuple((layer, count) for count in layers), position_bias=bias)

    encoder, decoder = stack(attention, FEED_FORWARD[kind]), stack(attention, cross, FEED_FORWARD[kind])
    model = Seq2Seq(EncoderDecoder(vocab, 8, encoder, decoder, dtype))
    shapes = {'encoder_input_tokens': (1, 5), 'decoder_target_tokens': (1, 3)}
    return model, nn.unbox(jax.jit(lambda key: model.init(key, shapes))(jax.random.key(0)))
