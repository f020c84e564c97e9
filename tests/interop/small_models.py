"""Small encoder-decoders, built without gin, whose factories would read it at every trace."""

import functools

import jax
import numpy as np

from remixer_t5x.devices.partition import unbox
from remixer_t5x.models import interface
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.attention import CrossAttention, SelfAttention


def t5(encoder_mlp, decoder_mlp, layers, vocab_size, embed_dim, head_dim=4, **settings) -> Seq2Seq:
    """Returns a T5 with two heads and these feed-forward sublayers; `layers` are those of (encoder, decoder)."""
    self_attention, cross_attention = (
        functools.partial(kind, num_heads=2, head_dim=head_dim) for kind in (SelfAttention, CrossAttention)
    )

    def stack(count, *sublayers):
        layer = functools.partial(PreNorm, sublayers=sublayers)
        bias = functools.partial(RelativePositionBias, num_heads=2)
        return functools.partial(Stack, runs=((layer, count),), position_bias=bias)

    encoder = stack(layers[0], self_attention, encoder_mlp)
    decoder = stack(layers[1], self_attention, cross_attention, decoder_mlp)
    return Seq2Seq(EncoderDecoder(vocab_size, embed_dim, encoder, decoder, **settings))


@functools.cache
def abstract_params(model):
    """Returns the shapes of the parameters."""
    return unbox(
        interface.compute_param_shapes(model, {'encoder_input_tokens': (1, 4), 'decoder_target_tokens': (1, 4)})
    )


def random_params(model, seed=0):
    """Returns parameters with a standard deviation of 1."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), abstract_params(model))
