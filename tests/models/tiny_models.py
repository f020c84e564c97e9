"""Tiny encoder-decoders, with random parameters and with those of Hugging Face's T5 v1.1."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.losses import CrossEntropy
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.attention import CrossAttention, SelfAttention
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from remixer_t5x.models.sublayers.remixer import Remixer

FEED_FORWARD = {
    't5': functools.partial(GatedMLP, hidden_dim=12),
    'remixer': functools.partial(Remixer, hidden_dim=12, max_length=16),
}
T5 = {'num_heads': 4, 'head_dim': 8}
T5_MLP, T5_EMBED, T5_VOCAB = 48, 32, 96


def make_stack(*sublayers: Any, layers: tuple[int, ...], num_heads: int) -> functools.partial:
    """Returns a factory for a stack with one run of layers for each number in `layers`."""
    bias = functools.partial(RelativePositionBias, num_heads=num_heads)
    layer = functools.partial(PreNorm, sublayers=sublayers)
    return functools.partial(Stack, runs=tuple((layer, count) for count in layers), position_bias=bias)


@functools.cache
def make_seq2seq(
    kind: str, vocab: int, layers: tuple[int, ...] = (2,), dtype: str = 'float32'
) -> tuple[Seq2Seq, dict[str, Any]]:
    """Returns a model with attention, `FEED_FORWARD[kind]` and runs of `layers`, and its initial parameters."""
    attention = functools.partial(SelfAttention, num_heads=2, head_dim=4)
    cross = functools.partial(CrossAttention, num_heads=2, head_dim=4)

    stack = functools.partial(make_stack, layers=layers, num_heads=2)
    encoder, decoder = stack(attention, FEED_FORWARD[kind]), stack(attention, cross, FEED_FORWARD[kind])
    model = Seq2Seq(EncoderDecoder(vocab, 8, encoder, decoder, dtype))
    shapes = {'encoder_input_tokens': (1, 5), 'decoder_target_tokens': (1, 3)}
    return model, nn.unbox(jax.jit(lambda key: model.init(key, shapes))(jax.random.key(0)))


def make_t5(decoder_layers: int) -> Seq2Seq:
    """Returns the model of `tests/golden/make_t5_tiny.py` with two encoder layers."""
    attention, cross = functools.partial(SelfAttention, **T5), functools.partial(CrossAttention, **T5)
    mlp = functools.partial(GatedMLP, hidden_dim=T5_MLP)
    encoder = make_stack(attention, mlp, layers=(2,), num_heads=T5['num_heads'])
    decoder = make_stack(attention, cross, mlp, layers=(decoder_layers,), num_heads=T5['num_heads'])
    return Seq2Seq(EncoderDecoder(T5_VOCAB, T5_EMBED, encoder, decoder), CrossEntropy(z_loss=0.0, chunk_length=4))


def t5_params(weights: dict[str, np.ndarray], decoder_layers: int) -> dict[str, Any]:
    """Returns parameters of `make_t5` from a Hugging Face state dict."""
    layers = {'encoder': 2, 'decoder': decoder_layers}

    def attention(stack, sublayer, kind):
        names = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}
        return {ours: {'kernel': stacked(stack, f'layer.{sublayer}.{kind}.{hf}')} for ours, hf in names.items()}

    def stacked(stack, name):
        return np.stack([weights[f'{stack}.block.{i}.{name}.weight'].T for i in range(layers[stack])])

    def parameters(stack):
        last = 1 if stack == 'encoder' else 2
        layer = {
            'self_attention': attention(stack, 0, 'SelfAttention'),
            'self_attention_norm': {'scale': stacked(stack, 'layer.0.layer_norm')},
            'gated_mlp': {
                name: {'kernel': stacked(stack, f'layer.{last}.DenseReluDense.{name}')}
                for name in ('wi_0', 'wi_1', 'wo')
            },
            'gated_mlp_norm': {'scale': stacked(stack, f'layer.{last}.layer_norm')},
        }
        if stack == 'decoder':
            layer['cross_attention'] = attention(stack, 1, 'EncDecAttention')
            layer['cross_attention_norm'] = {'scale': stacked(stack, 'layer.1.layer_norm')}
        bias = weights[f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'].T
        return {
            'run_0': {'layer': layer},
            'position_bias': {'embedding': bias},
            'final_norm': {'scale': weights[f'{stack}.final_layer_norm.weight']},
        }

    tree = {
        'token_embedder': {'embedding': weights['shared.weight']},
        'logits': {'kernel': weights['lm_head.weight'].T},
        'encoder': parameters('encoder'),
        'decoder': parameters('decoder'),
    }
    return jax.tree.map(jnp.asarray, tree)
